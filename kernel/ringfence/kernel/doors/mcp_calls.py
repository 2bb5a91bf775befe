"""Calls of a door whose callers don't wait for ever: one that waits for a person is found again by whoever asks the same.

INVARIANT: a call is made once for each time that it was asked for. Who left before there was an answer, or was told that it
waits, and asks the same again gets that call's answer, and no second call is made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, ref

import msgspec
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.server.gate import Hold

if TYPE_CHECKING:
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.settled import Answer
    from ringfence.kernel.waits import Wait
    from ringfence.syscalls.table import Row

_calls: Final[WeakKeyDictionary[Desk, Calls]] = WeakKeyDictionary()

LEFT_MAX: Final = 64
"""Calls that somebody left and whose answers are kept; the oldest of more is forgotten, though recorded."""


class Parked(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits for a person.

    Attributes:
        step: its thread-wide number.
        text: what it waits for, such as `approval a3`.
    """

    step: int
    text: str


class Asked:
    """One call, whoever waits for it at the moment.

    Attributes:
        raw: its arguments in canonical form.
        left: of them, without what the manifest ignores; None: all of them count.
        key: what was asked, by which the next who asks the same is known.
        place: lane, and step in it; empty before it has one.
        waits: for whom it waits, if for anybody.
        told: whether a caller has heard that it waits.
    """

    def __init__(self, action: str, raw: bytes, left: bytes | None) -> None:
        self.raw = raw
        self.left = left
        self.key = (action, raw if left is None else left)
        self.place = ("", 0)
        self.waits: Parked | None = None
        self.told = False
        self._answer: asyncio.Task[Answer] | None = None
        self._parked = asyncio.Event()

    def begin(self, work: asyncio.Task[Answer]) -> None:
        """Take the task that answers it."""
        self._answer = work

    def placed(self, lane: str, step: int) -> None:
        """It has its place."""
        self.place = (lane, step)

    def waiting(self, flight: Flight, wait: Wait) -> None:
        """A call of the agent waits: perhaps this one."""
        if (flight.lane, flight.lane_step) == self.place and wait.kind == "approval":
            self.waits = Parked(step=flight.step, text=wait.text)
            self._parked.set()

    @property
    def over(self) -> bool:
        """Whether there is an answer."""
        return self._answer is not None and self._answer.done()

    async def answered(self) -> Answer:
        """Wait for the answer. Whoever stops waiting stops nothing else."""
        assert self._answer is not None  # noqa: S101 - it was begun
        return await asyncio.shield(self._answer)

    async def first(self) -> Answer | Parked:
        """Wait for the answer, or until it waits for a person."""
        if self.waits is not None and not self.over:
            return self.waits
        answer = asyncio.ensure_future(self.answered())
        parked = asyncio.ensure_future(self._parked.wait())
        try:
            await asyncio.wait({answer, parked}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            assert self.waits is not None  # noqa: S101 - that is what the event says
            return self.waits
        finally:
            answer.cancel()
            parked.cancel()


class Calls:
    """The calls of one agent's door while one program of it lives."""

    @classmethod
    def of(cls, desk: Desk) -> Calls:
        """Those of an agent's door: the same for whoever speaks to it, by its socket or by HTTP."""
        found = _calls.get(desk)
        if found is None:
            found = _calls[desk] = cls(desk)
        return found

    def __init__(self, desk: Desk) -> None:
        # Not held: it is what these are kept by.
        self._ref = ref(desk)
        self._left: deque[Asked] = deque()

    @property
    def _desk(self) -> Desk:
        desk = self._ref()
        assert desk is not None  # noqa: S101 - whoever calls this holds it
        return desk

    async def ask(self, row: Row, raw: bytes) -> Asked:
        """Find the call that somebody left, or make one.

        Args:
            row: of the table.
            raw: canonical arguments.
        """
        asked = Asked(row.action, raw, await self._desk.likeness(row.action, raw))
        for same in self._left:
            if same.key == asked.key:
                self._left.remove(same)
                # INVARIANT: an answer that was never promised may be old by now: the next who asks makes a call of its own.
                if same.told or not same.over:
                    return same
                break
        self._desk.thread.doors.wait.add(asked.waiting)
        work = asyncio.ensure_future(self._answer(asked, row))
        asked.begin(work)
        self._desk.hold(work)
        return asked

    def leave(self, asked: Asked, *, told: bool) -> None:
        """Stop waiting for a call: the next who asks the same waits for it.

        Args:
            asked: the call.
            told: whether its caller knows that it goes on.
        """
        asked.told = asked.told or told
        self._left.append(asked)
        while len(self._left) > LEFT_MAX:
            self._left.popleft()

    async def _answer(self, asked: Asked, row: Row) -> Answer:
        desk = self._desk
        hold = Hold(desk.bounds.gate, len(asked.raw))
        try:
            answer = await desk.in_lane(row.action, asked.raw, asked.left, placed=asked.placed)
        finally:
            hold.end()
            desk.thread.doors.wait.discard(asked.waiting)
        if answer.park:
            desk.park(answer)
        return answer
