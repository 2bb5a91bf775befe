"""The record of one write: rows before and after as text, and the transaction that changed them.

It lies in the snapshot store, durable before the target commits, and is all that recovery and rollback need.
The text is what the types' own output functions wrote, so rows come back byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from ringfence.syscalls.errors import SnapshotFailed
from ringfence.syscalls.sql_common import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

KIND: Final = "sql"


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which database it was: transaction ids mean nothing in another one."""

    system: str
    database_oid: str
    database: str


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happened to one table.

    Attributes:
        columns: names, generated columns left out; rows have their values in this order.
        types: the columns' types as `format_type` prints them.
        key: names of the primary key's columns.
        before: rows that were changed or removed, as they were.
        after: rows that were changed or inserted, as they are.
    """

    schema: str
    table: str
    columns: list[str]
    types: list[str]
    key: list[str]
    before: list[list[str | None]]
    after: list[list[str | None]]

    @property
    def name(self) -> Table:
        """The table."""
        return Table(self.schema, self.table)

    @property
    def shape(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """What has to be the same for the rows to mean the same."""
        return tuple(self.columns), tuple(self.types), tuple(self.key)

    def key_of(self, row: list[str | None]) -> tuple[str, ...]:
        """The values of the primary key, which are never NULL."""
        return tuple(str(row[self.columns.index(name)]) for name in self.key)


class Touched(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a statement is about to change or remove, as they stand in `change.before`.

    Attributes:
        resource: name of the declared database.
    """

    resource: str
    identity: Identity
    change: Change


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One write.

    Attributes:
        kind: always `sql`.
        resource: name of the declared database.
        xid: id of the target's transaction; empty where it needs no asking.
        statement: kind of the statement, or `restore`.
        row_count: rows inserted, updated or deleted.
        columns: of the RETURNING clause.
        rows: of the RETURNING clause, as JSON values.
    """

    kind: str
    resource: str
    identity: Identity
    xid: str
    statement: str
    row_count: int
    columns: list[str]
    rows: list[list[Any]]
    changes: list[Change]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for the snapshot store."""
        return msgspec.to_builtins(self)


def record_from(extra: Mapping[str, Any]) -> Record:
    """Read a record back.

    Raises:
        SnapshotFailed: it is none.
    """
    try:
        record = msgspec.convert(extra, type=Record)
    except msgspec.ValidationError as error:
        raise SnapshotFailed(
            f"the record of a write can't be read: {error}; see: ringfence points verify"
        ) from None
    if record.kind != KIND:
        raise SnapshotFailed(
            f"the record of a write is of kind `{record.kind}`, not `{KIND}`; see: ringfence points verify"
        )
    return record
