"""What undoing some writes would do, row by row: records collapsed, and held against the rows there are.

A row goes back to the oldest before-image, but only if it still is what the newest write left. What others
changed since, or between two of the agent's writes, is a conflict: listed and kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ringfence.syscalls.errors import Conflict, SnapshotFailed
from ringfence.syscalls.sql_common import Table
from ringfence.syscalls.sql_target.lives import Life, TableItem, TableState, life_of_made
from ringfence.syscalls.sql_target.records import Change, Record, TableChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Row: TypeAlias = tuple[str | None, ...]
Key: TypeAlias = tuple[str, ...]

CHANGED_SINCE: Final = "changed since by others; it is kept"
CHANGED_BETWEEN: Final = "changed by others between two of the agent's writes; it is kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """What the rows of a table's records mean."""

    table: Table
    columns: tuple[str, ...]
    types: tuple[str, ...]
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlItem:
    """One row to put back.

    Attributes:
        action: `restore` an updated row, `create` a deleted one again, or `remove` an inserted one.
        before: the row to have afterwards; None: none.
        expected: the row as it must be now; None: none.
    """

    table: Table
    key: Key
    action: str
    before: Row | None
    expected: Row | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlConflict:
    """A row, or with an empty key a whole table, that is not put back.

    Attributes:
        changed: columns whose values are others now; none where the row is gone, or stands where none was left.
        xid: the target's id of the transaction that wrote what stands there now; empty where nothing does, or it isn't known.
    """

    table: Table
    key: Key
    reason: str
    changed: tuple[str, ...] = ()
    xid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlRestorePlan:
    """What a rollback would do to one database."""

    resource: str
    shapes: Mapping[Table, TableShape]
    items: tuple[SqlItem, ...]
    conflicts: tuple[SqlConflict, ...]
    tables: tuple[TableItem, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.items and not self.tables

    def describe(self) -> list[dict[str, Any]]:
        """One entry a row, or table with `kind`, for a preview: table, key by column, action, and for a conflict the reason."""
        entries: list[dict[str, Any]] = [
            {"table": item.table.resource(self.resource), "key": {}, "action": item.action, "kind": "table"}
            for item in self.tables
        ]
        entries += [
            {"table": item.table.resource(self.resource), "key": self._named(item), "action": item.action}
            for item in self.items
        ]
        return entries + [
            {
                "table": conflict.table.resource(self.resource),
                "key": self._named(conflict),
                "action": "conflict",
                "reason": conflict.reason,
                **({"changed": list(conflict.changed)} if conflict.changed else {}),
                **({"transaction": conflict.xid} if conflict.xid else {}),
            }
            for conflict in self.conflicts
        ]

    def _named(self, row: SqlItem | SqlConflict) -> dict[str, str]:
        shape = self.shapes.get(row.table)
        return {} if shape is None or not row.key else dict(zip(shape.key, row.key, strict=True))


@dataclass(slots=True)
class _Undo:
    """What several writes made of one row: from `before` to `after`."""

    before: Row | None
    after: Row | None
    broken: bool = False


@dataclass(slots=True)
class Collapsed:
    """Several records as one: by table and key, the oldest before-image and the newest after-image."""

    shapes: dict[Table, TableShape] = field(default_factory=dict[Table, TableShape])
    rows: dict[Table, dict[Key, _Undo]] = field(default_factory=dict[Table, dict[Key, _Undo]])
    conflicts: list[SqlConflict] = field(default_factory=list[SqlConflict])
    lives: dict[Table, Life] = field(default_factory=dict[Table, Life])

    def keys(self, table: Table) -> list[Key]:
        """The rows of a table that any write touched."""
        return list(self.rows[table])

    def drop(self, table: Table, reason: str) -> None:
        """Leave a whole table out."""
        self.rows.pop(table, None)
        self.conflicts.append(SqlConflict(table=table, key=(), reason=reason))


def collapse(records_newest_first: Iterable[Record]) -> Collapsed:
    """Collapse records of one database; those of transactions that never committed are left out by the caller."""
    found = Collapsed()
    mixed: set[Table] = set()
    for record in records_newest_first:
        for made in reversed([table for table in record.tables if table.made]):
            _add_made(found, mixed, made)
        for change in record.changes:
            _add_change(found, mixed, change)
        for dropped in reversed([table for table in record.tables if not table.made]):
            _add_dropped(found, dropped)
    for table in sorted(mixed):
        found.drop(table, "its columns or primary key were changed between two writes; it is kept")
    return found


def _add_change(found: Collapsed, mixed: set[Table], change: Change) -> None:
    if change.name in found.lives:
        found.lives[change.name].undo_rows(change)
        return
    shape = TableShape(
        table=change.name, columns=tuple(change.columns), types=tuple(change.types), key=tuple(change.key)
    )
    if found.shapes.setdefault(change.name, shape) != shape:
        mixed.add(change.name)
    else:
        _add(found.rows.setdefault(change.name, {}), change)


def _add_made(found: Collapsed, mixed: set[Table], made: TableChange) -> None:
    life = found.lives.get(made.name)
    if life is not None:
        life.undo_making(made)
        return
    written = {key: (one.before, one.after, one.broken) for key, one in found.rows.pop(made.name, {}).items()}
    shape = found.shapes.get(made.name)
    other = shape is not None and made.rows_as_change().shape != (shape.columns, shape.types, shape.key)
    if other or made.name in mixed:
        mixed.discard(made.name)
        found.lives[made.name] = Life(expected=None, wanted=None, broken=True)
    else:
        found.lives[made.name] = life_of_made(made, written)


def _add_dropped(found: Collapsed, dropped: TableChange) -> None:
    state = TableState(definition=dropped.definition, rows=dropped.rows)
    life = found.lives.setdefault(dropped.name, Life(expected=None, wanted=state))
    life.wanted = state


def _add(rows: dict[Key, _Undo], change: Change) -> None:
    before = change.keyed(change.before)
    after = change.keyed(change.after)
    for key in before | after:
        older = _Undo(before.get(key), after.get(key))
        if older.before == older.after:
            continue  # it left the row as it found it: whatever came of it since is not this write's to undo
        newer = rows.get(key)
        if newer is None:
            rows[key] = older
        else:
            newer.broken = newer.broken or newer.before != older.after
            newer.before = older.before


def action_of(before: Row | None, now: Row | None) -> str:
    """What makes a row as it is the one that it was: `remove`, `create` or `restore`."""
    return "remove" if before is None else "create" if now is None else "restore"


def changed_columns(shape: TableShape, left: Row | None, now: Row | None) -> tuple[str, ...]:
    """The columns in which a row differs from what was left of it."""
    if left is None or now is None:
        return ()
    return tuple(name for name, was, there in zip(shape.columns, left, now, strict=True) if was != there)


def compare(
    collapsed: Collapsed, current: Mapping[Table, Mapping[Key, Row]], resource: str
) -> SqlRestorePlan:
    """Hold collapsed records against the rows as they are now.

    Args:
        collapsed: what the writes did.
        current: the rows there are, by table and key.
        resource: name of the database.
    """
    items: list[SqlItem] = []
    conflicts = list(collapsed.conflicts)
    for table in sorted(collapsed.rows):
        there = current.get(table, {})
        for key, undo in sorted(collapsed.rows[table].items()):
            now = there.get(key)
            if now == undo.before:
                continue  # as it was: nothing to do, or done already
            if undo.broken or now != undo.after:
                reason = CHANGED_BETWEEN if undo.broken and now == undo.after else CHANGED_SINCE
                changed = changed_columns(collapsed.shapes[table], undo.after, now)
                conflicts.append(SqlConflict(table=table, key=key, reason=reason, changed=changed))
                continue
            action = action_of(undo.before, now)
            items.append(
                SqlItem(table=table, key=key, action=action, before=undo.before, expected=undo.after)
            )
    return SqlRestorePlan(
        resource=resource, shapes=collapsed.shapes, items=tuple(items), conflicts=tuple(conflicts)
    )


def changes_of(plan: SqlRestorePlan) -> list[Change]:
    """What carrying out a plan does, as the changes of a record, so that it can be undone in turn."""
    changes: list[Change] = []
    for table in sorted({item.table for item in plan.items}):
        shape = plan.shapes[table]
        items = [item for item in plan.items if item.table == table]
        changes.append(
            Change(
                schema=table.schema,
                table=table.name,
                columns=list(shape.columns),
                types=list(shape.types),
                key=list(shape.key),
                before=[item.expected for item in items if item.expected is not None],
                after=[item.before for item in items if item.before is not None],
            )
        )
    return changes


def check_resources(records: Sequence[Record], resource: str) -> None:
    """Refuse records of another database.

    Raises:
        SnapshotFailed: one of them is.
    """
    for record in records:
        if record.resource != resource:
            raise SnapshotFailed(
                f"a record of `{record.resource}` can't be rolled back in `{resource}`; declare it under its old name"
            )


def other_database(resource: str) -> Conflict:
    """The declared database is not the one that was written to."""
    return Conflict(
        f"`{resource}` is another database now than the one that was written to; "
        "declare the old one again, or roll back without it"
    )
