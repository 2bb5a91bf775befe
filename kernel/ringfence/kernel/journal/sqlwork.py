"""Atomic work that statements of `atomic.sql` do, inside the open transaction of a flush.

All of a batch go in one round trip behind one savepoint. Where one of them fails, they are undone and done one by one,
each behind a savepoint of its own, so that a failure costs only its own entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec
from ringfence.kernel.journal.copyrows import Pending, packed_work
from ringfence.kernel.journal.database import statements
from ringfence.kernel.journal.types import BadRow, Moved, NothingYet, StateConflict
from ringfence.kernel.journal.wire import Refused
from ringfence.syscalls.base import Work

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult
    from ringfence.kernel.journal.batches import Head
    from ringfence.kernel.journal.wire import Statement, Wire

SAVEPOINT: Statement = (b"savepoint", ())
RELEASE: Statement = (b"release", ())
UNDO: Statement = (b"undo", ())

# Classes of what no single statement is to blame for: the transaction has to be begun again, or the server is unwell.
_NOT_THE_WORK = ("40", "53", "55", "57", "58", "25", "08", "XX")

Errors = dict[int, Exception]
"""Why entries failed, by their place in the batch."""


class _Refusal(msgspec.Struct, frozen=True):
    """The answers that say that nothing was done."""

    conflict: dict[str, Moved] | None = None
    again: bool = False


def texts() -> Mapping[str, str]:
    """The statements by name."""
    return statements("atomic")


def prepared(name: str) -> bytes:
    """Name of a statement on the writer's connection."""
    return b"atomic_" + name.encode()


async def run(
    wire: Wire, batch: list[Pending], heads: Mapping[int, Head], finish: Callable[[Pending], None]
) -> list[Pending]:
    """Do the work of the batch's entries, in order, and finish each that has some.

    Args:
        wire: a connection in an open transaction.
        batch: entries, of which some have a Work.
        heads: whose chains they are.
        finish: makes an entry's body once `done` is set.

    Returns:
        The batch without the entries whose work was not done. Those failed with StateConflict, NothingYet, BadRow or
        what `finish` raised.

    Raises:
        Lost, Refused: as the wire says; then the transaction is to be begun again.
    """
    sends: dict[int, Statement] = {}
    errors: Errors = {}
    for nr, pending in enumerate(batch):
        if isinstance(pending.entry.atomic, Work):
            try:
                sends[nr] = _statement(pending, pending.entry.atomic, heads)
            except BadRow as error:
                errors[nr] = error
    if sends and not await _together(wire, batch, sends, finish, errors):
        await wire.run(UNDO)
        for nr, send in sends.items():
            errors.pop(nr, None)
            error = await _alone(wire, batch[nr], send, finish)
            if error is not None:
                errors[nr] = error
    for nr, error in errors.items():
        if not batch[nr].future.done():
            batch[nr].future.set_exception(error)
    return [pending for nr, pending in enumerate(batch) if nr not in errors] if errors else batch


async def _together(
    wire: Wire,
    batch: list[Pending],
    sends: dict[int, Statement],
    finish: Callable[[Pending], None],
    errors: Errors,
) -> bool:
    """Do all in one round trip. False: one failed or changed something and can't be finished, so all is to be undone."""
    try:
        results = (await wire.pipeline([SAVEPOINT, *sends.values()]))[1:]
    except Refused as refused:
        if refused.sqlstate.startswith(_NOT_THE_WORK):
            raise
        return False
    for nr, result in zip(sends, results, strict=True):
        error = _finished(batch[nr], result, finish)
        if isinstance(error, (StateConflict, NothingYet)):
            errors[nr] = error
        elif error is not None:
            return False
    return True


async def _alone(
    wire: Wire, pending: Pending, send: Statement, finish: Callable[[Pending], None]
) -> Exception | None:
    try:
        result = (await wire.pipeline([SAVEPOINT, send]))[1]
    except Refused as refused:
        if refused.sqlstate.startswith(_NOT_THE_WORK):
            raise
        error = BadRow(f"the work can't be done: {refused}")
    else:
        error = _finished(pending, result, finish)
    # A savepoint that was rolled back to still stands: it is released either way.
    await wire.pipeline([RELEASE] if error is None else [UNDO, RELEASE])
    return error


def _finished(pending: Pending, result: PGresult, finish: Callable[[Pending], None]) -> Exception | None:
    try:
        pending.done = _answer(result)
        finish(pending)
    except Exception as error:  # noqa: BLE001 - `finish` is the caller's: so is its error
        return error
    return None


def _answer(result: PGresult) -> Any:
    packed = result.get_value(0, 0) if result.ntuples else None
    if packed is None:
        return None
    # One byte says which form of jsonb it is.
    done: Any = msgspec.json.decode(packed[1:])
    if isinstance(done, dict):
        refusal = msgspec.convert(done, _Refusal)
        if refusal.conflict is not None:
            raise StateConflict(refusal.conflict)
        if refusal.again:
            raise NothingYet
    return cast("Any", done)


def _statement(pending: Pending, work: Work, heads: Mapping[int, Head]) -> Statement:
    if work.statement not in texts():
        raise BadRow(f"no such work: `{work.statement}`")
    row = pending.entry.row
    return prepared(work.statement), (packed_work(row, heads[row.chain].agent, work),)
