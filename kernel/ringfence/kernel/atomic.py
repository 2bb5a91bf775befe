"""ATOMIC calls: the work and its outcome are one commit, so it happened or it didn't.

INVARIANT: a row under way is never abandoned, for its change may commit; its flush checks the epoch itself.
"""

from __future__ import annotations

from ringfence.kernel.admission import Admission
from ringfence.kernel.core import Core
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import AgentKey, Entry, EpochMoved, NothingYet, StateConflict
from ringfence.kernel.mailboxes import woken_by
from ringfence.kernel.outcomes import Outcomes, conflict_error, inline_payload
from ringfence.kernel.settled import Answer
from ringfence.syscalls.codec import encode_result


async def run_atomic(core: Core, outcomes: Outcomes, flight: Flight) -> Answer:
    """Run an admitted ATOMIC call to its answer.

    Raises:
        SyscallError: it was not done.
        JournalError: the database refused it.
    """
    body = flight.row.body
    change = body.transaction(flight.arguments)
    answer: list[bytes] = []
    woken: list[tuple[int, int | None]] = []

    def finish(done: object) -> bytes:
        # A checkpoint is named by the step that saved it; nothing else about it is news.
        result = encode_result(
            flight.row, body.finish(flight.arguments, flight.step if done is None else done)
        )
        woken[:] = woken_by(done)
        previous: dict[str, int] | None = getattr(done, "previous", None)
        if previous is not None:
            flight.add_point(sorted(previous), "state", 0)
        answer[:] = [result]
        outcome.body = b'{"arguments":' + flight.canonical + b',"result":' + result + b"," + flight.explain()
        return outcome.body

    await flight.failpoint("before_intent")
    early = await body.wait(flight, flight.arguments) if flight.row.waits else None
    while True:
        if early is None:
            outcome = flight.outcome_row("ok", b"")
            entry = Entry(row=outcome, epoch=flight.epoch, atomic=change, finish=finish)
        else:
            answer[:] = [encode_result(flight.row, early)]
            outcome = flight.outcome_row("ok", inline_payload(answer[0]))
            entry = Entry(row=outcome, epoch=flight.epoch)
        try:
            if await _committed(core, flight, entry):
                break
        except NothingYet:
            early = await body.wait(flight, flight.arguments)
    for agent, owner in woken:
        core.mailboxes.announce(AgentKey(agent), owner)
    await flight.failpoint("after_outcome")
    outcomes.remember(flight, outcome)
    return Answer(step=flight.step, result=answer[0])


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
