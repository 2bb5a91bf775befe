"""Rolling back rows of a SQL target: plan it, keep a point from just before, put back, verify, commit once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import psycopg
from ringfence.syscalls.errors import CallFailed, Conflict, NoSuchResource, SnapshotFailed
from ringfence.syscalls.sql_target.failures import answered
from ringfence.syscalls.sql_target.lives import TableItem
from ringfence.syscalls.sql_target.outcome import (
    SETTLE_S,
    Status,
    identify,
    settle,
    status_of,
    transaction_id,
)
from ringfence.syscalls.sql_target.putting import put_back, rows_of, writers_of
from ringfence.syscalls.sql_target.records import KIND, Change, Record, record_from
from ringfence.syscalls.sql_target.rollback import (
    CHANGED_SINCE,
    Key,
    Row,
    SqlConflict,
    SqlItem,
    SqlRestorePlan,
    TableShape,
    action_of,
    changed_columns,
    changes_of,
    check_resources,
    collapse,
    compare,
    other_database,
)
from ringfence.syscalls.sql_target.session import Session, transaction
from ringfence.syscalls.sql_target.tables import TableInfo, inspect, locking
from ringfence.syscalls.sql_target.tables_back import (
    compare_tables,
    events_of,
    lock_tables,
    make_tables,
    remove_tables,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
_MODE: Final = "isolation level read committed, read write"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlRestoreReport:
    """What a rollback did: the rows and tables put back, and those that others changed since the plan, which are kept."""

    items: tuple[SqlItem, ...]
    conflicts: tuple[SqlConflict, ...]
    tables: tuple[TableItem, ...] = ()


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
                current[table] = await rows_of(session, shape, collapsed.keys(table))
            else:
                collapsed.drop(
                    table, "the table is gone, or its columns or primary key are others now; it is kept"
                )
        tables, kept = await compare_tables(session, collapsed.lives)
        collapsed.conflicts += [SqlConflict(table=table, key=(), reason=why) for table, why in kept.items()]
        plan = replace(compare(collapsed, current, resource.name), tables=tuple(tables))
        return await _told_by_whom(session, plan)


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
        tables=events_of(plan.tables),
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
    if plan.empty:
        return SqlRestoreReport(items=(), conflicts=())
    async with transaction(resource, mode=_MODE, timeout_s=RESTORE_TIMEOUT_S) as session:
        tables = sorted({item.table for item in plan.items})
        infos: dict[Table, TableInfo] = {}
        for table in tables:
            infos[table] = await inspect(session, table, "row exclusive")
            if infos[table].deletes and not infos[table].updates:
                # Who may not update rows can't lock them one by one.
                await session.ask(locking(table, "share row exclusive"))
            if not _fits(infos[table], plan.shapes[table]):
                raise Conflict(
                    f"`{table}` has other columns now than when it was written to; nothing was changed"
                )
        moved, kept = await lock_tables(session, plan.tables)
        items, conflicts = await _still_valid(session, plan, infos)
        conflicts += [SqlConflict(table=table, key=(), reason=why) for table, why in kept.items()]
        await remove_tables(session, moved)
        await put_back(session, infos, items, resource)
        await make_tables(session, moved, resource)
        own = await transaction_id(session)
        try:
            await session.once("commit")
        except (psycopg.OperationalError, psycopg.InterfaceError):
            if await settle(resource, own.identity, own.xid, SETTLE_S) is not Status.COMMITTED:
                raise CallFailed(
                    f"database `{resource.name}` broke the connection at the commit; roll back again"
                ) from None
    return SqlRestoreReport(items=tuple(items), conflicts=tuple(conflicts), tables=tuple(moved))


async def prove(session: Session, info: TableInfo, change: Change, resource: SqlResource) -> None:
    """Undo a change that was just made, in the transaction that made it, and take that back again.

    Raises:
        SnapshotFailed: it can't be undone.
    """
    before, after = change.keyed(change.before), change.keyed(change.after)
    items = [
        SqlItem(
            table=info.table,
            key=key,
            action=action_of(before.get(key), after.get(key)),
            before=before.get(key),
            expected=after.get(key),
        )
        for key in before | after
        if before.get(key) != after.get(key)
    ]
    await session.execute("savepoint ringfence_proof")
    try:
        await put_back(session, {info.table: info}, items, resource)
    except (CallFailed, Conflict, psycopg.Error) as error:
        said = answered(resource, error).message if isinstance(error, psycopg.Error) else error.message
        why = said.removesuffix("; nothing was changed")
        raise SnapshotFailed(
            f"no verified copy of `{info.table}` can be made: {info.doubtful}, and when it was tried, {why}; nothing was changed"
        ) from None
    await session.execute("rollback to savepoint ringfence_proof")


async def _told_by_whom(session: Session, plan: SqlRestorePlan) -> SqlRestorePlan:
    """The plan with the transactions that wrote what stands in the way."""
    conflicts = list(plan.conflicts)
    for table in sorted({conflict.table for conflict in conflicts if conflict.key}):
        keys = [conflict.key for conflict in conflicts if conflict.table == table and conflict.key]
        writers = await writers_of(session, plan.shapes[table], keys)
        for place, conflict in enumerate(conflicts):
            if conflict.table == table and conflict.key in writers:
                conflicts[place] = replace(conflict, xid=writers[conflict.key])
    return replace(plan, conflicts=tuple(conflicts))


async def _same_shape(session: Session, shape: TableShape) -> bool:
    try:
        return _fits(await inspect(session, shape.table, ""), shape)
    except (NoSuchResource, SnapshotFailed):
        return False


def _fits(info: TableInfo, shape: TableShape) -> bool:
    return (info.columns, info.types, info.key) == (shape.columns, shape.types, shape.key)


async def _still_valid(
    session: Session, plan: SqlRestorePlan, infos: Mapping[Table, TableInfo]
) -> tuple[list[SqlItem], list[SqlConflict]]:
    """The items whose rows are still as the plan found them, now locked; those already done are neither."""
    items: list[SqlItem] = []
    conflicts: list[SqlConflict] = []
    for table in sorted({item.table for item in plan.items}):
        mine = [item for item in plan.items if item.table == table]
        keys = [item.key for item in mine]
        current = await rows_of(session, plan.shapes[table], keys, lock=infos[table].updates)
        for item in mine:
            now = current.get(item.key)
            if now == item.expected:
                items.append(item)
            elif now != item.before:
                changed = changed_columns(plan.shapes[table], item.expected, now)
                conflicts.append(
                    SqlConflict(table=table, key=item.key, reason=CHANGED_SINCE, changed=changed)
                )
    return items, conflicts
