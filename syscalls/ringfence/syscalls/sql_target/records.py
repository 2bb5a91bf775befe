"""The record of one write: rows before and after as text, and the transaction that changed them.

It lies in the snapshot store, durable before the target commits, and is all that recovery and rollback need.
The text is what the types' own output functions wrote, so rows come back byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from ringfence.syscalls.errors import SnapshotFailed
from ringfence.syscalls.sql_common import Table

KIND: Final = "sql"

Row: TypeAlias = tuple[str | None, ...]
"""Values as text, in the order of a change's columns."""


def by_key(columns: Sequence[str], key: Sequence[str], rows: Sequence[Row]) -> dict[tuple[str, ...], Row]:
    """Rows by the values of their key, which are never NULL."""
    places = [columns.index(name) for name in key]
    if len(places) == 1:
        place = places[0]
        return {(str(row[place]),): row for row in rows}
    return {tuple(str(row[place]) for place in places): row for row in rows}


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
    before: Sequence[Row]
    after: Sequence[Row]

    @property
    def name(self) -> Table:
        """The table."""
        return Table(self.schema, self.table)

    @property
    def shape(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """What has to be the same for the rows to mean the same."""
        return tuple(self.columns), tuple(self.types), tuple(self.key)

    def key_of(self, row: Row) -> tuple[str, ...]:
        """The values of the primary key, which are never NULL."""
        return tuple(str(row[self.columns.index(name)]) for name in self.key)

    def keyed(self, rows: Sequence[Row]) -> dict[tuple[str, ...], Row]:
        """Rows by the values of their primary key."""
        return by_key(self.columns, self.key, rows)


class Touched(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a statement is about to change or remove, as they stand in `change.before`.

    Attributes:
        resource: name of the declared database.
    """

    resource: str
    identity: Identity
    change: Change


class TableChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table that was made or dropped.

    Attributes:
        made: whether it was made; else it was dropped.
        definition: as it is since, or was before; see `definition.Definition`.
        rows: that it had when it was made, or had before; with the values of all columns that aren't generated.
    """

    schema: str
    table: str
    made: bool
    definition: dict[str, Any]
    rows: Sequence[Row] = ()

    @property
    def name(self) -> Table:
        """The table."""
        return Table(self.schema, self.table)

    def as_change(self) -> Change:
        """The table itself as if it were a row, and what it is that row's value: to tell who made it."""
        row = (msgspec.json.encode(self.definition["columns"], order="sorted").decode(),)
        kept = [] if self.made else [row]
        return Change(
            schema=self.schema,
            table=self.table,
            columns=[""],  # no column of a table has this name
            types=["table"],
            key=[""],
            before=kept,
            after=[row] if self.made else [],
        )

    def rows_as_change(self) -> Change:
        """Its rows as those of a delete or an insert."""
        columns = [one for one in self.definition["columns"] if not one["generated"]]
        rows = list(self.rows)
        return Change(
            schema=self.schema,
            table=self.table,
            columns=[str(one["name"]) for one in columns],
            types=[str(one["type"]) for one in columns],
            key=[str(name) for name in self.definition["key"] or ()],
            before=[] if self.made else rows,
            after=rows if self.made else [],
        )


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
        tables: that were dropped, before any row of `changes` was written, and then that were made, when all were.
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
    tables: Sequence[TableChange] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for the snapshot store; the rows of a change, which may be many, as the text of their JSON."""
        found = {name: getattr(self, name) for name in self.__struct_fields__}
        return found | {
            "identity": msgspec.to_builtins(self.identity),
            "changes": [_to_json(change) for change in self.changes],
            "tables": [_table_to_json(change) for change in self.tables],
        }


def _to_json(change: Change) -> dict[str, Any]:
    found = {name: getattr(change, name) for name in change.__struct_fields__}
    return found | {name: msgspec.json.encode(found[name]).decode() for name in _ROWS}


def _table_to_json(change: TableChange) -> dict[str, Any]:
    found = {name: getattr(change, name) for name in change.__struct_fields__}
    return found | {"rows": msgspec.json.encode(change.rows).decode()}


def _table_from(found: Mapping[str, Any]) -> TableChange:
    rows = _decoder.decode(found["rows"])
    return msgspec.structs.replace(msgspec.convert({**found, "rows": []}, type=TableChange), rows=rows)


_ROWS: Final = ("before", "after")
_Rows: TypeAlias = list[Row]
_decoder: Final = msgspec.json.Decoder(_Rows)


def _change_from(found: Mapping[str, Any]) -> Change:
    """Read a change back; records of before hold its rows as they are and not as a text."""
    rows = {
        name: _decoder.decode(found[name])
        if isinstance(found[name], str)
        else msgspec.convert(found[name], _Rows)
        for name in _ROWS
    }
    return msgspec.structs.replace(msgspec.convert({**found, "before": [], "after": []}, type=Change), **rows)


def record_from(extra: Mapping[str, Any]) -> Record:
    """Read a record back.

    Raises:
        SnapshotFailed: it is none.
    """
    try:
        changes = [_change_from(change) for change in extra["changes"]]
        record = msgspec.structs.replace(
            msgspec.convert({**extra, "changes": [], "tables": []}, type=Record),
            changes=changes,
            tables=[_table_from(table) for table in extra.get("tables", ())],
        )
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError) as error:
        raise SnapshotFailed(
            f"the record of a write can't be read: {error}; see: ringfence points verify"
        ) from None
    if record.kind != KIND:
        raise SnapshotFailed(
            f"the record of a write is of kind `{record.kind}`, not `{KIND}`; see: ringfence points verify"
        )
    return record
