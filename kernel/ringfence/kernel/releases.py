"""Replies of concurrent lanes, given out in the order in which they were recorded while a program replays.

A program whose lanes race, as tasks of which the first that is answered counts, takes the same path again. What the order
rests on is only what the journal has: a reply waits for those that were recorded before it, a new one for all of them.

INVARIANT: nothing waits for a call that can't come any more. Where every lane of the program waits in a call, the replies that
were not asked for are passed over; where nothing happens for long, the order is given up for this start.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from ringfence.kernel.thread import Thread

log = logging.getLogger(__name__)

T = TypeVar("T")

STUCK_S: Final = 0.25
"""How long nothing has to come or go before replies that nobody asked for are passed over."""

HOLD_S: Final = 30.0
"""The same, while a lane goes on that may ask yet; then the order is given up."""

SILENT_S: Final = 5.0
"""The same of a program that doesn't say how many of its lanes go on."""

SETTLE_S: Final = 0.02
"""How long a thread that got its reply has to make something of it before another one gets its own."""


class Line(Generic[T]):
    """Who is next: replies by their recorded positions, then new ones as they come. No clocks."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = array("q", positions)
        self._at = 0
        self._waiting: dict[int, list[T]] = {}
        self._new: deque[T] = deque()

    @property
    def over(self) -> bool:
        """Whether all that was recorded has been given out, or passed over."""
        return self._at >= len(self._positions)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self._new)

    def join(self, position: int, item: T) -> bool:
        """Stand in line; False: its turn is over, or nobody stands in line any more."""
        at = bisect_left(self._positions, position)
        known = at < len(self._positions) and self._positions[at] == position
        if self.over or (known and at < self._at):
            return False
        if known:
            self._waiting.setdefault(position, []).append(item)
        else:
            self._new.append(item)
        return True

    def next(self) -> T | None:
        """Take who is next; None: the next one has not come yet, or nobody is left."""
        if self.over:
            return self._new.popleft() if self._new else None
        items = self._waiting.get(self._positions[self._at])
        if items is None:
            return None
        item = items.pop()
        if not items:
            del self._waiting[self._positions[self._at]]
            self._at += 1
        return item

    def pass_over(self) -> int:
        """Wait no longer for those before the first that has come; gives how many they were."""
        before = self._at
        first = min(self._waiting, default=None)
        self._at = len(self._positions) if first is None else bisect_left(self._positions, first)
        return self._at - before

    def give_up(self) -> None:
        """Let all go that wait, in their order."""
        for position in sorted(self._waiting, reverse=True):
            self._new.extendleft(self._waiting[position])
        self._waiting.clear()
        self._at = len(self._positions)


class Releases:
    """The replies of one start of a program, until all that was recorded is given out."""

    def __init__(self, thread: Thread, positions: Sequence[int]) -> None:
        self._thread = thread
        self._line: Line[tuple[str, Callable[[], None]]] = Line(positions)
        self._loop = asyncio.get_running_loop()
        self._stir = self._loop.time()
        # Who got a reply last and has not come back, and when.
        self._last, self._last_at = "", 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None

    def asked(self, lane: str) -> None:
        """A lane makes a call: what it got before it has made use of."""
        self._stir = self._loop.time()
        if lane == self._last:
            self._last = ""
            self._go()

    def lanes_changed(self) -> None:
        """The program says how many lanes go on: some lane has begun, ended, or waits for another."""
        self._stir = self._loop.time()
        self._last = ""
        self._go()

    def turn(self, lane: str, position: int, give: Callable[[], None]) -> None:
        """Give a reply out when it may be.

        Args:
            lane: whose it is.
            position: of the row that it came from; 0: it is new.
            give: gives it out. It is called at once or later, in the order of all replies: a task that is only woken may
                be overtaken.
        """
        if self._line.join(position, (lane, give)):
            self._go()
        else:
            give()

    def close(self) -> None:
        """Hold nobody any longer."""
        self._line.give_up()
        self._last = ""
        self._go()

    def _go(self) -> None:
        """Give out what may be."""
        self._settling = _cancelled(self._settling)
        while len(self._line):
            left = self._last_at + SETTLE_S - self._loop.time()
            if self._last and self._thread.live_lanes and left > 0 and not self._line.over:
                self._settling = self._loop.call_later(left, self._settled)
                break
            found = self._line.next()
            if found is None:
                break
            lane, give = found
            self._stir = self._last_at = self._loop.time()
            self._last = lane
            give()
        if self._line.over and not len(self._line):
            self._timer = _cancelled(self._timer)
            if self._thread.releases is self:
                self._thread.releases = None
        elif self._timer is None and len(self._line):
            self._timer = self._loop.call_later(STUCK_S, self._look)

    def _settled(self) -> None:
        self._settling, self._last = None, ""
        self._go()

    def _look(self) -> None:
        """Whether those who wait do so for what can't come."""
        self._timer = None
        thread = self._thread
        quiet = self._loop.time() - self._stir
        if thread.frozen:
            self._stir = self._loop.time()
        elif thread.live_lanes and len(self._line) + len(thread.flights) >= thread.live_lanes:
            if quiet >= STUCK_S:
                passed = self._line.pass_over()
                log.info("%s asks otherwise than recorded: %d replies are passed over", thread.id, passed)
        elif quiet >= (HOLD_S if thread.live_lanes else SILENT_S):
            log.info("%s asks otherwise than recorded: its replies are given out as they come", thread.id)
            self._line.give_up()
        self._go()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def begin_releases(thread: Thread) -> None:
    """Have the replies of a program that starts given out in order; where one lane alone was recorded there is none to keep."""
    if thread.releases is not None:
        thread.releases.close()
    positions = thread.replay.recorded_order()
    thread.releases = Releases(thread, positions) if positions else None
