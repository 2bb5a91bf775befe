"""THE path of a syscall, from its frame to its reply.

    replay      this place has an outcome already: return it
    plan        what the call is about to do, without doing it
    decide      policy: allow, deny or ask, naming the rule
    admit       rates, then a reservation from every total
    intent      first commit; if it fails, nothing runs
    run         the body: it takes its rollback point, looks at epoch and lease once more, then acts
    outcome     second commit; then the reply, never before

INVARIANT: no effect without a committed intent, no reply without a committed outcome.
INVARIANT: a flush takes no row of a call that was decided under another policy epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any

from ringfence.kernel.admission import Admission
from ringfence.kernel.atomic import run_atomic
from ringfence.kernel.config import DEADLINE_MS_MAX, INLINE_RESULT_BYTES_MAX
from ringfence.kernel.core import Core
from ringfence.kernel.divergence import Strays
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import Entry, EpochMoved, JournalError, Phase, StoredRow
from ringfence.kernel.journal.types import Row as JournalRow
from ringfence.kernel.kernel_log import PLACE
from ringfence.kernel.outcomes import UNRECORDED, Outcomes, Request, inline_payload, printable
from ringfence.kernel.parking import DIVERGENCE, TOLD_BYTES_MAX, held, unanswered
from ringfence.kernel.past import Known, lost_reply, recall
from ringfence.kernel.prepared import run_prepared
from ringfence.kernel.recovery import recorded_arguments, settle_again
from ringfence.kernel.replay import Unfinished
from ringfence.kernel.settled import Answer, answer_from, error_payload
from ringfence.kernel.straight import Straight
from ringfence.kernel.thread import Thread
from ringfence.syscalls.base import NeedsApproval, Recovery
from ringfence.syscalls.codec import encode_result
from ringfence.syscalls.errors import (
    Diverged,
    Fenced,
    Internal,
    InvalidRequest,
    JournalUnavailable,
    NoSuchSyscall,
    OutcomeUnknown,
    SyscallError,
)
from ringfence.syscalls.table import Row as TableRow

log = logging.getLogger(__name__)


class Dispatcher:
    """Runs calls of every agent of this kernel."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._outcomes = Outcomes(core)
        self._admission = Admission(core)
        self._chores: set[asyncio.Task[None]] = set()
        self.begin = Straight(core, self._outcomes, self).begin
        """Starts a call that goes the straight way; False: nothing was done, `call` runs it."""
        self.table, self.recall, self.strays = core.table, partial(recall, core), partial(Strays, core)
        """The table; gives what is recorded at a place of an agent; tells of calls that are not."""

    def _later(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def call(self, thread: Thread, request: Request) -> Answer:
        """Run one call to its reply. Never raises for what an agent can cause: failures are in the answer."""
        place = (request.lane, request.lane_step)
        generation = thread.generation
        if place in thread.unsettled:
            try:
                await settle_again(self._core, thread)
            except UNRECORDED as error:
                return Answer(step=0, failure=error)
        if thread.parking is not None and await held(thread):
            return unanswered()
        if thread.environment.direct is not None and self._core.boundary is not None:
            refused = await self._core.boundary(thread, request)
            if refused is not None:
                return refused
        # INVARIANT: looked at last, with nothing to wait for until a new call has its place: of two who ask, one makes it.
        flying = thread.by_lane.get(place)
        if flying is not None:
            answer = await self._join(thread, request, flying, flying.answer)
            return self.passed(thread, request, generation, answer)
        expected = thread.next_of(request.lane)
        if request.lane_step > expected:
            gap = f"step {request.lane_step} of lane `{request.lane}` came before step {expected}; steps of a lane come in order"
            return Answer(step=0, failure=InvalidRequest(gap))
        row = self._core.table.get(request.action)
        recorded = thread.replay.find(*place)
        if recorded is None and request.lane_step < expected and place not in thread.replay.unfinished:
            # Its reply was lost with a connection: the library asks again when it has a new one.
            recorded = await lost_reply(self._core, thread, place)
            if isinstance(recorded, SyscallError):
                return Answer(step=0, failure=recorded)
        answer = await self._answer(thread, request, row, recorded)
        return self.passed(thread, request, generation, answer)

    @staticmethod
    def passed(thread: Thread, request: Request, generation: int, answer: Answer) -> Answer:
        """Move the lane on; gives the answer back."""
        # INVARIANT: a call of an earlier start moves no lane of the present one.
        recorded = not isinstance(answer.failure, UNRECORDED) and generation == thread.generation
        if recorded and request.lane_step == thread.next_of(request.lane):
            thread.lanes[request.lane] = request.lane_step + 1
        return answer

    async def _join(
        self, thread: Thread, request: Request, flight: Flight, running: asyncio.Future[Answer]
    ) -> Answer:
        """Answer with the call that runs at this place: asked again after a reconnection, or by the next start."""
        same = False
        with contextlib.suppress(SyscallError):
            same = request.decode(flight.row)[2] == flight.digest or request.alike
        if flight.row.action != request.action or not same:
            if flight.waits_for is not None:
                await self._core.approvals.supersede(flight)
                return await self.call(thread, request)
            return await self._diverge(thread, request, flight.journal_row(Phase.INTENT))
        answer = await asyncio.shield(running)
        if isinstance(answer.failure, OutcomeUnknown):
            return await self._await_resolution(thread, request)
        return answer

    async def _answer(
        self, thread: Thread, request: Request, row: TableRow | None, recorded: Known | None
    ) -> Answer:
        try:
            if row is None:
                known = ", ".join(self._core.table)
                raise NoSuchSyscall(f"no syscall `{printable(request.action)}`; `ringfence` knows: {known}")
            arguments, canonical, digest = request.decode(row)
        except SyscallError as error:
            return await self._outcomes.refuse(thread, request, error)
        if recorded is not None:
            return await self._replay(thread, request, recorded, digest)
        unfinished = thread.replay.unfinished.get((request.lane, request.lane_step))
        begun = None if unfinished is None else unfinished.intent
        if begun is not None and (begun.digest, begun.action) != (digest, row.action):
            if not request.alike:
                return await self._diverge(thread, request, begun)
            # INVARIANT: a call that was cut off is made again as it was recorded: its key and its approval are about that.
            request = request.recorded(recorded_arguments(begun), begun.digest)
            arguments, canonical, digest = request.decode(row)
        flight = Flight(
            core=self._core,
            thread=thread,
            row=row,
            arguments=arguments,
            canonical=canonical,
            digest=digest,
            parts=request.parts,
            lane=request.lane,
            lane_step=request.lane_step,
            step=thread.take_step() if begun is None else begun.step,
            span_s=min(request.deadline_ms or DEADLINE_MS_MAX, DEADLINE_MS_MAX) / 1000,
        )
        if unfinished is not None:
            self._admission.resume(flight, unfinished)
        return await self.fly(flight, unfinished)

    # -- replay ---------------------------------------------------------------------------------------------------

    async def _replay(self, thread: Thread, request: Request, found: Known, digest: bytes) -> Answer:
        recorded = await thread.replay.past.row(self._core, thread, found)
        if (recorded.digest != digest and not request.alike) or recorded.action != request.action:
            return await self._diverge(thread, request, recorded)
        if recorded.outcome == "unknown":
            return await self._await_resolution(thread, request)
        answer = await answer_from(recorded, self._core.blobs, thread.purged)
        if self._core.telemetry is not None:
            self._core.telemetry.replayed(thread, self._core.table[recorded.action], recorded, answer)
        return answer

    async def _diverge(self, thread: Thread, request: Request, recorded: StoredRow | JournalRow) -> Answer:
        text = (
            f"step {recorded.step} was {recorded.action} on `{recorded.resource}` before and is "
            f"`{printable(request.action)}` with other arguments now; the program is not deterministic there. "
            f"See `ringfence show {thread.id}`; `ringfence rollback {thread.id} --to {max(recorded.step - 1, 0)}` continues before it"
        )
        try:
            await self._core.event(
                thread.key,
                "diverged",
                recorded.resource,
                step=recorded.step,
                recorded_action=recorded.action,
                made_action=printable(request.action),
                made_arguments=request.raw[:TOLD_BYTES_MAX].decode("utf-8", "replace"),
            )
        except UNRECORDED as error:
            return Answer(step=0, failure=error)
        return Answer(step=recorded.step, failure=Diverged(text, step=str(recorded.step)), park=DIVERGENCE)

    async def _await_resolution(self, thread: Thread, request: Request) -> Answer:
        """Hold the agent until an operator has settled the call; a restart comes back to here."""
        place = (request.lane, request.lane_step)
        generation = thread.generation
        await self._outcomes.show_unknown(thread)
        async with thread.resolved:
            await thread.resolved.wait_for(
                lambda: thread.generation != generation or self._settled(thread, place)
            )
        if thread.generation != generation:
            # INVARIANT: what nobody waits for any more is not made: the next start asks for it itself.
            return Answer(step=0, failure=Fenced("the agent was started again meanwhile and asks anew"))
        settled = thread.replay.find(*place)
        if settled is None:
            again = thread.replay.outcomes.pop(place)
            if again is not None:
                thread.replay.last.pop(request.lane, None)
                log.info("%s step %d is made again: resolved as not done", thread.id, again.step)
            # Of several that waited the first makes it; the others find it there.
            return await self.call(thread, request)
        known = await thread.replay.past.row(self._core, thread, settled)
        return await answer_from(known, self._core.blobs, thread.purged)

    @staticmethod
    def _settled(thread: Thread, place: tuple[str, int]) -> bool:
        held = thread.replay.outcomes.get(place)
        return held is None or not held.unknown

    # -- a new call -----------------------------------------------------------------------------------------------

    async def fly(
        self, flight: Flight, unfinished: Unfinished | None = None, failed: Exception | None = None
    ) -> Answer:
        """Run a flight to its answer, or only answer for what it `failed` with; others find it meanwhile."""
        thread, place = flight.thread, (flight.lane, flight.lane_step)
        flight.task = asyncio.current_task()
        thread.took_off(flight)
        answer: Answer | None = None
        try:
            answer = await self._attempt(flight, failed)
        finally:
            thread.landed(flight)
            if answer is None and not flight.let_go:
                answer = Answer(step=flight.step, failure=Internal("the kernel stopped"))
            answer = answer or unanswered()
            if unfinished is not None and not isinstance(answer.failure, UNRECORDED):
                thread.replay.unfinished.pop(place, None)
            flight.give(answer)
        if self._core.telemetry is not None:
            self._core.telemetry.call(flight, answer)
        if isinstance(answer.failure, OutcomeUnknown):
            again = Request(lane=place[0], lane_step=place[1], action=flight.row.action, raw=b"")
            return await self._await_resolution(thread, again.recorded(flight.canonical, flight.digest))
        return answer

    async def _attempt(self, flight: Flight, failed: Exception | None) -> Answer:
        try:
            return await self._run(flight, failed)
        except JournalError as error:
            if flight.effect_started and flight.row.recovery is not Recovery.REPEAT:
                log.exception("%s at %s", flight.row.action, flight.audit_id)
                return await self._broken(flight)
            away = f"the database can't be used: {error}; nothing was done, the call may be made again"
            return self._unrecorded(flight, JournalUnavailable(away))
        except UNRECORDED as error:
            return self._unrecorded(flight, error)
        except SyscallError as error:
            return await self._outcomes.fail(flight, error)
        except asyncio.CancelledError:
            if flight.fate is None:
                raise
            return await self._outcomes.fail(flight, flight.fate)
        except Exception:
            log.exception("bug in %s at %s", flight.row.action, flight.audit_id)
            return await self._broken(flight)

    def _unrecorded(self, flight: Flight, error: SyscallError) -> Answer:
        """The journal could not take the call: the agent may make the step again."""
        if not flight.effect_started and not flight.again:
            # The try that follows is the same occurrence, so it carries the same key.
            flight.thread.consumed_effects.discard(flight.effect_id)
            flight.give_back()
        if flight.intent_written and not flight.effect_started:
            self._say_refused(flight, error)
        elif flight.intent_written:
            # The effect may have happened: this kernel must not say it didn't, nor make it again before it is settled.
            if flight.row.recovery is not Recovery.REPEAT:
                flight.thread.unsettled.add((flight.lane, flight.lane_step))
            log.warning("%s: %s after its intent", flight.audit_id, error.message)
        return Answer(step=0, failure=error)

    def _say_refused(self, flight: Flight, error: SyscallError) -> None:
        """Record, when the database is back, that nothing came of an intent; the call is made again as another step."""
        # INVARIANT: not of a step that a dead kernel began: made again as the same step, it may then have its effect.
        if not flight.again:
            self._later(self._core.append_outcome(flight.outcome_row("refused", error_payload(error))))

    async def _broken(self, flight: Flight) -> Answer:
        """Answer for a bug."""
        text = f"a bug in Ringfence stopped {flight.row.action}; report it with what stands under `{flight.audit_id}` in {PLACE}"
        if flight.effect_started and flight.row.recovery is not Recovery.REPEAT:
            settle = f"settle it: ringfence resolve {flight.thread.id} {flight.step} --as done|not-done"
            return await self._outcomes.fail(flight, OutcomeUnknown(f"{text}; {settle}"))
        return await self._outcomes.fail(flight, Internal(text))

    async def _run(self, flight: Flight, failed: Exception | None) -> Answer:
        if failed is not None:
            raise failed
        await self._admission.plan(flight)
        while True:
            try:
                return await self._try(flight)
            except NeedsApproval:
                flight.effect_started = False
                await self._core.approvals.park(flight)

    async def _try(self, flight: Flight) -> Answer:
        row, thread = flight.row, flight.thread
        if row.locates:
            await flight.locate()
        await self._admission.decide(flight)
        wait = thread.budgets.rate_wait(flight.rated, flight.deadline_s)
        if wait > 0:
            await self._admission.wait(flight, wait)
        if flight.plan.reserve or thread.pools is not None or thread.budgets.metered:
            await self._admission.fund(flight)
        self._admission.reserve(flight)
        if flight.owes_uses:
            await flight.use_grants()
        if row.recovery is Recovery.ATOMIC:
            run = run_prepared if row.prepares else run_atomic
            return await run(self._core, self._outcomes, flight)
        if row.intent and not flight.staged:
            known = self._outcomes.known_effect(flight)
            if known is not None:
                result, payload = await self._outcomes.recognise(flight, known)
                await self._write_outcome(flight, payload)
                return Answer(step=flight.step, result=result)
            await flight.failpoint("before_intent")
            await self._write_intent(flight)
            await flight.failpoint("after_intent")
        body = row.body.resume if flight.staged else row.body.run
        found = await body(flight, flight.arguments)
        result = encode_result(row, found)
        if flight.carried:
            await flight.answered(found, result)
        small = len(result) <= INLINE_RESULT_BYTES_MAX
        payload = inline_payload(result) if small else await self._outcomes.payload(result, found, flight)
        await flight.failpoint("before_outcome")
        await self._write_outcome(flight, payload)
        await flight.failpoint("after_outcome")
        return Answer(step=flight.step, result=result)

    # -- the commits ----------------------------------------------------------------------------------------------

    async def _write_intent(self, flight: Flight) -> None:
        if flight.row.recovery is Recovery.KEYED and not flight.effect_id:
            flight.effect_id = self._outcomes.next_effect_id(flight)
        while True:
            row = flight.journal_row(Phase.INTENT)
            idempotent = b"true" if flight.plan.idempotent else b"false"
            row.body = b"".join(
                (
                    *(b"{", flight.amounts("reserved"), b'"arguments":', flight.canonical),
                    *(b',"idempotent":', idempotent, b",", flight.explain()),
                )
            )
            try:
                await self._core.append(Entry(row=row, epoch=flight.epoch))
            except EpochMoved as moved:
                await self._admission.decide_again(flight, moved)
            except JournalUnavailable as error:
                # The intent may still turn out to be written.
                self._say_refused(flight, error)
                raise
            else:
                flight.intent_written = True
                return

    async def _write_outcome(self, flight: Flight, payload: bytes) -> None:
        """The second commit. A mere read is withheld if its right was revoked meanwhile; an effect is recorded always."""
        reads = flight.row.recovery is Recovery.REPEAT and not flight.plan.reserve
        while True:
            row = flight.outcome_row("ok", payload)
            try:
                if reads:
                    await self._core.append(Entry(row=row, epoch=flight.epoch))
                else:
                    await self._core.append_outcome(row)
            except EpochMoved as moved:
                await self._admission.decide_again(flight, moved)
            else:
                self._outcomes.remember(flight, row)
                return
