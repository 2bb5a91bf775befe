"""Rows of databases that a thread inserted itself and that are as it left them, told from the records of its own writes.

INVARIANT: a row counts as the thread's own only while it is, value for value, what the thread's last write left there: one that
somebody else changed meanwhile, or put there in place of another, is nobody's.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Final

import msgspec
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.errors import SnapshotFailed
from ringfence.syscalls.sql_target.records import Change, Record, TableChange, Touched, record_from

if TYPE_CHECKING:
    from ringfence.sandbox.snapshots import SnapshotStore

ROWS_MAX: Final = 200_000
"""Rows that are known of one thread, the newest; of an older one it is not known that the thread made it."""


class MadeRows:
    """What one thread has made in databases, on its present branch."""

    __slots__ = ("_one_at_a_time", "_points", "_rows")

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._points: list[str] = []
        self._rows: dict[bytes, bytes] = {}

    def note(self, point: str) -> None:
        """Remember a write by its point; what it did is read when somebody asks."""
        self._points.append(point)

    def clear(self) -> None:
        """Forget everything."""
        self._points.clear()
        self._rows.clear()

    def holds(self, store: SnapshotStore, touched: Touched) -> bool:
        """Whether the thread made every one of these rows. Reads records, so it may take a while."""
        with self._one_at_a_time:
            points, self._points = self._points, []
            for point in points:
                self._take(store, point)
        place = _place(touched.resource, touched.identity, touched.change)
        return all(
            self._rows.get(_key(place, touched.change, row)) == _image(touched.change, row)
            for row in touched.change.before
        )

    def _take(self, store: SnapshotStore, point: str) -> None:
        try:
            manifest = store.load(point)
            record = None if manifest is None else record_from(manifest.extra)
        except (SnapshotError, SnapshotFailed):
            record = None
        if record is None:
            # Of a write that is no longer known nothing is its own, and what it changed is no longer as it was left.
            return
        for table in record.tables:
            self._take_table(record, table)
        for change in record.changes:
            place = _place(record.resource, record.identity, change)
            was = {_key(place, change, row): _image(change, row) for row in change.before}
            mine = {key for key, image in was.items() if self._rows.get(key) == image}
            for key in was:
                self._rows.pop(key, None)
            for row in change.after:
                key = _key(place, change, row)
                if key in mine or (record.statement in _INSERTS and key not in was):
                    self._rows[key] = _image(change, row)
        while len(self._rows) > ROWS_MAX:
            del self._rows[next(iter(self._rows))]

    def _take_table(self, record: Record, table: TableChange) -> None:
        """Its rows went with one that was dropped; one that was made is the thread's own."""
        for change in (table.rows_as_change(), table.as_change()):
            place = _place(record.resource, record.identity, change)
            for row in change.before:
                self._rows.pop(_key(place, change, row), None)
            for row in change.after:
                self._rows[_key(place, change, row)] = _image(change, row)


_INSERTS: Final = frozenset({"insert", "upsert"})
"""Statements whose rows that weren't there before are new, and not old ones under another key."""


def _place(resource: str, identity: object, change: Change) -> bytes:
    return msgspec.json.encode([resource, identity, change.schema, change.table, change.key])


def _key(place: bytes, change: Change, row: tuple[str | None, ...]) -> bytes:
    return hashlib.sha256(place + msgspec.json.encode(change.key_of(row))).digest()


def _image(change: Change, row: tuple[str | None, ...]) -> bytes:
    return hashlib.sha256(msgspec.json.encode([change.columns, change.types, row])).digest()
