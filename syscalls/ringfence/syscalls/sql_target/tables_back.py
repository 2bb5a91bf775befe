"""Undoing statements that made or dropped tables: what stands there, and how what stood there comes back.

A table goes back to how it was before the oldest of some records, but only if it is, by definition and rows, what the newest of them
left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg import errors
from ringfence.syscalls.errors import CallFailed, Conflict
from ringfence.syscalls.sql_target.ddl import make_again, rows_in
from ringfence.syscalls.sql_target.definition import definition_of, name_taken, same_table
from ringfence.syscalls.sql_target.failures import answered
from ringfence.syscalls.sql_target.lives import Life, TableItem, TableState, same_rows
from ringfence.syscalls.sql_target.session import quoted
from ringfence.syscalls.sql_target.tables import locking

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ringfence.syscalls.declared import SqlResource
    from ringfence.syscalls.sql_common import Table
    from ringfence.syscalls.sql_target.records import TableChange
    from ringfence.syscalls.sql_target.session import Session

TAKEN = "something else has its name, or that of a part of it, now; it is kept"
OTHERS = "it is no longer what was made there: others changed it or its rows; it is kept"
BETWEEN = "others wrote rows of it between the agent's writes; it is kept"
_BYTES_MAX = 1 << 30


async def compare_tables(
    session: Session, lives: Mapping[Table, Life]
) -> tuple[list[TableItem], dict[Table, str]]:
    """Hold lives against what stands there: what is to be done, and the reasons why others are kept."""
    items: list[TableItem] = []
    conflicts: dict[Table, str] = {}
    for table, life in lives.items():
        sizes = [len(state.rows) for state in (life.expected, life.wanted) if state is not None]
        now = await _state_of(session, table, max(sizes, default=0))
        nothing = life.expected is None and life.wanted is None
        if (nothing and not life.broken) or _same(now, life.wanted):
            continue
        if life.broken:
            conflicts[table] = BETWEEN
        elif not _same(now, life.expected):
            conflicts[table] = TAKEN if life.expected is None else OTHERS
        elif now is None and life.wanted and await name_taken(session, table, life.wanted.definition):
            conflicts[table] = TAKEN
        else:
            items.append(TableItem(table=table, expected=now, wanted=life.wanted))
    return items, conflicts


async def lock_tables(
    session: Session, items: Iterable[TableItem]
) -> tuple[list[TableItem], dict[Table, str]]:
    """The items that still hold, their tables locked, and why others don't; those already done are neither."""
    lives: dict[Table, Life] = {}
    for item in items:
        name = quoted(item.table.schema, item.table.name)
        if await session.value("select pg_catalog.to_regclass($1)", [name]) is not None:
            await session.ask(locking(item.table, "access exclusive"))
        lives[item.table] = Life(expected=item.expected, wanted=item.wanted)
    return await compare_tables(session, lives)


async def remove_tables(session: Session, items: Iterable[TableItem]) -> None:
    """Drop what is not to stand there, all at once: they may refer to each other.

    Raises:
        Conflict: something that others made depends on one of them.
    """
    gone = [item.table for item in items if item.expected is not None]
    if not gone:
        return
    names = ", ".join(quoted(table.schema, table.name) for table in gone)
    try:
        await session.execute(f"drop table {names} restrict")
    except errors.DependentObjectsStillExist as error:
        said = (error.diag.message_detail or "").splitlines()[0:1]
        raise Conflict(
            f"{', '.join(f'`{table}`' for table in gone)} can't go, something of others depends on it"
            f"{': ' + said[0] if said else ''}; nothing was changed, settle this first"
        ) from None


async def make_tables(session: Session, items: Iterable[TableItem], resource: SqlResource) -> None:
    """Make again what is to stand there, those first that were dropped last.

    Raises:
        CallFailed: the target doesn't take one as it was.
        Conflict: somebody has taken the name of one, or of a part of it.
    """
    for item in items:
        if item.wanted is None:
            continue
        try:
            await make_again(session, item.table, item.wanted.definition, item.wanted.rows)
        except (errors.DuplicateTable, errors.DuplicateObject):
            raise Conflict(f"`{item.table}` can't be made again: {TAKEN}; nothing was changed") from None
        except (psycopg.IntegrityError, psycopg.ProgrammingError, psycopg.DataError) as error:
            said = answered(resource, error).message[:500]
            raise CallFailed(f"`{item.table}` can't be made again: {said}; nothing was changed") from None


def events_of(items: Sequence[TableItem]) -> list[TableChange]:
    """What carrying items out does, as a record has it."""
    dropped = [item.expected.change(item.table, made=False) for item in items if item.expected is not None]
    return dropped + [item.wanted.change(item.table, made=True) for item in items if item.wanted is not None]


async def _state_of(session: Session, table: Table, rows_max: int) -> TableState | None:
    """A table with as many of its rows as tell whether there are more than expected."""
    definition = await definition_of(session, table)
    if definition is None:
        return None
    if definition["odd"]:
        return TableState(definition=definition, rows=[])
    rows = await rows_in(session, table, definition, rows_max + 1, _BYTES_MAX, cut=True)
    return TableState(definition=definition, rows=rows)


def _same(one: TableState | None, other: TableState | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_table(one.definition, other.definition) and same_rows(one.rows, other.rows)
