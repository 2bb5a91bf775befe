"""Which rows of a database count as a thread's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ringfence.kernel.rows import MadeRows
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.syscalls.sql_target.records import KIND, Change, Identity, Record, Touched, record_from

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ringfence.syscalls.sql_target.records import Row

WHERE = Identity(system="1", database_oid="2", database="crm")


def change(before: Sequence[Row], after: Sequence[Row]) -> Change:
    return Change(
        schema="public",
        table="t",
        columns=["id", "n"],
        types=["integer", "integer"],
        key=["id"],
        before=before,
        after=after,
    )


def record(statement: str, made: Change) -> Record:
    return Record(
        kind=KIND,
        resource="crm",
        identity=WHERE,
        xid="7",
        statement=statement,
        row_count=1,
        columns=[],
        rows=[],
        changes=[made],
    )


@pytest.mark.parametrize(
    ("statement", "before", "after", "own"),
    [
        ("insert", [], [("1", "5")], True),
        ("upsert", [], [("1", "5")], True),
        ("upsert", [("1", "4")], [("1", "5")], False),
        ("update", [("0", "5")], [("1", "5")], False),
        ("merge", [("0", "5")], [("1", "5")], False),
    ],
)
def test_who_made_a_row(
    tmp_path: Path, statement: str, before: list[Row], after: list[Row], own: bool
) -> None:
    store = SnapshotStore(tmp_path)
    store.put_record("p1", record(statement, change(before, after)).to_json())
    rows = MadeRows()
    rows.note("p1")
    touched = Touched(resource="crm", identity=WHERE, change=change([("1", "5")], []))
    assert rows.holds(store, touched) is own


def test_records_of_before_are_read_as_well() -> None:
    made = record("update", change([("1", None)], [("1", "2")]))
    older = made.to_json()
    older["changes"] = [{**older["changes"][0], "before": [["1", None]], "after": [["1", "2"]]}]
    assert record_from(older) == record_from(made.to_json())
    assert record_from(older).changes[0].before == [("1", None)]
