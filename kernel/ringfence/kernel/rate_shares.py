"""Rates of upstreams over all kernels of one database: each goes by a part, which the database gives out.

While one kernel alone asks an upstream it has the whole rate, and asks the database for nothing. Who begins to ask tells the
others, and they give up as much as is its; who asks no more gives its part back.

INVARIANT: a kernel goes by no part while the database is asked about it, so all of them together never go by more than the rate.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.journal.store_pools import CHANNEL_POOL
from ringfence.kernel.journal.types import JournalError, KernelKey
from ringfence.syscalls.upstream import Upstream, share, upstreams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ringfence.kernel.journal.store import Store
    from ringfence.policy.units import Rate

log = logging.getLogger(__name__)

IDLE_S: Final = 10.0
"""A part of which nobody took a call for so long goes back."""
AGAIN_S: Final = 2.0
"""How often a kernel that has not all of a rate looks whether more of it is free."""


@dataclass(slots=True)
class _Part:
    """What this kernel knows of its part of one rate.

    Attributes:
        asked_at: when the database was last asked, on the monotonic clock.
        gone: calls of the line that were gone then.
        asking: whether it is about to be asked.
        crowded: whether kernels take turns.
        held: whether the database has, or may have, a part for this kernel.
        rate: that the part is of.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked_at: float = 0.0
    gone: int = 0
    asking: bool = False
    crowded: bool = False
    held: bool = False
    rate: Rate | None = None


class RateShares:
    """The parts of one kernel."""

    def __init__(
        self, store: Store, kernel: KernelKey, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._store = store
        self._kernel = kernel
        self._spawn = spawn
        self._parts: dict[str, _Part] = {}

    def open(self) -> None:
        """Go by parts from here on."""
        share(self)

    async def close(self) -> None:
        """Give everything back: this kernel ends."""
        try:
            for upstream in upstreams():
                await self._renew(upstream, want=False)
        except JournalError as error:
            log.warning("parts of rates can't be given back: %s; they are free when the lease is over", error)
        share(None)

    def distrust(self) -> None:
        """After a lapsed lease others may have what this kernel had."""
        for upstream in upstreams():
            upstream.line.halt()
            upstream.pump()

    # -- what is asked --------------------------------------------------------------------------------------------

    def wanted(self, upstream: Upstream) -> None:
        """Somebody waits for a rate of which there is no part here."""
        part = self._part(upstream)
        if not part.asking and time.monotonic() - part.asked_at >= AGAIN_S / 4:
            part.asking = True
            self._spawn(self._ask(upstream))

    def told(self, upstream: Upstream, wait_s: float) -> None:
        """An upstream wants to be left alone: the other kernels leave it alone too."""
        self._spawn(self._say({"hold": upstream.key, "for_s": wait_s}))

    def notice(self, said: Mapping[str, Any]) -> None:
        """Another kernel wants a part, gave one up, or was told to leave an upstream alone."""
        if said.get("of") == self._kernel:
            return
        for upstream in upstreams():
            if upstream.key == said.get("hold"):
                upstream.hold(float(said["for_s"]))
            elif upstream.key == said.get("rate") and (upstream.line.part > 0 or len(upstream.line)):
                self._spawn(self._ask(upstream))

    async def look(self) -> None:
        """Give back what is not used, and look whether there is more.

        Raises:
            JournalError: the database is away.
        """
        now = time.monotonic()
        for upstream in upstreams():
            part, line = self._part(upstream), upstream.line
            idle = line.rate is None or (not len(line) and now - upstream.used_at > IDLE_S)
            if idle and part.held:
                await self._renew(upstream, want=False)
            elif not idle and (line.part < 1 or part.crowded) and now - part.asked_at >= AGAIN_S:
                await self._renew(upstream)

    # -- the database ---------------------------------------------------------------------------------------------

    def _part(self, upstream: Upstream) -> _Part:
        return self._parts.setdefault(upstream.key, _Part())

    async def _ask(self, upstream: Upstream) -> None:
        try:
            await self._renew(upstream)
        except JournalError as error:
            log.debug("a part of the rate of `%s` can't be had now: %s", upstream.key, error)

    async def _renew(self, upstream: Upstream, *, want: bool = True) -> None:
        part, line = self._part(upstream), upstream.line
        async with part.lock:
            rate = part.rate if line.rate is None or not want else line.rate
            part.asked_at = time.monotonic()
            if rate is None:
                part.asking = False
                return
            part.rate, part.held = rate, True
            used, part.gone = line.gone != part.gone, line.gone
            tokens = line.halt()
            try:
                found = await self._store.share_rate(
                    self._kernel,
                    upstream.key,
                    count=rate.count,
                    span_s=rate.per_s,
                    tokens=tokens,
                    want=want,
                    used=used,
                )
            finally:
                part.asking = False
            line.grant(found.part, found.tokens)
            part.crowded, part.held = found.crowded, want
        upstream.pump()
        if found.short or found.gave:
            await self._say({"rate": upstream.key})

    async def _say(self, what: Mapping[str, Any]) -> None:
        try:
            await self._store.notify(CHANNEL_POOL, json.dumps({**what, "of": self._kernel}))
        except JournalError as error:
            log.debug("other kernels can't be told of `%s` now: %s", what, error)
