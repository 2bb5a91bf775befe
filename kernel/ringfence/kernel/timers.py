"""One task for all timers of agents without a process: a heap of times on the wall clock.

An agent that sleeps costs an entry here and a row in the database. The clock may be set, or the machine suspended, so it is
looked at again at least every `LOOK_S`, beside a clock that nobody sets and that goes on while the machine is suspended.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias

from ringfence.kernel.journal.types import AgentKey

log = logging.getLogger(__name__)

LOOK_S: Final = 30.0
STEP_S: Final = 1.0
"""How far the two clocks drift apart between two looks before the wall clock counts as set."""
AT_ONCE: Final = 64
"""How many are dealt with at a time: they are put in line for a turn to live, which `slots` gives gradually."""

STORM: Final = 8
"""From so many wakes on that stand in each other's way they are begun before their time: one alone takes no longer than a start does."""
START_S: Final = 0.05
"""What a start is taken to need where they come one after the other."""
READY_S: Final = 1.0
"""How long before the time the last of a storm has begun: it is looked for one now and then only, and a start takes its time."""
AHEAD_S: Final = 10.0
"""Nobody is woken earlier than this before its time."""
STORM_MOST: Final = 512
"""So many are woken before their time; the others when it has come."""
AHEAD_LOOK_S: Final = 0.5
"""How often it is looked for a storm while anything is due so soon."""
EARLY_AT_ONCE: Final = 8
"""So many are started before their time at once: whoever else wants to start finds a turn left."""

Purpose: TypeAlias = Literal["wake", "fire"]


def wall_clock() -> datetime:
    """What people call the time."""
    return datetime.now(UTC)


def steady_clock() -> float:
    """Seconds that pass whatever is done to the wall clock, also while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Timers:
    """Times at which something is to be done about an agent; one per agent and purpose.

    A `wake` is the end of a length of time: where the wall clock is set it moves with it. A `fire` is a time of day.
    """

    def __init__(
        self,
        due: Callable[[Purpose, AgentKey], Awaitable[None]],
        *,
        wall: Callable[[], datetime] = wall_clock,
        steady: Callable[[], float] = steady_clock,
    ) -> None:
        self._due = due
        self._wall, self._steady = wall, steady
        self._seen: tuple[datetime, float] | None = None
        # Told that the wall clock was set, after the timers were moved.
        self.on_step: Callable[[timedelta], None] = lambda _by: None
        # Told of agents that wake in a storm, some seconds before their time; the timer stays, whatever is done.
        self.early: Callable[[AgentKey, datetime], Awaitable[None]] | None = None
        self._early: dict[AgentKey, datetime] = {}
        self._early_turns = asyncio.Semaphore(EARLY_AT_ONCE)
        self._heap: list[tuple[datetime, AgentKey, Purpose]] = []
        self._times: dict[tuple[Purpose, AgentKey], datetime] = {}
        self._changed = asyncio.Event()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._work: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._times)

    def at(self, purpose: Purpose, key: AgentKey) -> datetime | None:
        """When something is due; None: never."""
        return self._times.get((purpose, key))

    def set(self, purpose: Purpose, key: AgentKey, at: datetime | None) -> None:
        """Say when; None: not any more."""
        if at is None:
            self._times.pop((purpose, key), None)
            return
        if self._times.get((purpose, key)) == at:
            return
        self._times[purpose, key] = at
        heapq.heappush(self._heap, (at, key, purpose))
        if self._heap[0][0] == at:
            self._changed.set()

    def start(self) -> None:
        """Begin to look at the clock."""
        self._task = asyncio.create_task(self._run(), name="ringfence timers")

    async def stop(self) -> None:
        """Do nothing more; what is under way is cancelled."""
        work = [*self._work, *([] if self._task is None else [self._task])]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    def look(self) -> float:
        """Look at the clocks and begin what is due; gives the seconds until there is something to look for again."""
        now = self._wall()
        self._compare(now)
        while self._heap and self._heap[0][0] <= now:
            at, key, purpose = heapq.heappop(self._heap)
            # What was moved or taken back since is left in the heap until its time comes.
            if self._times.get((purpose, key)) == at:
                del self._times[purpose, key]
                self._early.pop(key, None)
                task = asyncio.create_task(self._do(purpose, key))
                self._work.add(task)
                task.add_done_callback(self._work.discard)
        left_s = (self._heap[0][0] - now).total_seconds() if self._heap else LOOK_S
        return min(left_s, self._look_ahead(now), LOOK_S)

    def _look_ahead(self, now: datetime) -> float:
        """Have those told that wake in a storm; gives the seconds until it is to be looked for one again."""
        if self.early is None or not self._heap:
            return LOOK_S
        first_s = (self._heap[0][0] - now).total_seconds()
        if first_s > AHEAD_S:
            return first_s - AHEAD_S
        for latest, at, key in _crowded(self._soon(now + timedelta(seconds=AHEAD_S))):
            if latest <= now and self._early.get(key) != at:
                self._early[key] = at
                task = asyncio.create_task(self._begin_early(key, at))
                self._work.add(task)
                task.add_done_callback(self._work.discard)
        return AHEAD_LOOK_S

    def _soon(self, until: datetime) -> list[tuple[datetime, AgentKey]]:
        """Wakes up to a time, without a look at all that come later: what lies below an entry of the heap is no earlier."""
        found: list[tuple[datetime, AgentKey]] = []
        places = [0]
        while places and len(found) < STORM_MOST:
            place = places.pop()
            if place >= len(self._heap):
                continue
            at, key, purpose = self._heap[place]
            if at > until:
                continue
            if purpose == "wake" and self._times.get((purpose, key)) == at:
                found.append((at, key))
            places += (2 * place + 1, 2 * place + 2)
        return found

    def _compare(self, now: datetime) -> None:
        """Notice that the wall clock was set since the last look."""
        steady, seen = self._steady(), self._seen
        self._seen = (now, steady)
        if seen is None:
            return
        by = now - seen[0] - timedelta(seconds=steady - seen[1])
        if abs(by) < timedelta(seconds=STEP_S):
            return
        log.warning("the clock of this host was set by %+.0f s", by.total_seconds())
        for (purpose, key), at in list(self._times.items()):
            if purpose == "wake":
                self.set(purpose, key, at + by)
        self.on_step(by)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            left_s = self.look()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _do(self, purpose: Purpose, key: AgentKey) -> None:
        async with self._turns:
            try:
                await self._due(purpose, key)
            except Exception:
                log.exception("the %s of agent %d failed", purpose, key)

    async def _begin_early(self, key: AgentKey, at: datetime) -> None:
        assert self.early is not None  # noqa: S101 - asked by who begins this
        async with self._early_turns:
            try:
                await self.early(key, at)
            except Exception:
                log.exception("agent %d can't be woken before its time", key)


def _crowded(soon: list[tuple[datetime, AgentKey]]) -> list[tuple[datetime, datetime, AgentKey]]:
    """Of those that wake soon, the ones that would wait for each other's starts; with when each has to begin at the latest."""
    found: list[tuple[datetime, datetime, AgentKey]] = []
    crowd: list[tuple[datetime, datetime, AgentKey]] = []
    latest = datetime.max.replace(tzinfo=UTC)
    for at, key in sorted(soon, reverse=True):
        if at <= latest:  # it is through before the next one begins
            found += _storm(crowd)
            crowd, latest = [], at
        latest -= timedelta(seconds=START_S)
        crowd.append((latest, at, key))
    found += _storm(crowd)
    return found[::-1]


def _storm(crowd: list[tuple[datetime, datetime, AgentKey]]) -> list[tuple[datetime, datetime, AgentKey]]:
    """The same, each begun so much earlier that the last of them is there in time; none where they are few."""
    if len(crowd) < STORM:
        return []
    return [(latest - timedelta(seconds=READY_S), at, key) for latest, at, key in crowd]
