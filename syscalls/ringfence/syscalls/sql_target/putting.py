"""Putting rows back into their tables: the statements, the order they want, and that the target took what it was given."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import errors
from ringfence.syscalls.errors import CallFailed, Conflict
from ringfence.syscalls.sql_target.failures import answered
from ringfence.syscalls.sql_target.records import by_key
from ringfence.syscalls.sql_target.rollback import Key, Row, SqlItem, TableShape
from ringfence.syscalls.sql_target.session import Session, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ringfence.syscalls.declared import SqlResource
    from ringfence.syscalls.sql_common import Table
    from ringfence.syscalls.sql_target.tables import Reference, TableInfo

_ORDERS: Final = (("create", "restore", "remove"), ("remove", "restore", "create"))


async def put_back(
    session: Session,
    infos: Mapping[Table, TableInfo],
    items: Iterable[SqlItem],
    resource: SqlResource,
) -> None:
    """Create, restore, remove; foreign keys want this order.

    Where unique values moved between rows, they want the opposite one, which is tried next; where they went round, neither will
    do, and all rows are taken out and put back by one statement, after which alone the target looks at its constraints.

    Raises:
        CallFailed: the target takes them in no way, or not as they were.
        Conflict: rows of others refer to rows that would go or change.
    """
    by_table = _sorted_out(infos, items)
    if not by_table:
        return
    order = _parents_first(infos)
    ways = [functools.partial(_in_order, session, infos, by_table, order, actions) for actions in _ORDERS]
    if not any(reference.on_delete for info in infos.values() for reference in info.references):
        ways.append(functools.partial(_replace, session, [(infos[table], by_table) for table in order]))
    refusal: psycopg.Error | None = None
    for way in ways:
        await session.execute("savepoint ringfence; set constraints all deferred")
        try:
            await way()
            await session.execute("set constraints all immediate")
        except errors.IntegrityError as error:
            refusal = refusal or error
            await session.execute("rollback to savepoint ringfence")
        else:
            return
    if refusal is not None:
        said = answered(resource, refusal).message[:500]
        raise CallFailed(f"the rows can't be put back: {said}; nothing was changed")


def _sorted_out(
    infos: Mapping[Table, TableInfo], items: Iterable[SqlItem]
) -> dict[tuple[Table, str], list[SqlItem]]:
    found: dict[tuple[Table, str], list[SqlItem]] = {}
    for item in items:
        for part in _parts(infos[item.table], item):
            found.setdefault((part.table, part.action), []).append(part)
    return found


def _parts(info: TableInfo, item: SqlItem) -> tuple[SqlItem, ...]:
    """A row whose always generated identity is another now can't be updated: it is taken out, and put back."""
    before, now = item.before, item.expected
    places = info.places([name for name in info.columns if name in info.fixed and name not in info.key])
    if before is None or now is None or all(before[place] == now[place] for place in places):
        return (item,)
    return replace(item, action="remove", before=None), replace(item, action="create", expected=None)


async def _in_order(
    session: Session,
    infos: Mapping[Table, TableInfo],
    by_table: Mapping[tuple[Table, str], Sequence[SqlItem]],
    parents_first: Sequence[Table],
    actions: Sequence[str],
) -> None:
    for action in actions:
        for table in parents_first if action != "remove" else reversed(parents_first):
            if (table, action) in by_table:
                await _STEPS[action](session, infos[table], by_table[table, action])


async def rows_of(
    session: Session, shape: TableShape, keys: Sequence[Key], *, lock: bool = False
) -> dict[Key, Row]:
    """The rows that there are of some keys."""
    columns = ", ".join(f"t.{quoted(name)}" for name in shape.columns)
    words = ["select", columns, *_matching(shape), "for update of t" if lock else ""]
    found = await session.query(" ".join(words), arrays(keys, len(shape.key)))
    return by_key(shape.columns, shape.key, found.rows)


async def writers_of(session: Session, shape: TableShape, keys: Sequence[Key]) -> dict[Key, str]:
    """The target's ids of the transactions that wrote the present rows of some keys."""
    columns = ", ".join(f"t.{quoted(name)}" for name in shape.key)
    words = ["select t.xmin,", columns, *_matching(shape)]
    found = await session.query(" ".join(words), arrays(keys, len(shape.key)))
    return {tuple(map(str, row[1:])): str(row[0]) for row in found.rows}


def _matching(shape: TableShape) -> tuple[str, ...]:
    name = quoted(shape.table.schema, shape.table.name)
    return ("from", name, "as t join", unnest(len(shape.key)), "on", _join(shape))


def arrays(rows: Sequence[Sequence[str | None]], width: int) -> list[str]:
    """Rows turned into the text of one array a column, as `unnest` takes them."""
    return ["{" + ",".join([_element(row[place]) for row in rows]) + "}" for place in range(width)]


def _element(value: str | None) -> str:
    if value is None:
        return "NULL"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unnest(count: int, first: int = 1) -> str:
    """The call of `unnest` that makes text arrays a table `x` with columns `c0`, `c1` and so on."""
    texts = ", ".join(f"${number}::pg_catalog.text[]" for number in range(first, first + count))
    names = ", ".join(f"c{place}" for place in range(count))
    return f"unnest({texts}) as x ({names})"


def _join(shape: TableShape) -> str:
    """The condition that joins table `t` and keys `x`; the types print as they were read from the catalog."""
    pairs: list[str] = []
    for place, name in enumerate(shape.key):
        kind = shape.types[shape.columns.index(name)]
        pairs.append(f"t.{quoted(name)} = x.c{place}::{kind}")
    return " and ".join(pairs)


def _parents_first(infos: Mapping[Table, TableInfo]) -> list[Table]:
    """Tables in an order in which those that are referred to come first, as far as there is one."""
    order: list[Table] = []
    visiting: set[Table] = set()

    def visit(table: Table) -> None:
        if table in visiting or table in order:
            return
        visiting.add(table)
        for parent, info in sorted(infos.items()):
            if any(reference.child == table for reference in info.references):
                visit(parent)
        order.append(table)

    for table in sorted(infos):
        visit(table)
    return order


def _inserting(info: TableInfo, first: int = 1) -> list[str]:
    values = ", ".join(f"x.c{place}::{kind}" for place, kind in enumerate(info.types))
    head = f"({info.list_columns()}) overriding system value select"
    return ["insert into", info.sql, "as t", head, values, "from", unnest(len(info.columns), first)]


async def _create(session: Session, info: TableInfo, items: Sequence[SqlItem]) -> None:
    rows = [item.before for item in items if item.before is not None]
    words = [*_inserting(info), "returning", info.list_columns("t")]
    await _check(session, words, rows, rows, info)


async def _restore(session: Session, info: TableInfo, items: Sequence[SqlItem]) -> None:
    pairs = [
        (item.before, item.expected)
        for item in items
        if item.before is not None and item.expected is not None
    ]
    # Only what differs is set: the role may not be allowed to set more.
    different = [
        name
        for place, name in enumerate(info.columns)
        if name not in info.key and any(before[place] != now[place] for before, now in pairs)
    ]
    for reference in info.references:
        if reference.on_update and not set(different).isdisjoint(mine for _, mine in reference.columns):
            await _refuse_referred(
                session, info, reference, reference.on_update, [item.key for item in items]
            )
    names = (*info.key, *different)
    places = info.places(names)
    shape = TableShape(
        table=info.table, columns=names, types=tuple(info.types[place] for place in places), key=info.key
    )
    sets = ", ".join(
        f"{quoted(name)} = x.c{place}::{shape.types[place]}"
        for place, name in enumerate(names)
        if name in different
    )
    words = ["update", info.sql, "as t set", sets, "from", unnest(len(names)), "where", _join(shape)]
    rows = [tuple(before[place] for place in places) for before, _ in pairs]
    await _check(
        session,
        [*words, "returning", info.list_columns("t")],
        rows,
        [before for before, _ in pairs],
        info,
    )


async def _remove(session: Session, info: TableInfo, items: Sequence[SqlItem]) -> None:
    keys = [item.key for item in items]
    for reference in info.references:
        if reference.on_delete:
            await _refuse_referred(session, info, reference, reference.on_delete, keys)
    await _check(session, [*_deleting(info), "returning 1"], keys, None, info)


def _deleting(info: TableInfo, first: int = 1) -> list[str]:
    shape = _shape(info)
    return ["delete from", info.sql, "as t using", unnest(len(shape.key), first), "where", _join(shape)]


async def _refuse_referred(
    session: Session, info: TableInfo, reference: Reference, action: str, keys: Sequence[Key]
) -> None:
    """Refuse to remove or change rows where the target would follow that up in rows that refer to them.

    Raises:
        Conflict: there are such rows.
    """
    on = " and ".join(f"c.{quoted(child)} = t.{quoted(mine)}" for child, mine in reference.columns)
    child = quoted(reference.child.schema, reference.child.name)
    words = ("select 1 from", child, "as c join", info.sql, "as t on", on, "join", unnest(len(info.key)))
    found = await session.query(
        " ".join((*words, "on", _join(_shape(info)), "limit 1")), arrays(keys, len(info.key))
    )
    if found.rows:
        raise Conflict(
            f"rows of `{reference.child}` refer to rows of `{info.table}` that would go or change, and "
            f"`{reference.name}` would {action} them; nothing was changed, settle these first"
        )


def _shape(info: TableInfo) -> TableShape:
    return TableShape(table=info.table, columns=info.columns, types=info.types, key=info.key)


async def _check(
    session: Session,
    words: Sequence[str],
    rows: Sequence[Sequence[str | None]],
    wanted: Sequence[Row] | None,
    info: TableInfo,
) -> None:
    """Run a statement for some rows, and compare what it made byte for byte with what was wanted."""
    done = await session.query(" ".join(words), arrays(rows, len(rows[0])))
    if len(done.rows) != len(rows):
        raise CallFailed(
            f"{len(rows)} rows of `{info.table}` were to be put back, the target took {len(done.rows)}; "
            "nothing was changed"
        )
    if wanted is not None and set(done.rows) != set(wanted):
        raise _differently(info.table)


def _differently(table: Table) -> CallFailed:
    return CallFailed(f"a row of `{table}` reads back in another way than it was; nothing was changed")


async def _replace(
    session: Session, tables: Sequence[tuple[TableInfo, Mapping[tuple[Table, str], Sequence[SqlItem]]]]
) -> None:
    """Take out all rows and put them back, by one statement for all tables."""
    parts: list[str] = []
    parameters: list[str] = []
    wanted: list[tuple[TableInfo, list[Row]]] = []
    for number, (info, by_table) in enumerate(tables):
        items = [item for action in _STEPS for item in by_table.get((info.table, action), ())]
        gone = [item.key for item in items if item.expected is not None]
        back = [item.before for item in items if item.before is not None]
        deleting = " ".join(_deleting(info, len(parameters) + 1))
        parameters += arrays(gone, len(info.key))
        inserting = " ".join(_inserting(info, len(parameters) + 1))
        parameters += arrays(back, len(info.columns))
        # The count makes the target take rows out before it puts any in.
        counted = " ".join(("(select count(*) from", f"gone{number}) =", str(len(gone))))
        parts += [
            f"gone{number} as ({deleting} returning 1)",
            f"back{number} as ({inserting} where {counted} returning 1)",
        ]
        wanted.append((info, back))
    await session.query(" ".join(("with", ", ".join(parts), "select 1")), parameters)
    for info, back in wanted:
        keys = list(by_key(info.columns, info.key, back))
        if set((await rows_of(session, _shape(info), keys)).values()) != set(back):
            raise _differently(info.table)


_STEPS: Final = {"create": _create, "restore": _restore, "remove": _remove}
