"""Rolling back rows of a SQL target: plan it, keep a point from just before, put back, verify, commit once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import errors
from ringfence.syscalls.errors import CallFailed, Conflict, SnapshotFailed
from ringfence.syscalls.sql_target.outcome import (
    SETTLE_S,
    Status,
    identify,
    settle,
    status_of,
    transaction_id,
)
from ringfence.syscalls.sql_target.records import KIND, Record, record_from
from ringfence.syscalls.sql_target.rollback import (
    CHANGED_SINCE,
    Key,
    Row,
    SqlConflict,
    SqlItem,
    SqlRestorePlan,
    TableShape,
    changes_of,
    check_resources,
    collapse,
    compare,
    other_database,
)
from ringfence.syscalls.sql_target.session import Session, answered, quoted, transaction
from ringfence.syscalls.sql_target.tables import TableInfo, inspect, lock_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ringfence.syscalls.declared import SqlResource
    from ringfence.syscalls.sql_common import Table

__all__ = [
    "SqlConflict",
    "SqlItem",
    "SqlRestorePlan",
    "SqlRestoreReport",
    "plan_restore",
    "restore",
    "take_point",
]

RESTORE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlRestoreReport:
    """What a rollback did: the rows put back, and those that others changed since the plan, which are kept."""

    items: tuple[SqlItem, ...]
    conflicts: tuple[SqlConflict, ...]


async def plan_restore(
    resource: SqlResource, records_newest_first: Sequence[Mapping[str, Any]]
) -> SqlRestorePlan:
    """Find out what rolling back some writes would do. Changes nothing.

    Args:
        resource: the target.
        records_newest_first: `extra` of the points' manifests. Records of writes that were never committed do
            no harm.

    Raises:
        SnapshotFailed: a record can't be read or is of another resource.
        Conflict: the resource is another database now, or one of the writes is still under way.
        CallFailed: the target can't be reached or answered with an error.
    """
    records = [record_from(extra) for extra in records_newest_first]
    check_resources(records, resource.name)
    async with transaction(resource, mode="isolation level repeatable read, read only") as session:
        identity = await identify(session)
        committed: list[Record] = []
        for record in records:
            if record.identity != identity:
                raise other_database(resource.name)
            status = await status_of(session, record.xid) if record.xid else Status.COMMITTED
            if status is Status.RUNNING:
                raise Conflict(f"a write in `{resource.name}` is still under way; try again")
            # Where the target no longer knows, the rows themselves tell: what never happened is as it was
            # before.
            if status is not Status.ABORTED:
                committed.append(record)
        collapsed = collapse(committed)
        current: dict[Table, dict[Key, Row]] = {}
        for table in list(collapsed.rows):
            shape = collapsed.shapes[table]
            if await _same_shape(session, shape):
                current[table] = await _rows(session, shape, collapsed.keys(table), lock=False)
            else:
                collapsed.drop(
                    table, "the table is gone, or its columns or primary key are others now; it is kept"
                )
    return compare(collapsed, current, resource.name)


async def take_point(resource: SqlResource, plan: SqlRestorePlan) -> dict[str, Any]:
    """The record of what carrying out a plan will do, to be kept as the point from just before it.

    Raises:
        CallFailed: the target can't be reached.
    """
    async with transaction(resource, mode="read only") as session:
        identity = await identify(session)
    return Record(
        kind=KIND,
        resource=resource.name,
        identity=identity,
        xid="",
        statement="restore",
        row_count=len(plan.items),
        columns=[],
        rows=[],
        changes=changes_of(plan),
    ).to_json()


async def restore(resource: SqlResource, plan: SqlRestorePlan) -> SqlRestoreReport:
    """Put rows back: all of the plan that still holds, in one transaction, compared before it commits.

    A row that others changed since the plan was made is left as it is and reported. May be run again after a
    crash: what is as it should be is left alone.

    Raises:
        CallFailed: the target refused, could not be reached, or did not take the rows as they were; nothing
            was changed.
        SnapshotFailed: a table can't be restored now, as it got a trigger; nothing was changed.
        Conflict: rows of others refer to rows that would go, or hold a lock; nothing was changed.
    """
    if not plan.items:
        return SqlRestoreReport(items=(), conflicts=())
    async with transaction(resource, mode="read write", timeout_s=RESTORE_TIMEOUT_S) as session:
        identity = await identify(session)
        tables = sorted({item.table for item in plan.items})
        infos: dict[Table, TableInfo] = {}
        for table in tables:
            await lock_table(session, table, "row exclusive")
            infos[table] = await inspect(session, table, None)
            if not _fits(infos[table], plan.shapes[table]):
                raise Conflict(
                    f"`{table}` has other columns now than when it was written to; nothing was changed"
                )
        items, conflicts = await _still_valid(session, plan)
        await session.execute("set constraints all deferred")
        await _put_back(session, infos, _parents_first(infos), items, resource)
        await _verify(session, plan, items)
        xid = await transaction_id(session)
        try:
            await session.execute("commit")
        except (psycopg.OperationalError, psycopg.InterfaceError):
            if await settle(resource, identity, xid, SETTLE_S) is not Status.COMMITTED:
                raise CallFailed(
                    f"database `{resource.name}` broke the connection at the commit; roll back again"
                ) from None
    return SqlRestoreReport(items=tuple(items), conflicts=tuple(conflicts))


async def _same_shape(session: Session, shape: TableShape) -> bool:
    found = await session.query(
        "select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace "
        "where n.nspname = $1 and c.relname = $2 and c.relkind = 'r'",
        [shape.table.schema, shape.table.name],
    )
    if not found.rows:
        return False
    try:
        return _fits(await inspect(session, shape.table, None), shape)
    except SnapshotFailed:
        return False


def _fits(info: TableInfo, shape: TableShape) -> bool:
    return (info.columns, info.types, info.key) == (shape.columns, shape.types, shape.key)


def _columns_of(rows: Sequence[Sequence[str | None]], width: int) -> list[list[str | None]]:
    """Rows turned into one array a column, as `unnest` takes them."""
    return [[row[place] for row in rows] for place in range(width)]


def _unnest(count: int) -> str:
    """The call of `unnest` that makes text arrays a table `x` with columns `c0`, `c1` and so on."""
    arrays = ", ".join(f"${number}::text[]" for number in range(1, count + 1))
    names = ", ".join(f"c{place}" for place in range(count))
    return f"unnest({arrays}) as x ({names})"


def _join(shape: TableShape) -> str:
    """The condition that joins table `t` and keys `x`; the types print as they were read from the catalog."""
    pairs: list[str] = []
    for place, name in enumerate(shape.key):
        kind = shape.types[shape.columns.index(name)]
        pairs.append(f"t.{quoted(name)} = x.c{place}::{kind}")
    return " and ".join(pairs)


async def _rows(session: Session, shape: TableShape, keys: Sequence[Key], *, lock: bool) -> dict[Key, Row]:
    """The rows that there are of some keys."""
    columns = ", ".join(f"t.{quoted(name)}" for name in shape.columns)
    words = [
        "select",
        columns,
        "from",
        quoted(shape.table.schema, shape.table.name),
        "as t join",
        _unnest(len(shape.key)),
        "on",
        _join(shape),
        "for update of t" if lock else "",
    ]
    found = await session.query(" ".join(words), _columns_of(keys, len(shape.key)))
    places = [shape.columns.index(name) for name in shape.key]
    return {tuple(str(row[place]) for place in places): row for row in found.rows}


async def _still_valid(session: Session, plan: SqlRestorePlan) -> tuple[list[SqlItem], list[SqlConflict]]:
    """The items whose rows are still as the plan found them, now locked; those already done are neither."""
    items: list[SqlItem] = []
    conflicts: list[SqlConflict] = []
    for table in sorted({item.table for item in plan.items}):
        mine = [item for item in plan.items if item.table == table]
        current = await _rows(session, plan.shapes[table], [item.key for item in mine], lock=True)
        for item in mine:
            now = current.get(item.key)
            if now == item.expected:
                items.append(item)
            elif now != item.before:
                conflicts.append(SqlConflict(table=table, key=item.key, reason=CHANGED_SINCE))
    return items, conflicts


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


async def _put_back(
    session: Session,
    infos: Mapping[Table, TableInfo],
    parents_first: Sequence[Table],
    items: Iterable[SqlItem],
    resource: SqlResource,
) -> None:
    """Create, restore, remove; foreign keys want this order.

    Where unique values moved between rows, they want the opposite one, which is tried next.

    Raises:
        CallFailed: neither order is taken by the target.
    """
    by_table: dict[tuple[Table, str], list[SqlItem]] = {}
    for item in items:
        by_table.setdefault((item.table, item.action), []).append(item)
    orders = (("create", "restore", "remove"), ("remove", "restore", "create"))
    refusal: psycopg.Error | None = None
    for actions in orders:
        await session.execute("savepoint ringfence")
        try:
            for action in actions:
                tables = parents_first if action != "remove" else list(reversed(parents_first))
                for table in tables:
                    if (table, action) in by_table:
                        await _STEPS[action](session, infos[table], by_table[table, action])
            await session.execute("set constraints all immediate")
        except errors.IntegrityError as error:
            refusal = refusal or error
            await session.execute("rollback to savepoint ringfence")
        else:
            return
    if refusal is not None:
        said = answered(resource, refusal).message[:500]
        raise CallFailed(f"the rows can't be put back: {said}; nothing was changed")


async def _create(session: Session, info: TableInfo, items: Sequence[SqlItem]) -> None:
    values = ", ".join(f"x.c{place}::{kind}" for place, kind in enumerate(info.types))
    words = (
        "insert into",
        info.sql,
        f"({info.list_columns()}) overriding system value select",
        values,
        "from",
    )
    rows = [item.before for item in items if item.before is not None]
    await _change(session, [*words, _unnest(len(info.columns))], rows, info)


async def _restore(session: Session, info: TableInfo, items: Sequence[SqlItem]) -> None:
    shape = _key_first(info)
    settable = [name for name in shape.columns if name not in info.key and name not in info.fixed]
    if not settable:
        return
    sets = ", ".join(
        f"{quoted(name)} = x.c{shape.columns.index(name)}::{shape.types[shape.columns.index(name)]}"
        for name in settable
    )
    words = ("update", info.sql, "as t set", sets, "from", _unnest(len(shape.columns)), "where", _join(shape))
    places = [info.columns.index(name) for name in shape.columns]
    rows = [tuple(item.before[place] for place in places) for item in items if item.before is not None]
    await _change(session, words, rows, info)


async def _remove(session: Session, info: TableInfo, items: Sequence[SqlItem]) -> None:
    shape = _key_first(info)
    keys = [item.key for item in items]
    for reference in info.references:
        if reference.on_delete:
            on = " and ".join(f"c.{quoted(child)} = t.{quoted(mine)}" for child, mine in reference.columns)
            child = quoted(reference.child.schema, reference.child.name)
            words = (
                "select 1 from",
                child,
                "as c join",
                info.sql,
                "as t on",
                on,
                "join",
                _unnest(len(shape.key)),
            )
            found = await session.query(
                " ".join((*words, "on", _join(shape), "limit 1")), _columns_of(keys, len(shape.key))
            )
            if found.rows:
                raise Conflict(
                    f"rows of `{reference.child}` refer to rows of `{info.table}` that would go, and "
                    f"`{reference.name}` would {reference.on_delete} them; nothing was changed, settle these first"
                )
    words = ("delete from", info.sql, "as t using", _unnest(len(shape.key)), "where", _join(shape))
    await _change(session, words, keys, info)


def _key_first(info: TableInfo) -> TableShape:
    """The table's columns with those of the key in front, as `_join` numbers them."""
    names = (*info.key, *(name for name in info.columns if name not in info.key))
    return TableShape(
        table=info.table,
        columns=names,
        types=tuple(info.types[info.columns.index(name)] for name in names),
        key=info.key,
    )


async def _change(
    session: Session, words: Sequence[str], rows: Sequence[Sequence[str | None]], info: TableInfo
) -> None:
    done = await session.query(" ".join((*words, "returning 1")), _columns_of(rows, len(rows[0])))
    if len(done.rows) != len(rows):
        raise CallFailed(
            f"{len(rows)} rows of `{info.table}` were to be put back, the target took {len(done.rows)}; "
            "nothing was changed"
        )


_STEPS: Final = {"create": _create, "restore": _restore, "remove": _remove}


async def _verify(session: Session, plan: SqlRestorePlan, items: Sequence[SqlItem]) -> None:
    """Read back every row that was put back and compare it byte for byte."""
    for table in sorted({item.table for item in items}):
        mine = [item for item in items if item.table == table]
        current = await _rows(session, plan.shapes[table], [item.key for item in mine], lock=False)
        for item in mine:
            if current.get(item.key) != item.before:
                raise CallFailed(
                    f"a row of `{table}` reads back in another way than it was; nothing was changed"
                )
