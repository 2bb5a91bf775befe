"""Statements that make or drop a table: what they do is known whole, and can be taken back, before it counts. Those that change one were asked about.

INVARIANT: a table is dropped only behind a copy of its rows and of all that the catalog says of it, from which it was made again in
the same transaction, rows and all, and held against what it was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from ringfence.syscalls.errors import CallFailed, InvalidRequest, NoSuchResource, SnapshotFailed
from ringfence.syscalls.sql_common import Statement, Table
from ringfence.syscalls.sql_schema import Act, SchemaShape
from ringfence.syscalls.sql_target.catalog import check_functions
from ringfence.syscalls.sql_target.definition import (
    Definition,
    after_rows,
    before_rows,
    columns_of,
    definition_of,
    refuse_odd,
)
from ringfence.syscalls.sql_target.failures import answered
from ringfence.syscalls.sql_target.putting import arrays, unnest
from ringfence.syscalls.sql_target.records import Change, TableChange
from ringfence.syscalls.sql_target.session import quoted
from ringfence.syscalls.sql_target.tables import locking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.syscalls.declared import SqlResource
    from ringfence.syscalls.sql_target.records import Row
    from ringfence.syscalls.sql_target.session import Session

_EVENTS = "select pg_catalog.min(evtname) from pg_catalog.pg_event_trigger where evtenabled <> 'D'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What such a statement did.

    Attributes:
        change: the table that was made or dropped; None: nothing that could be taken back.
        idle: whether nothing was to be done.
        touched: what of the table goes, as if it were rows, to tell whether the thread made it; empty for a table that is made.
    """

    change: TableChange | None = None
    idle: bool = False
    touched: tuple[Change, ...] = ()


async def change_schema(
    session: Session, statement: Statement, resource: SqlResource, rows_max: int, bytes_max: int
) -> Done:
    """Run one, in a transaction that is not committed yet.

    Raises:
        SnapshotFailed: no verified copy of the table can be made, or the new table could not be dropped again.
        NoSuchResource: there is no such table.
        InvalidRequest: it calls what is refused, or refers to other tables than it names.
        LimitReached: the table has too many rows.
    """
    shape, table = statement.ddl, statement.target
    if shape is None or table is None:
        raise AssertionError
    answers = await check_functions(session, statement, ((_EVENTS, ()),))
    if (event := answers[0].rows[0][0]) is not None:
        raise SnapshotFailed(f"the target's event trigger `{event}` may change anything; nothing was changed")
    if shape.act is Act.CREATE:
        return await _create(session, statement, shape, table)
    there = await session.value("select pg_catalog.to_regclass($1)", [quoted(table.schema, table.name)])
    if there is None:
        if shape.lenient:
            return Done(idle=True)
        raise NoSuchResource(f"there is no table `{table}`")
    await session.ask(locking(table, "access exclusive"))
    if shape.act is not Act.DROP:
        return await _alter(session, statement, shape, table)
    return await _drop(session, table, resource, rows_max, bytes_max)


async def _create(session: Session, statement: Statement, shape: SchemaShape, table: Table) -> Done:
    name = quoted(table.schema, table.name)
    if shape.lenient and await session.value("select pg_catalog.to_regclass($1)", [name]) is not None:
        return Done(idle=True)
    # With its schema: without one it would be made where the search path leads first.
    await session.once(f"create table {name}\n{statement.lexed.text[shape.body :]}")
    made = await definition_of(session, table)
    if made is None:
        raise SnapshotFailed(f"`{table}` was not made where it was expected; nothing was changed")
    refuse_odd(table, made)
    refers = {Table(*one["refers"]) for one in made["constraints"] if one["refers"]}
    if not refers <= set(statement.reads):
        raise InvalidRequest("the table refers to others than the statement names; name them plainly")
    change = TableChange(table.schema, table.name, made=True, definition=made)
    return Done(change=change, touched=(change.as_change(),))


async def _alter(session: Session, statement: Statement, shape: SchemaShape, table: Table) -> Done:
    """What a person was asked about: nothing takes it back."""
    name, column = quoted(table.schema, table.name), quoted(shape.column)
    body = statement.lexed.text[shape.body :]
    if shape.act is Act.DROP_COLUMN:
        exists = "if exists " if shape.column_lenient else ""
        await session.execute(f"alter table {name} drop column {exists}{column} restrict")
    elif shape.act is Act.RENAME_COLUMN:
        await session.execute(f"alter table {name} rename column {column} to {quoted(shape.renamed)}")
    elif shape.act is Act.ADD_COLUMN:
        absent = "if not exists " if shape.column_lenient else ""
        await session.once(f"alter table {name} add column {absent}{column}\n{body}")
    else:
        unique, absent = "unique " * shape.unique, "if not exists " * shape.column_lenient
        await session.once(f"create {unique}index {absent}{column} on {name}\n{body}")
    # Nobody is known to have made a column by itself.
    gone = Change(
        schema=table.schema,
        table=table.name,
        columns=[""],
        types=["index" if shape.act is Act.CREATE_INDEX else "column"],
        key=[""],
        before=[(shape.column,)],
        after=[],
    )
    return Done(touched=(gone,))


async def _drop(session: Session, table: Table, resource: SqlResource, rows_max: int, bytes_max: int) -> Done:
    definition = await definition_of(session, table)
    if definition is None:
        raise NoSuchResource(f"there is no table `{table}`")
    refuse_odd(table, definition)
    # What a sequence gives out meanwhile would be given out again.
    held = [one for one in definition["sequences"] if not one["identity"]]
    for one in held:
        owned = quoted(table.schema, table.name, one["column"])
        await session.execute(f"alter sequence {quoted(one['schema'], one['name'])} owned by {owned}")
    if held:
        definition = await definition_of(session, table) or definition
    columns = columns_of(definition)
    if not columns:
        raise SnapshotFailed(
            f"no verified copy of `{table}` can be made in this release: it has no columns; nothing was changed"
        )
    rows = await rows_in(session, table, definition, rows_max, bytes_max)
    change = TableChange(table.schema, table.name, made=False, definition=definition, rows=rows)
    await session.execute(f"drop table {quoted(table.schema, table.name)} restrict")
    await session.execute("savepoint ringfence_proof")
    try:
        await make_again(session, table, definition, rows)
    except (CallFailed, psycopg.Error) as error:
        said = answered(resource, error).message if isinstance(error, psycopg.Error) else error.message
        why = said.removesuffix("; nothing was changed")
        raise SnapshotFailed(
            f"no verified copy of `{table}` can be made: when it was made again, {why}; nothing was changed"
        ) from None
    await session.execute("rollback to savepoint ringfence_proof")
    return Done(change=change, touched=(change.rows_as_change(), change.as_change()))


async def rows_in(
    session: Session,
    table: Table,
    definition: Definition,
    rows_max: int,
    bytes_max: int,
    *,
    cut: bool = False,
) -> list[Row]:
    """All rows of a table, in the order of `columns_of`; with `cut` so many at most.

    Raises:
        LimitReached: there are more; the transaction can't go on then.
    """
    columns = ", ".join(quoted(name) for name, _ in columns_of(definition))
    words = ["select", columns, "from", quoted(table.schema, table.name), f"limit {rows_max}" if cut else ""]
    return (await session.query(" ".join(words), rows_max=rows_max, bytes_max=bytes_max)).rows


async def make_again(session: Session, table: Table, definition: Definition, rows: Sequence[Row]) -> None:
    """Make a table as it was, and hold it against that.

    Raises:
        CallFailed: it is not the same.
        psycopg.Error: the target doesn't take it.
    """
    # What the driver has prepared goes with any of these, so that nothing else is sent along with them.
    await session.execute("; ".join(before_rows(table, definition)))
    if rows:
        columns = columns_of(definition)
        names = ", ".join(quoted(name) for name, _ in columns)
        values = ", ".join(f"x.c{place}::{kind}" for place, (_, kind) in enumerate(columns))
        words = (
            "insert into",
            quoted(table.schema, table.name),
            f"({names}) overriding system value select",
            values,
        )
        await session.ask((" ".join((*words, "from", unnest(len(columns)))), arrays(rows, len(columns))))
    await session.execute("; ".join(after_rows(table, definition)))
    found = await definition_of(session, table)
    if found != definition:
        raise CallFailed(
            f"{_other(found or {}, definition)} of `{table}` came out in another way than it was"
        )
    if Counter(await rows_in(session, table, definition, len(rows) + 1, 1 << 30)) != Counter(
        map(tuple, rows)
    ):
        raise CallFailed(f"a row of `{table}` reads back in another way than it was")


def _other(found: Definition, wanted: Definition) -> str:
    return next((f"its {part}" for part in wanted if found.get(part) != wanted[part]), "something")
