"""What statements that made or dropped tables did, taken together: what they found, and what they left.

Rows that were written between are undone within a table that comes back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ringfence.syscalls.sql_target.records import TableChange, by_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ringfence.syscalls.sql_common import Table
    from ringfence.syscalls.sql_target.records import Change, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """A table with its rows."""

    definition: dict[str, Any]
    rows: Sequence[Row]

    def change(self, table: Table, *, made: bool) -> TableChange:
        """That it was made, or dropped, as it is here."""
        return TableChange(table.schema, table.name, made=made, definition=self.definition, rows=self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableItem:
    """One table to make, to drop, or to drop and make as it was.

    Attributes:
        expected: the table as it must be now; None: none.
        wanted: the table to have afterwards; None: none.
    """

    table: Table
    expected: TableState | None
    wanted: TableState | None

    @property
    def action(self) -> str:
        """`create` it again, `remove` it, or `restore` another one in its place."""
        return "remove" if self.wanted is None else "create" if self.expected is None else "restore"


@dataclass(slots=True, kw_only=True)
class Life:
    """What some records made of one table: from `wanted`, before them, to `expected`, after them."""

    expected: TableState | None
    wanted: TableState | None
    broken: bool = False

    def undo_rows(self, change: Change) -> None:
        """Undo an older write to the table as it was dropped."""
        if self.wanted is None:
            return
        own = self.wanted.change(change.name, made=False).rows_as_change()
        if own.shape != change.shape:
            self.broken = True
            return
        rows = own.keyed(own.before)
        before, after = change.keyed(change.before), change.keyed(change.after)
        for key in before | after:
            # What others wrote there in between stays.
            if rows.get(key) == after.get(key):
                rows.pop(key, None)
                if key in before:
                    rows[key] = before[key]
        self.wanted = replace(self.wanted, rows=list(rows.values()))

    def undo_making(self, change: TableChange) -> None:
        """Undo that it was made, which came before it was dropped."""
        if self.wanted is None or same_rows(self.wanted.rows, change.rows):
            self.wanted = None
        # Rows that others wrote went with it: it comes back with these.


def life_of_made(
    change: TableChange, written: Mapping[tuple[str, ...], tuple[Row | None, Row | None, bool]]
) -> Life:
    """The life of a table that was made and still stands.

    Args:
        change: its making.
        written: by key, the rows written since, as they were before and are after, and whether others wrote them in between.
    """
    own = change.rows_as_change()
    rows: list[Row] = list(change.rows)
    broken = False
    if written:
        keyed = by_key(own.columns, own.key, rows)
        for key, (before, after, torn) in written.items():
            broken = broken or torn or before != keyed.get(key)
            keyed.pop(key, None)
            if after is not None:
                keyed[key] = after
        rows = list(keyed.values())
    expected = TableState(definition=change.definition, rows=rows)
    return Life(expected=expected, wanted=None, broken=broken)


def same_rows(one: Sequence[Row], other: Sequence[Row]) -> bool:
    """Whether these are the same rows, in whatever order."""
    return Counter(map(tuple, one)) == Counter(map(tuple, other))
