"""What kernels on one database say to each other about pools: who has something left, and that limits were set."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.config import LEASE_S
from ringfence.kernel.journal.store_pools import CHANNEL_POOL, Place
from ringfence.kernel.journal.types import JournalError, KernelKey

if TYPE_CHECKING:
    from ringfence.kernel.journal.store import Store
    from ringfence.kernel.pools import Pools

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""How often one looks whether those who are waited for are still alive."""


class Others:
    """The other kernels, as the pools of one know them."""

    def __init__(self, house: Pools, store: Store, kernel: KernelKey) -> None:
        self._house = house
        self._store = store
        self._kernel = kernel
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[set[int], asyncio.Event]] = {}

    async def ask(self, place: Place) -> None:
        """Have them give back what they have not given out; one that doesn't answer is waited for until its lease is over.

        Raises:
            JournalError: the database is away.
        """
        holders = set(await self._store.pool_holders(self._kernel, place))
        if not holders:
            return
        number = next(self._numbers)
        said, event = self._answers[number] = (set[int](), asyncio.Event())
        question = {"ask": [self._kernel, number], "place": [place.pool, place.name, place.opens.isoformat()]}
        try:
            await self._store.notify(CHANNEL_POOL, json.dumps(question))
            until = time.monotonic() + 2 * LEASE_S
            while not holders <= said and time.monotonic() < until:
                event.clear()
                try:
                    async with asyncio.timeout(LOOK_S):
                        await event.wait()
                except TimeoutError:
                    holders &= set(await self._store.pool_holders(self._kernel, place))
        finally:
            del self._answers[number]

    def notice(self, payload: str) -> None:
        """One asks, answers, or says that limits were set; empty: after a reconnect, nobody knows what was said."""
        said: dict[str, Any] = json.loads(payload) if payload else {"limits": True}
        if "answer" in said:
            kernel, number = said["answer"]
            waits = self._answers.get(number) if kernel == self._kernel else None
            if waits is not None:
                waits[0].add(said["of"])
                waits[1].set()
        elif "ask" in said:
            if said["ask"][0] != self._kernel:
                self._house.spawn(self._answer(said))
        elif "rate" in said or "hold" in said:
            self._house.rates.notice(said)
        elif self._house.declared and said.get("of") != self._kernel:
            self._house.spawn(self._limits_moved())

    async def _answer(self, said: Mapping[str, Any]) -> None:
        pool, name, opens = said["place"]
        place = Place(pool=pool, name=name, opens=datetime.fromisoformat(opens))
        try:
            await self._house.limits_again()
            await self._house.give_back(self._house.at(place))
            answer = {"answer": said["ask"], "of": self._kernel}
            await self._store.notify(CHANNEL_POOL, json.dumps(answer))
        except JournalError as error:
            log.warning("another kernel's question about the pool `%s` can't be answered: %s", pool, error)

    async def _limits_moved(self) -> None:
        try:
            await self._house.relimit(self._house.declared)
            await self._house.upkeep.look()
        except JournalError as error:
            log.warning("limits of pools can't be read now: %s", error)

    async def announce(self) -> None:
        """Tell them that limits were set.

        Raises:
            JournalError: the database is away.
        """
        await self._store.notify(CHANNEL_POOL, json.dumps({"limits": True, "of": self._kernel}))
