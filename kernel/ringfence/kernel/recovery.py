"""Settles the calls that a dead kernel left between intent and outcome, before their agent runs again.

REPEAT        nothing to settle: the program asks again and the call is run again
RESTORE, ROLL_FORWARD, ASK_TARGET
the body finishes it, or says that nothing happened, or that it can't be known
KEYED         with a key: run again when asked, with the same key; without: unknown
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from ringfence.kernel.approvals import approved_before, staged_steps
from ringfence.kernel.carrying import arguments_of
from ringfence.kernel.config import DEADLINE_MS_MAX, INLINE_RESULT_BYTES_MAX
from ringfence.kernel.core import Core
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import StoredRow, Unavailable
from ringfence.kernel.replay import OPERATOR_LANE, Unfinished
from ringfence.kernel.settled import decided_part, error_payload, reserved_amounts, used_grants
from ringfence.kernel.thread import Thread
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Effect, NeedsApproval, Plan, Recovery, Rerun
from ringfence.syscalls.codec import decode_arguments, encode_result
from ringfence.syscalls.errors import Fenced, JournalUnavailable, OutcomeUnknown, SyscallError
from ringfence.syscalls.payload import content_bytes
from ringfence.syscalls.table import Row as TableRow

log = logging.getLogger(__name__)

_BY_BODY = frozenset({Recovery.RESTORE, Recovery.ROLL_FORWARD, Recovery.ASK_TARGET})


class _Intent(msgspec.Struct):
    arguments: msgspec.Raw
    idempotent: bool = True


_decode = msgspec.json.Decoder(_Intent).decode


def recorded_arguments(intent: StoredRow) -> bytes:
    """Arguments of a call as its intent has them, in canonical form."""
    return bytes(_decode(intent.body).arguments)


async def settle_unfinished(core: Core, thread: Thread) -> list[int]:
    """Settle every unfinished call of the thread's lineage.

    What is to be run again is left in `thread.replay.unfinished`.

    Returns:
        Steps whose outcome stays unknown.
    """
    unknown: list[int] = []
    staged = await staged_steps(core, thread)
    found = [
        (intent, last)
        for intent, last in await core.store.unfinished(thread.key)
        if intent.lane != OPERATOR_LANE and thread.lineage.holds(intent.branch, intent.step)
    ]
    newest = {(intent.lane, intent.lane_step): intent.step for intent, _ in found}
    for intent, last in found:
        if intent.step in thread.flights:
            continue  # it is not over: this kernel itself runs it
        progress = None if last is None else last.body
        row = core.table.get(intent.action)
        body = _decode(intent.body)
        place = (intent.lane, intent.lane_step)
        made_again = max(newest[place], _recorded_at(thread, place))
        thread.replay.unfinished[place] = Unfinished(intent=intent, progress=progress)
        if intent.effect_id:
            # It holds its id whatever becomes of it: another call like it is another occurrence.
            thread.consumed_effects.add(intent.effect_id)
        if row is None:
            log.error(
                "%s step %d: this release has no syscall `%s` to settle it with",
                thread.id,
                intent.step,
                intent.action,
            )
            unknown.append(intent.step)
            continue
        flight = await _flight_of(core, thread, row, intent, bytes(body.arguments))
        flight.progress = progress
        if made_again > intent.step:
            # Nothing came of it, or its place would not have been given to another step; a kernel died before it could say so.
            away = JournalUnavailable(f"nothing was done; step {made_again} made the call again")
            await _close(core, flight, away)
        elif row.recovery in _BY_BODY and intent.step not in staged:
            if not await _recover_by_body(core, flight):
                unknown.append(intent.step)
        elif row.recovery is Recovery.KEYED and not (body.idempotent and asked_again(thread)):
            why = "nobody asks for it again" if body.idempotent else "its resource takes no idempotency key"
            sent = OutcomeUnknown(
                f"{intent.action} on `{intent.resource}` may have been sent before the crash and {why}; "
                f"settle it: ringfence resolve {thread.id} {intent.step} --as done|not-done",
                audit_id=f"{thread.id}/{intent.step}",
            )
            await _close(core, flight, sent)
            unknown.append(intent.step)
    return unknown


def asked_again(thread: Thread) -> bool:
    """Whether the program of a thread makes its calls again after a crash; one that resumes by itself may not."""
    layer = thread.environment.direct
    return layer is None or not layer.own


async def close_unasked(core: Core, thread: Thread, lane: str) -> None:
    """Say of calls that a crash cut off before their effect that nobody will ask for them again.

    Args:
        core: the kernel.
        thread: whose program resumes by itself.
        lane: calls of this one are the kernel's own, and left.
    """
    for place, one in list(thread.replay.unfinished.items()):
        row = core.table.get(one.intent.action)
        if place[0] == lane or row is None or one.intent.step in thread.flights:
            continue
        raw = recorded_arguments(one.intent)
        flight = await _flight_of(core, thread, row, one.intent, raw)
        text = "a crash cut it off, and the program goes on by itself: nobody asks for it again"
        await _close(core, flight, JournalUnavailable(text))


async def _flight_of(core: Core, thread: Thread, row: TableRow, intent: StoredRow, raw: bytes) -> Flight:
    arguments, canonical, _ = decode_arguments(row, raw)
    flight = Flight(
        core=core,
        thread=thread,
        row=row,
        arguments=arguments,
        canonical=canonical,
        digest=intent.digest,
        lane=intent.lane,
        lane_step=intent.lane_step,
        step=intent.step,
        span_s=DEADLINE_MS_MAX / 1000,
    )
    flight.intent_written = True
    flight.effect_id = intent.effect_id
    flight.used = used_grants(intent)
    flight.effect = Effect[intent.effect]
    flight.started_us = intent.started_us
    flight.earlier = (intent.verdict, msgspec.json.encode(decided_part(intent.body))[1:])
    flight.plan = _plan_of(intent.resource)
    if intent.verdict == Verdict.ASK:
        flight.approved = await approved_before(core, thread, intent.step)
    return flight


async def settle_again(core: Core, thread: Thread) -> None:
    """Settle calls that began their effect under this kernel and could not be recorded, before they are asked for again.

    Raises:
        JournalUnavailable: the database is away; they stay unsettled.
        Fenced: another kernel owns the agent; it settles them.
    """
    async with thread.settling:
        if not thread.unsettled:
            return
        places = set(thread.unsettled)
        try:
            await settle_unfinished(core, thread)
        except Unavailable as error:
            raise JournalUnavailable(
                "the database is away; what was under way is settled when it is back"
            ) from error
        thread.unsettled -= places


async def close_let_go(core: Core, thread: Thread, error: SyscallError) -> None:
    """Record the end of calls that wait and that nobody keeps: their agent has ended. Those without an intent leave no trace.

    Raises:
        Unavailable: the database is away.
        Fenced: another kernel owns the agent.
    """
    steps = {call.step for call in thread.let_go}
    thread.let_go = ()
    if not steps:
        return
    for intent, last in await core.store.unfinished(thread.key):
        row = core.table.get(intent.action)
        if intent.step not in steps or row is None:
            continue
        place = (intent.lane, intent.lane_step)
        flight = await _flight_of(core, thread, row, intent, recorded_arguments(intent))
        thread.replay.unfinished[place] = Unfinished(intent=intent, progress=last and last.body)
        await _close(core, flight, error)
        thread.unsettled.discard(place)


def _plan_of(resource: str) -> Plan:
    return Plan(resource=resource, questions=())


async def _recover_by_body(core: Core, flight: Flight) -> bool:
    """Let the body settle its call. Returns False where the outcome stays unknown."""
    thread = flight.thread
    try:
        flight.plan = flight.row.body.plan(flight.arguments, thread.environment)
    except SyscallError:
        # The call itself may have removed what its plan looks at; the recorded point knows the paths.
        log.debug("%s can't be planned again", flight.audit_id)
    flight.questions = list(flight.plan.questions)
    flight.epoch = thread.rights.epoch
    if flight.questions:
        # INVARIANT: not `decided`: what has not begun is put to the rights of now before it begins, by `check_live`.
        flight.judgement = await flight.weigh(thread.rights, flight.questions)
    else:
        flight.rights = thread.rights
    try:
        settled = await flight.row.body.recover(flight, flight.arguments)
    except NeedsApproval:
        return True  # nothing happened; it asks when it is made again
    except (JournalUnavailable, Fenced):
        raise  # says nothing about the call: it is settled when the database is back, or by who owns the agent
    except SyscallError as error:
        if not isinstance(error, OutcomeUnknown):
            log.warning("%s can't be recovered: %s", flight.audit_id, error.message)
            error = OutcomeUnknown(
                f"{error.message}; settle it: ringfence resolve {thread.id} {flight.step} --as done|not-done",
                audit_id=flight.audit_id,
            )
        await _close(core, flight, error)
        return False
    if settled is Rerun.RERUN:
        log.info("%s left no effect before the crash; it runs again when asked", flight.audit_id)
        return True
    result = encode_result(flight.row, settled)
    if len(result) > INLINE_RESULT_BYTES_MAX:
        ref = await asyncio.to_thread(core.blobs.put, result)
        payload = (
            b'"artifact":' + msgspec.json.encode(ref) + b',"result_bytes":%d,"recovered":true,' % len(result)
        )
    else:
        payload = b'"result":' + result + b',"recovered":true,'
    flight.came = content_bytes(settled, len(result))
    _take_over(flight)
    outcome = flight.outcome_row("ok", payload)
    await core.append_outcome(outcome)
    flight.noted(outcome)
    thread.replay.unfinished.pop((flight.lane, flight.lane_step), None)
    thread.replay.add(flight.stored(outcome))
    return True


def _recorded_at(thread: Thread, place: tuple[str, int]) -> int:
    """The step that answers a place, or that its lane has gone past it with; 0: none."""
    row, saved = thread.replay.outcomes.get(place), thread.replay.checkpoint
    if row is None and saved is not None and place[0] == "0" and place[1] <= saved.lane_step:
        return saved.step
    return 0 if row is None else row.step


def _take_over(flight: Flight) -> None:
    """Hold the bytes that the intent of a call had reserved, right before its outcome settles them."""
    held = flight.thread.replay.unfinished[flight.lane, flight.lane_step].intent
    amounts = reserved_amounts(held)
    if held.step == flight.step and "bytes" in amounts:
        flight.reserved = {"bytes": amounts["bytes"]}
        flight.carried = arguments_of(flight)
        if flight.thread.pools is not None:
            flight.drawn = flight.thread.pools.attach(flight.reserved)


async def _close(core: Core, flight: Flight, error: SyscallError) -> None:
    _take_over(flight)
    row = flight.outcome_row(error.outcome, error_payload(error))
    await core.append_outcome(row)
    flight.noted(row)
    place = (flight.lane, flight.lane_step)
    held = flight.thread.replay.unfinished.get(place)
    if held is not None and held.intent.step == flight.step:
        del flight.thread.replay.unfinished[place]
    flight.thread.replay.add(flight.stored(row))
