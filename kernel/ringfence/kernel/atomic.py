"""ATOMIC calls: the work and its outcome are one commit, so it happened or it didn't.

INVARIANT: a row under way is never abandoned, for its change may commit; its flush checks the epoch itself.
"""

from __future__ import annotations

from ringfence.kernel.admission import Admission
from ringfence.kernel.core import Core
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import Entry, EpochMoved, NothingYet, StateConflict
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

    def finish(done: object) -> bytes:
        # A checkpoint is named by the step that saved it; nothing else about it is news.
        result = encode_result(
            flight.row, body.finish(flight.arguments, flight.step if done is None else done)
        )
        previous: dict[str, int] | None = getattr(done, "previous", None)
        if previous is not None:
            flight.add_point(sorted(previous), "state", 0)
        answer[:] = [result]
        outcome.body = b'{"arguments":' + flight.canonical + b',"result":' + result + b"," + flight.explain()
        return outcome.body

    await flight.failpoint("before_intent")
    while True:
        early = await body.wait(flight, flight.arguments) if flight.row.waits else None
        if early is None:
            outcome = flight.outcome_row("ok", b"")
            entry = Entry(row=outcome, epoch=flight.epoch, atomic=change, finish=finish)
        else:
            answer[:] = [encode_result(flight.row, early)]
            outcome = flight.outcome_row("ok", inline_payload(answer[0]))
            entry = Entry(row=outcome, epoch=flight.epoch)
        flight.effect_started = True
        try:
            await core.append(entry)
        except EpochMoved as moved:
            await Admission(core).decide_again(flight, moved)
        except StateConflict as conflict:
            raise conflict_error(conflict) from conflict
        except NothingYet:
            await _look_up(flight)
        else:
            break
    await flight.failpoint("after_outcome")
    outcomes.remember(flight, outcome)
    return Answer(step=flight.step, result=answer[0])


async def _look_up(flight: Flight) -> None:
    """Between two tries: from here on the call may be cancelled, so what was said during the try counts now."""
    flight.effect_started = False
    if flight.fate is not None:
        raise flight.fate
    rights = await flight.thread.current_rights()
    if rights is not flight.rights:
        await flight.look_again(rights)
