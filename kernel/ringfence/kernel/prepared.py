"""ATOMIC calls that make something ready outside the database before their commit, such as files.

INVARIANT: what was made ready counts only once the outcome is committed; until then a crash leaves something that the next
kernel recognises and takes away.
"""

from __future__ import annotations

from ringfence.kernel.admission import Admission
from ringfence.kernel.core import Core
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import Entry, EpochMoved, NothingYet, StateConflict
from ringfence.kernel.outcomes import Outcomes, conflict_error
from ringfence.kernel.settled import Answer
from ringfence.syscalls.codec import encode_result
from ringfence.syscalls.errors import Fenced, JournalUnavailable

IN_DOUBT = (JournalUnavailable, Fenced)
"""After these nobody knows yet whether the commit happened; whoever owns the agent next finds out."""


async def run_prepared(core: Core, outcomes: Outcomes, flight: Flight) -> Answer:
    """Run an admitted call to its answer.

    Raises:
        SyscallError: it was not done.
        JournalError: the database refused it.
    """
    body = flight.row.body
    done: list[object] = []
    answer: list[bytes] = []

    def finish(found: object) -> bytes:
        told = body.finish(flight.arguments, found)
        result = encode_result(flight.row, told)
        done[:], answer[:] = [found], [result]
        used = flight.answered_at(told, result) if flight.carried else b""
        head = flight.opening() + used + b'"arguments":' + flight.canonical
        outcome.body = head + b',"result":' + result + b"," + flight.explain()
        return outcome.body

    await flight.failpoint("before_intent")
    try:
        while True:
            # Each time anew: it is made under the rights that the commit checks.
            rights = flight.thread.rights
            work = await body.prepare(flight, flight.arguments)
            await flight.check_live()
            if flight.rights is not rights:
                flight.effect_started = False
                continue
            outcome = flight.outcome_row("ok", b"")
            entry = Entry(row=outcome, epoch=flight.epoch, atomic=work, finish=finish)
            if await _committed(core, flight, entry):
                break
    except IN_DOUBT:
        raise
    except BaseException:
        await body.settle(flight, flight.arguments, None)
        raise
    await flight.failpoint("after_outcome")
    await body.settle(flight, flight.arguments, done[0])
    outcomes.remember(flight, outcome)
    return Answer(step=flight.step, result=answer[0])


async def _committed(core: Core, flight: Flight, entry: Entry) -> bool:
    """Try to commit. False: it was not done and is tried again."""
    try:
        await core.append(entry)
    except EpochMoved as moved:
        flight.effect_started = False
        if flight.fate is not None:
            raise flight.fate from moved
        await Admission(core).decide_again(flight, moved)
        return False
    except StateConflict as conflict:
        flight.effect_started = False
        raise conflict_error(conflict) from conflict
    except NothingYet:
        flight.effect_started = False
        if flight.fate is not None:
            raise flight.fate from None
        return False
    return True
