"""What undoing some writes would do, row by row: records collapsed, and held against the rows there are.

A row goes back to the oldest before-image, but only if it still is what the newest write left. What others
changed since, or between two of the agent's writes, is a conflict: listed and kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ringfence.syscalls.errors import Conflict, SnapshotFailed
from ringfence.syscalls.sql_common import Table
from ringfence.syscalls.sql_target.records import Change, Record

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
    """A row, or with an empty key a whole table, that is not put back."""

    table: Table
    key: Key
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlRestorePlan:
    """What a rollback would do to one database."""

    resource: str
    shapes: Mapping[Table, TableShape]
    items: tuple[SqlItem, ...]
    conflicts: tuple[SqlConflict, ...]

    def describe(self) -> list[dict[str, Any]]:
        """One entry a row, for a preview: table, key by column, action, and for a conflict the reason."""
        entries: list[dict[str, Any]] = [
            {"table": item.table.resource(self.resource), "key": self._named(item), "action": item.action}
            for item in self.items
        ]
        return entries + [
            {
                "table": conflict.table.resource(self.resource),
                "key": self._named(conflict),
                "action": "conflict",
                "reason": conflict.reason,
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
        for change in record.changes:
            shape = TableShape(
                table=change.name,
                columns=tuple(change.columns),
                types=tuple(change.types),
                key=tuple(change.key),
            )
            if found.shapes.setdefault(change.name, shape) != shape:
                mixed.add(change.name)
            else:
                _add(found.rows.setdefault(change.name, {}), change)
    for table in sorted(mixed):
        found.drop(table, "its columns or primary key were changed between two writes; it is kept")
    return found


def _add(rows: dict[Key, _Undo], change: Change) -> None:
    before = {change.key_of(row): tuple(row) for row in change.before}
    after = {change.key_of(row): tuple(row) for row in change.after}
    for key in before | after:
        older = _Undo(before.get(key), after.get(key))
        newer = rows.get(key)
        if newer is None:
            rows[key] = older
        else:
            newer.broken = newer.broken or newer.before != older.after
            newer.before = older.before


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
                conflicts.append(SqlConflict(table=table, key=key, reason=reason))
                continue
            action = "remove" if undo.before is None else "create" if now is None else "restore"
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
                before=[list(item.expected) for item in items if item.expected is not None],
                after=[list(item.before) for item in items if item.before is not None],
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
