"""What a kernel does about its pools from time to time: idle shares go back, those that wait are looked after."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.journal.types import JournalError
from ringfence.kernel.pool_shares import EPS, Share

if TYPE_CHECKING:
    from ringfence.kernel.journal.store import Store
    from ringfence.kernel.pools import Pools

log = logging.getLogger(__name__)

IDLE_S: Final = 2.0
"""A share of which nothing was drawn for so long gives its rest back."""
LOOK_S: Final = 1.0
FORGET_S: Final = 3600.0


class Upkeep:
    """The regular work on the pools of one kernel.

    Attributes:
        on_look: looks after agents that wait for a pool.
    """

    def __init__(self, house: Pools, store: Store) -> None:
        self._house = house
        self._store = store
        self.on_look: Callable[[], Coroutine[Any, Any, None]] | None = None

    async def run(self) -> None:
        """Give back what idle agents keep, and look after those that wait, until cancelled."""
        forgotten = time.monotonic()
        self._house.rates.open()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._house.rates.look()
                await self.sweep()
                await self.look()
                if self._house.declared and time.monotonic() - forgotten > FORGET_S:
                    forgotten = time.monotonic()
                    await self._store.forget_pools()
            except JournalError as error:
                log.debug("pools can't be looked after now: %s", error)

    async def look(self) -> None:
        """Look after agents that wait for a pool."""
        if self.on_look is not None:
            await self.on_look()

    async def sweep(self, idle_s: float = IDLE_S) -> None:
        """Give back what was not drawn from for so long.

        Raises:
            JournalError: the database is away.
        """
        now, wall = time.monotonic(), time.time()
        chosen: list[Share] = []
        for member in self._house.members.values():
            for key, share in list(member.shares.items()):
                over = wall >= share.closes_s
                if share.rest < -EPS or (share.rest > EPS and (over or now - share.drawn_at >= idle_s)):
                    chosen.append(share)
                elif over and share.held <= EPS and not share.unsaid:
                    del member.shares[key]
        await self._house.give_back(chosen)

    async def close(self) -> None:
        """Give everything back: this kernel ends."""
        for task in list(self._house.tasks):
            task.cancel()
        await asyncio.gather(*self._house.tasks, return_exceptions=True)
        await self._house.rates.close()
        try:
            await self._house.give_back(s for m in self._house.members.values() for s in m.shares.values())
        except JournalError as error:
            log.warning("what was taken of pools can't be given back: %s; it is counted again", error)
