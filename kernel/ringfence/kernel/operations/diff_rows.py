"""How rows of databases differ between two steps of an agent, as its own writes say, also where it went back together with others.

Of several agents that go back together, one puts all rows of a database back. What the others had written is in its point, and
what they wrote on each other before is no way in which a row ever stood for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringfence.kernel.journal.types import StoredRow
from ringfence.kernel.operations.diff_parts import Part, parts_of
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem, conflict
from ringfence.kernel.replay import HAPPENED
from ringfence.kernel.rollback_cuts import done_since, is_rollback, point_of
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.errors import SnapshotFailed
from ringfence.syscalls.sql_target.records import record_from

Image = dict[str, str | None] | None
Place = tuple[str, tuple[str, ...]]
"""A table and the values of a row's key; none: the table itself."""


class _Change(NamedTuple):
    """How a step found one row, and how it left it."""

    step: int
    place: Place
    before: Image
    after: Image


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Steps of the agent that a rollback together with others undid.

    Attributes:
        cut: the last step that stayed.
        step: of its part in the rollback.
        rows: how it left the rows that the agent had written since.
    """

    cut: int
    step: int
    rows: Mapping[Place, _Change]


async def row_changes(
    kernel: Kernel, thread: Thread, rows: Sequence[StoredRow], low: int, high: int | None
) -> list[dict[str, Any]]:
    """Which rows differ between two steps, by table and key.

    Args:
        kernel: this one.
        thread: the agent.
        rows: its outcomes after the earlier step, the oldest first.
        low: the one step.
        high: the other one; None: now.

    Raises:
        Problem: a point is gone or damaged.
        Unavailable: the database is away.
    """
    changed: list[_Change] = []
    spans: list[_Span] = []
    known: _Known = {}
    for row in rows:
        span = await _span(kernel, thread, row, known)
        if span is None:
            changed += await _changes_of(thread, row)
        else:
            spans.append(span)
            changed += span.rows.values()

    def images(step: int | None) -> dict[Place, Image]:
        found: dict[Place, Image] = {}
        for one in changed:
            if step is None or one.step <= step or one.place in found:
                continue
            undone = (s for s in spans if step <= s.cut < one.step <= s.step and one.place in s.rows)
            span = next(undone, None)
            found[one.place] = one.before if span is None else span.rows[one.place].after
        return found

    newest = {one.place: one.after for one in changed}
    first, second = images(low), images(high)
    documents: list[dict[str, Any]] = []
    for place in sorted(newest):
        was, after = first.get(place, newest[place]), second.get(place, newest[place])
        if was != after:
            kind = "created" if was is None else "removed" if after is None else "modified"
            target = f"{place[0]} {', '.join(place[1])}".strip()
            documents.append({"target": target, "kind": kind, "before": was, "after": after})
    return documents


_Known = dict[int, _Span | None]
"""Rollbacks of the agent that were looked at, by step: each may lie within many later ones."""


async def _span(kernel: Kernel, thread: Thread, row: StoredRow, known: _Known) -> _Span | None:
    """What a rollback of several did to the rows that this agent had written; None: it is none, or that is not known any more."""
    if row.step not in known:
        known[row.step] = await _look(kernel, thread, row, known)
    return known[row.step]


async def _look(kernel: Kernel, thread: Thread, row: StoredRow, known: _Known) -> _Span | None:
    parts = await parts_of(kernel.core.store, thread, row.step) if is_rollback(row) else []
    mine = next((part for part in parts if part.record.key == thread.key), None)
    if mine is None:
        return None
    try:
        written, put_back = await _done_in(kernel, parts)
        own = await _own(kernel, thread, mine, known)
    except Problem:
        return None  # of another one, which is elsewhere, or whose points were pruned: its own half is what there is
    first: dict[Place, Image] = {}
    last: dict[Place, Image] = {}
    for change in written:
        first.setdefault(change.place, change.before)
        last[change.place] = change.after
    found: dict[Place, _Change] = {}
    for place in own:
        back = put_back.get(place)
        if back is not None:
            found[place] = back._replace(step=row.step)
        elif place in first and first[place] == last[place]:
            # As before by itself, so that nobody had to put it back. Otherwise others had changed it, and it was left as it was.
            found[place] = _Change(row.step, place, last[place], first[place])
    return _Span(cut=mine.cut, step=row.step, rows=found)


async def _done_in(kernel: Kernel, parts: Sequence[Part]) -> tuple[list[_Change], dict[Place, _Change]]:
    """What all of them had written since they went back to before it, the oldest first, and what was put back then."""
    written: list[tuple[int, _Change]] = []
    put_back: dict[Place, _Change] = {}
    for part in parts:
        member = await kernel.thread(part.record.id)
        for row in await done_since(kernel.core.store, member, part.cut):
            if row.step < part.step:
                ended = row.started_us + row.duration_us
                written += [(ended, change) for change in await _changes_of(member, row)]
            elif row.step == part.step:
                put_back |= {change.place: change for change in await _changes_of(member, row)}
    written.sort(key=lambda one: one[0])
    return [change for _, change in written], put_back


async def _own(kernel: Kernel, thread: Thread, mine: Part, known: _Known) -> set[Place]:
    """Rows that the agent had written itself, or that earlier rollbacks had put back for it in another one's part."""
    own: set[Place] = set()
    for row in await done_since(kernel.core.store, thread, mine.cut):
        if row.step < mine.step:
            span = await _span(kernel, thread, row, known)
            changes = await _changes_of(thread, row) if span is None else span.rows.values()
            own |= {change.place for change in changes}
    return own


async def _changes_of(thread: Thread, row: StoredRow) -> list[_Change]:
    """Rows that a call or a rollback changed."""
    point = point_of(row)
    if point is None or point["kind"] not in ("sql", "rollback") or row.outcome not in HAPPENED:
        return []
    try:
        manifest = await asyncio.to_thread(thread.environment.snapshots.require, point["id"])
        extra = manifest.extra.get("sql", ()) if point["kind"] == "rollback" else [manifest.extra]
        return [_Change(row.step, *one) for record in extra for one in _changes(record)]
    except (SnapshotError, SnapshotFailed) as error:
        raise conflict(str(error)) from error


def _changes(extra: Any) -> list[tuple[Place, Image, Image]]:
    record = record_from(extra)
    found: list[tuple[Place, Image, Image]] = []
    for change in record.changes:
        before = {change.key_of(row): dict(zip(change.columns, row, strict=True)) for row in change.before}
        after = {change.key_of(row): dict(zip(change.columns, row, strict=True)) for row in change.after}
        for values in before | after:
            named = tuple(f"{name}={value}" for name, value in zip(change.key, values, strict=True))
            place = (change.name.resource(record.resource), named)
            found.append((place, before.get(values), after.get(values)))
    for table in record.tables:
        whole: Image = {str(one["name"]): str(one["type"]) for one in table.definition["columns"]}
        place = (table.name.resource(record.resource), ())
        found.append((place, None if table.made else whole, whole if table.made else None))
    return found
