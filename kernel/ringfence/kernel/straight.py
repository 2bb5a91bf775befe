"""The straight way of a call: no intent, nothing recorded before, nothing to wait for but its commit.

The same path as in dispatch.py, plan to reply, without a task of its own: what most calls of most agents take. Whatever
is out of the ordinary, as a recorded outcome, a rate, a limited grant, a refusal or a failure, goes the long way. So
nothing here refuses a call or records a failure.

INVARIANT: as in dispatch.py: no reply without a committed outcome, and no flush takes a row that was decided under
another policy epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from ringfence.kernel.atomic import Done, atomic_entry, keep_saved, packed_at_once, saves_state
from ringfence.kernel.config import DEADLINE_MS_MAX, INLINE_RESULT_BYTES_MAX
from ringfence.kernel.core import AWAY
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import (
    BadRow,
    Entry,
    EpochMoved,
    NothingYet,
    OwnerMoved,
    Row,
    StateConflict,
    Unavailable,
)
from ringfence.kernel.outcomes import Outcomes, Request, inline_payload
from ringfence.kernel.settled import Answer
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Effect, Plan, Recovery, Work
from ringfence.syscalls.codec import encode_result
from ringfence.syscalls.errors import Internal, JournalUnavailable, SyscallError
from ringfence.syscalls.table import Row as TableRow

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.thread import Thread

log = logging.getLogger(__name__)

Reply = Callable[[Answer], None]

_NOTHING_WRITTEN = (EpochMoved, OwnerMoved, StateConflict, NothingYet, BadRow)
"""Refusals of the journal after which the call is run again from its plan, for nothing of it happened."""


class LongWay(Protocol):
    """What runs a call that turned out not to be ordinary."""

    async def fly(self, flight: Flight, *, failed: Exception | None = None) -> Answer:
        """Run a flight to its answer, or only answer for what it failed with."""
        ...

    def passed(self, thread: Thread, request: Request, generation: int, answer: Answer) -> Answer:
        """Move the lane on."""
        ...


class Straight:
    """The ordinary calls of one kernel."""

    def __init__(self, core: Core, outcomes: Outcomes, long_way: LongWay) -> None:
        self._core = core
        self._outcomes = outcomes
        self._long_way = long_way
        self._turned: set[asyncio.Task[None]] = set()

    def begin(self, thread: Thread, request: Request, reply: Reply) -> bool:
        """Start a call, if it goes the straight way.

        Args:
            thread: who calls.
            request: what is asked.
            reply: gets the answer, once; it must not raise.

        Returns:
            False: nothing was done.
        """
        row = self._core.table.get(request.action)
        plan_of = None if row is None else _straight_plan(row)
        if row is None or plan_of is None or not self._ordinary(thread, request):
            return False
        try:
            arguments, canonical, digest = request.decode(row)
            plan: Plan = plan_of(arguments, thread.environment)
            rights = thread.rights
            if rights.conditional and rights.conditions_on(plan.questions):
                return False
            judgement = rights.judge(plan.questions, row.effect._name_)
            if plan.effect is not None or judgement.verdict is not Verdict.ALLOW:
                return False
            pools = thread.pools
            if pools is not None and (pools.metered or not pools.has("calls")):
                return False
            thread.budgets.reserve("calls")
        except Exception:  # noqa: BLE001 - the long way meets it again, and answers for it
            return False
        flight = Flight(
            core=self._core,
            thread=thread,
            row=row,
            arguments=arguments,
            canonical=canonical,
            digest=digest,
            lane=request.lane,
            lane_step=request.lane_step,
            step=thread.take_step(),
            span_s=min(request.deadline_ms or DEADLINE_MS_MAX, DEADLINE_MS_MAX) / 1000,
            plan=plan,
            questions=list(plan.questions),
            rights=rights,
            judgement=judgement,
            epoch=rights.epoch,
            reserved={"calls": 1.0},
        )
        if pools is not None:
            flight.drawn = pools.draw("calls")
        self._fly(flight, _OnItsWay(self, flight, request, reply))
        return True

    def _ordinary(self, thread: Thread, request: Request) -> bool:
        """Whether nothing is known about this place, and nothing about the agent asks for more than a decision."""
        lane, step = place = (request.lane, request.lane_step)
        replay, rights = thread.replay, thread.rights
        return not (
            step != (thread.lanes[lane] if lane in thread.lanes else thread.next_of(lane))
            or place in thread.by_lane
            or place in replay.outcomes
            or place in replay.unfinished
            or place in thread.unsettled
            or thread.parking is not None
            or thread.releases is not None
            or thread.environment.direct is not None
            or rights.limited
            or rights.expired
            or thread.budgets.rated(request.action)
            or (self._core.failpoints.enabled and self._core.failpoints.armed(request.action))
        )

    def _fly(self, flight: Flight, way: _OnItsWay) -> None:
        flight.thread.took_off(flight)
        try:
            if flight.row.recovery is Recovery.ATOMIC:
                packed = packed_at_once(flight) if saves_state(flight) else None
                if packed is None and saves_state(flight):
                    # A large state takes its time.
                    self.turn(way, None)
                    return
                entry, way.told = atomic_entry(flight, packed)
                if isinstance(entry.atomic, Work):
                    # It may have to wait, and to wake others.
                    self.turn(way, None)
                    return
                flight.effect_started = True
            else:
                result = _at_once(flight)
                if result is None:
                    self.turn(way, None)
                    return
                way.result = result
                entry = Entry(row=flight.outcome_row("ok", inline_payload(result)), epoch=flight.epoch)
        except Exception as error:
            if not isinstance(error, SyscallError):
                log.exception("bug in %s at %s", flight.row.action, flight.audit_id)
            # Run again, it fails again where failures are dealt with.
            self.turn(way, None)
            return
        way.row = entry.row
        self._core.journal.hand_in(entry, way)

    def arrived(self, way: _OnItsWay) -> None:
        """The outcome is committed: answer."""
        flight = way.flight
        thread = flight.thread
        thread.landed(flight)
        told, result = way.told, way.result
        if told is not None:
            result = told.result
            if told.packed is not None:
                keep_saved(flight, told)
        if way.row is not None:
            self._outcomes.remember(flight, way.row)
        answer = Answer(step=flight.step, result=result)
        flight.give(answer)
        if self._core.telemetry is not None:
            self._core.telemetry.call(flight, answer)
        # INVARIANT: as in `passed`, a call of an earlier start moves no lane of the present one.
        if flight.generation == thread.generation and flight.lane_step == thread.next_of(flight.lane):
            thread.lanes[flight.lane] = flight.lane_step + 1
        way.reply(answer)

    def turn(self, way: _OnItsWay, failed: Exception | None) -> None:
        """Go on the long way: run the call anew, or answer for what it failed with."""
        if isinstance(failed, _NOTHING_WRITTEN):
            failed = None
        elif isinstance(failed, Unavailable):
            failed = JournalUnavailable(AWAY)
        if failed is None:
            way.flight.effect_started = False
        task = asyncio.create_task(self._go_on(way, failed))
        self._turned.add(task)
        task.add_done_callback(self._turned.discard)

    async def _go_on(self, way: _OnItsWay, failed: Exception | None) -> None:
        flight = way.flight
        try:
            # Cancelled before this task could be: see `revocation.cancel`.
            answer = await self._long_way.fly(flight, failed=failed or flight.fate)
        except Exception:
            log.exception("bug in the path of %s at %s", flight.row.action, flight.audit_id)
            text = "a bug in Ringfence stopped this call; the kernel's log has the details"
            answer = Answer(step=0, failure=Internal(text))
        way.reply(self._long_way.passed(flight.thread, way.request, flight.generation, answer))


class _OnItsWay(msgspec.Struct, eq=False):
    """A call whose outcome waits for its commit: what the journal tells about it."""

    straight: Straight
    flight: Flight
    request: Request
    reply: Reply
    row: Row | None = None
    result: bytes = b""
    # Of ATOMIC calls: what their work said.
    told: Done | None = None
    over: bool = False

    def done(self) -> bool:
        return self.over

    def set_result(self, _done: Any, /) -> None:
        self.over = True
        try:
            self.straight.arrived(self)
        except Exception:
            # The journal's writer has others to tell.
            log.exception("bug at the end of %s", self.flight.audit_id)

    def set_exception(self, error: BaseException, /) -> None:
        self.over = True
        if not isinstance(error, Exception):
            error = Internal(f"the journal stopped: {error}")
        self.straight.turn(self, error)


def _straight_plan(row: TableRow) -> Callable[[Any, Any], Plan] | None:
    """What plans a row that goes straight; None: it doesn't."""
    if row.intent or row.waits or row.prepares or row.effect is Effect.DESTROY:
        return None
    if row.recovery is Recovery.ATOMIC:
        return row.body.plan
    return getattr(row.body, "plan_at_once", None)


def _at_once(flight: Flight) -> bytes | None:
    """The result of a read that waits for nothing and stays in the journal; None: it is not one."""
    found = flight.row.body.run_at_once(flight, flight.arguments)
    if found is None:
        return None
    result = encode_result(flight.row, found)
    return result if len(result) <= INLINE_RESULT_BYTES_MAX else None
