"""ATOMIC calls: the work and its outcome are one commit, so it happened or it didn't.

INVARIANT: a row under way is never abandoned, for its change may commit; its flush checks the epoch itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, cast

from ringfence.kernel.admission import Admission
from ringfence.kernel.carrying import counted
from ringfence.kernel.core import Core
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.deltas import PackedSave, pack
from ringfence.kernel.journal.types import AgentKey, Entry, EpochMoved, NothingYet, StateConflict
from ringfence.kernel.mailboxes import woken_by
from ringfence.kernel.outcomes import Outcomes, conflict_error, inline_payload
from ringfence.kernel.settled import Answer
from ringfence.syscalls.base import StateChange
from ringfence.syscalls.codec import canonical_json, encode_result
from ringfence.syscalls.payload import content_bytes


@dataclass(slots=True, kw_only=True)
class Done:
    """What there is to say of an ATOMIC call once it is committed.

    Attributes:
        result: JSON.
        woken: agents that it wrote to, with the kernels that own them.
        packed: the checkpoint that it is.
        branch: of its row.
    """

    result: bytes = b""
    woken: list[tuple[int, int | None]] = field(default_factory=list[tuple[int, int | None]])
    packed: PackedSave | None = None
    branch: int = 0


_AT_ONCE_BYTES: Final = 64 << 10  # a state up to here is packed within the event loop's turn


def atomic_entry(flight: Flight, packed: PackedSave | None = None) -> tuple[Entry, Done]:
    """The outcome of an ATOMIC call with its work, and what is filled in when that is done."""
    row, body = flight.row, flight.row.body
    outcome = flight.outcome_row("ok", b"")
    told = Done(packed=packed, branch=outcome.branch)

    def finish(done: object) -> bytes:
        # A checkpoint is named by the step that saved it; nothing else about it is news.
        found = body.finish(flight.arguments, flight.step if done is None else done)
        result = encode_result(row, found)
        previous: dict[str, int] | None = getattr(done, "previous", None)
        if previous is not None:
            flight.add_point(sorted(previous), "state", 0)
        told.result, told.woken = result, woken_by(done)
        if isinstance(done, dict) and cast("dict[str, Any]", done).get("tainted"):
            flight.taint(f"a message from `{cast('dict[str, Any]', done).get('from_name')}`")
        head = flight.opening()
        if flight.carried:
            head += flight.answered_at(found, result)
        head += b'"arguments":' + (flight.canonical if packed is None else _named(packed))
        outcome.body = head + b',"result":' + result + b"," + flight.explain()
        return outcome.body

    change = packed or body.transaction(flight.arguments)
    if flight.watched and isinstance(change, StateChange):
        # INVARIANT: what had to be fresh when the call was decided is so when it commits.
        change = dataclasses.replace(change, reads={**flight.watched, **change.reads})
    return Entry(row=outcome, epoch=flight.epoch, atomic=change, finish=finish), told


async def run_atomic(core: Core, outcomes: Outcomes, flight: Flight) -> Answer:
    """Run an admitted ATOMIC call to its answer.

    Raises:
        SyscallError: it was not done.
        JournalError: the database refused it.
    """
    body = flight.row.body
    await flight.failpoint("before_intent")
    early = await body.wait(flight, flight.arguments) if flight.row.waits else None
    packed = await _pack(flight) if saves_state(flight) else None
    while True:
        if flight.row.waits and counted(flight.thread):
            await Admission(core).load(flight)
        if early is None:
            entry, done = atomic_entry(flight, packed)
        else:
            done = Done(result=encode_result(flight.row, early))
            flight.came = content_bytes(early, len(done.result))
            entry = Entry(row=flight.outcome_row("ok", inline_payload(done.result)), epoch=flight.epoch)
        try:
            if await _committed(core, flight, entry):
                break
        except NothingYet:
            flight.put_down()
            early = await body.wait(flight, flight.arguments)
    for agent, owner in done.woken:
        core.mailboxes.announce(AgentKey(agent), owner)
    keep_saved(flight, done)
    await flight.failpoint("after_outcome")
    outcomes.remember(flight, entry.row)
    return Answer(step=flight.step, result=done.result)


async def _pack(flight: Flight) -> PackedSave:
    """Make the stored form of a checkpoint, beside the event loop where that takes long."""
    packed = packed_at_once(flight)
    if packed is not None:
        return packed
    return await asyncio.to_thread(
        pack, flight.row.body.transaction(flight.arguments), flight.thread.replay.saved
    )


def saves_state(flight: Flight) -> bool:
    """Whether the call saves the agent's own state."""
    return flight.row.action == "checkpoint.save"


def packed_at_once(flight: Flight) -> PackedSave | None:
    """The stored form of a checkpoint, or None where making it would hold up the event loop."""
    base = flight.thread.replay.saved
    size = len(flight.canonical) + (0 if base is None else len(base.state))
    return pack(flight.row.body.transaction(flight.arguments), base) if size <= _AT_ONCE_BYTES else None


def keep_saved(flight: Flight, done: Done) -> None:
    """A checkpoint is committed: the next one may rest on it."""
    replay = flight.thread.replay
    newer = replay.saved is None or replay.saved.step < flight.step
    if done.packed is not None and newer and flight.thread.lineage.holds(done.branch, flight.step):
        replay.saved = done.packed.as_base(flight.step)


def _named(packed: PackedSave) -> bytes:
    """The arguments of a save as the journal keeps them: the state is in the checkpoint, by its hash, and not there twice."""
    save = packed.save
    return canonical_json(
        {
            "next_child": save.next_child,
            "schema_version": save.schema_version,
            "state_bytes": len(save.state),
            "state_sha256": packed.digest.hex(),
        }
    )


async def _committed(core: Core, flight: Flight, entry: Entry) -> bool:
    """Try to commit. False: the call was decided again meanwhile, so it is tried again.

    Raises:
        NothingYet: the work has to wait.
    """
    flight.effect_started = True
    try:
        await core.append(entry)
    except EpochMoved as moved:
        _not_done(flight)
        await Admission(core).decide_again(flight, moved)
        return False
    except StateConflict as conflict:
        raise conflict_error(conflict) from conflict
    except NothingYet:
        _not_done(flight)
        rights = await flight.thread.current_rights()
        if rights is not flight.rights:
            await flight.look_again(rights)
        raise
    return True


def _not_done(flight: Flight) -> None:
    """After a try that did nothing: from here on the call may be cancelled, so what was said during the try counts now."""
    flight.effect_started = False
    if flight.fate is not None:
        raise flight.fate
