"""Finds out what a rollback would do: where it leads, and what comes back of files, state and SQL targets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ringfence.kernel import descent, rollback_atoms
from ringfence.kernel.core import Core
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import Rewound, StateVersion, StoredRow
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.replay import OPERATOR_LANE, Lineage
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import RestorePlan, SnapshotError
from ringfence.syscalls.base import Recovery
from ringfence.syscalls.http_undo import HttpPlan, plan_put_back
from ringfence.syscalls.sql_target import restore as sql_restore

_LEAVES = frozenset({"EXTERNAL", "DESTROY"})
"""Effects that nothing here can undo where they have no point."""

_SENT_ANEW = frozenset({Recovery.REPEAT, Recovery.KEYED})
"""What a dead kernel may have sent and this one sends again when asked: until then nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a rollback leads: the last step that is kept, and the branch whose journal up to there is the new one's prefix.

    `seen` is the branch it was found on.
    """

    step: int
    parent: int
    seen: int


@dataclass(slots=True, kw_only=True)
class Undo:
    """Everything a rollback to one step would do."""

    cut: int
    files: RestorePlan | None = None
    state: list[tuple[StateVersion, StateVersion | None]] = field(
        default_factory=list[tuple[StateVersion, StateVersion | None]]
    )
    state_conflicts: dict[str, str] = field(default_factory=dict[str, str])
    sql: dict[str, sql_restore.SqlRestorePlan] = field(default_factory=dict[str, sql_restore.SqlRestorePlan])
    http: HttpPlan = field(default_factory=HttpPlan)
    late_conflicts: dict[str, str] = field(default_factory=dict[str, str])
    not_undoable: list[StoredRow] = field(default_factory=list[StoredRow])
    moved: list[Rewound] = field(default_factory=list[Rewound])
    others: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


PRUNED = "agent.points_pruned"
"""The event that says before which step an agent's points are gone."""


async def pruned_before(store: Store, thread: Thread) -> int:
    """The step before which points were removed on purpose; 0: none was."""
    row = await store.last_event(thread.key, PRUNED)
    return 0 if row is None else int(json.loads(row.body)["before_step"])


def refuse_pruned(point: dict[str, Any], step: int, pruned: int) -> None:
    """Refuse what needs a point that was removed on purpose.

    Raises:
        Problem: it was.
    """
    if step < pruned and point["kind"] != "state":
        raise conflict(
            f"the rollback point {point['id']} was pruned; nothing goes back beyond step {pruned - 1} any more"
        )


def point_of(row: StoredRow) -> dict[str, Any] | None:
    """The rollback point an outcome carries."""
    return json.loads(row.body).get("point") if b'"point":' in row.body else None


def counts(row: StoredRow, cut: int, parent: int) -> bool:
    """Whether a step's before-images lead back to the cut.

    A whole rollback put back what stood at its own cut, so who goes back beyond it passes it by; its point is the end of
    the branch that was left and counts only for who undoes it.
    """
    if row.action != "rollback" or row.lane != OPERATOR_LANE:
        return True
    left = json.loads(row.body)["result"].get("left_branch")
    return left == row.branch or (row.step == cut + 1 and left == parent)


def of_the_original(row: StoredRow) -> bool:
    """Whether a fork inherited a change of something that it shares with its original, who alone can undo it."""
    return b'"shared":true' in row.body and bool(json.loads(row.body).get("shared"))


class Plans:
    """Plans rollbacks of this kernel's agents; changes nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def cut_for(self, thread: Thread, to: str) -> Cut:
        """The last step that is kept: a point keeps what was before its step, a step keeps itself, a time what was done by then.

        Raises:
            Problem: no such point or step.
        """
        rows = await self._lineage_rows(thread, 0)
        cut = await self._cut(thread, to, rows)
        behind, _, _ = await self._core.store.archived_behind(thread.key)
        if cut.step < behind:
            raise conflict(
                f"the steps of `{thread.id}` before {behind} are archived, and nothing goes back beyond the checkpoint of that step; "
                f"see: ringfence steps {thread.id}"
            )
        return cut

    async def _cut(self, thread: Thread, to: str, rows: Sequence[StoredRow]) -> Cut:
        if to.startswith("p") and to[1:].isascii() and to[1:].isdigit():
            step = int(to[1:])
            row = next((row for row in rows if row.step == step and point_of(row)), None)
            if row is None:
                text = f"no rollback point `{to}` on the branch of `{thread.id}`; see: ringfence points {thread.id}"
                raise Problem(text, exit_code=4, reason="NoSuchPoint")
            # The point of a rollback leads back to the branch that it had left.
            left = json.loads(row.body)["result"].get("left_branch") if row.action == "rollback" else None
            return Cut(step=step - 1, parent=thread.branch if left is None else left, seen=thread.branch)
        if to.isascii() and to.isdigit():
            step = int(to)
            if step > thread.last_step:
                text = f"`{thread.id}` has no step {step}; its last one is {thread.last_step}"
                raise Problem(text, exit_code=4, reason="NoSuchStep")
            if step and not any(row.step == step for row in rows):
                text = f"step {step} of `{thread.id}` is not on its present branch; see: ringfence steps {thread.id}"
                raise Problem(text, exit_code=4, reason="NoSuchStep")
            return Cut(step=step, parent=thread.branch, seen=thread.branch)
        try:
            at = datetime.fromisoformat(to)
        except ValueError:
            raise bad_usage(
                f"`{to}` is neither a point such as p12, nor a step, nor a time in RFC 3339"
            ) from None
        if at.tzinfo is None:
            raise bad_usage(
                f"the time `{to}` has no zone and could be yours or UTC; write it as 2026-01-31T12:00:00Z or 2026-01-31T13:00:00+01:00"
            )
        at_us = int(at.timestamp() * 1_000_000)
        kept = (row.step for row in rows if row.started_us + row.duration_us <= at_us)
        return Cut(step=max(kept, default=0), parent=thread.branch, seen=thread.branch)

    async def _lineage_rows(
        self, thread: Thread, after: int, lineage: Lineage | None = None
    ) -> list[StoredRow]:
        parts = (lineage or thread.lineage).parts
        return [row async for row in self._core.store.lineage_outcomes(thread.key, parts, after)]

    async def plan(
        self, thread: Thread, cut: int, path: str | None, parent: int, lineage: Lineage | None = None
    ) -> Undo:
        """Find out what a rollback would do, changing nothing.

        Args:
            thread: the agent.
            cut: last step that is kept.
            path: canonical path of the workspace; only it and what lies beneath. None: everything.
            parent: branch whose journal up to the cut is kept.
            lineage: the branch to leave; None: the present one.

        Raises:
            Problem: a point is missing or damaged, or a database is no longer declared.
        """
        undo = Undo(cut=cut, others=await descent.waiting(self._core, thread))
        rows = sorted(await self._lineage_rows(thread, cut, lineage), key=lambda row: row.step, reverse=True)
        rows = [row for row in rows if counts(row, cut, parent)]
        try:
            file_points, records, kept = await self._gather(thread, rows, undo, path)
            if file_points:
                undo.files = await asyncio.to_thread(
                    thread.environment.snapshots.plan_restore, thread.environment.workspace, file_points, path
                )
        except SnapshotError as error:
            raise conflict(f"a rollback point can't be used: {error}; nothing was changed") from error
        await self._add_unfinished(thread, cut, lineage or thread.lineage, undo)
        if path is None:
            undo.moved = await rollback_atoms.rewind(self._core, thread, cut, parent, dry=True)
            undo.others += await descent.children_of(self._core, thread, rows)
            await self._plan_state(thread, undo)
            undo.http = await plan_put_back(thread.environment.http, kept)
            for resource, images in records.items():
                undo.sql[resource] = await self._plan_sql(thread, resource, images)
        return undo

    async def _gather(
        self, thread: Thread, rows: Sequence[StoredRow], undo: Undo, path: str | None
    ) -> tuple[list[str], dict[str, list[Any]], list[Any]]:
        """Points of the workspace, records of SQL targets by resource, and of HTTP ones, newest first."""
        file_points: list[str] = []
        kept: list[Any] = []
        records: dict[str, list[Any]] = {}
        pruned = await pruned_before(self._core.store, thread)
        for row in rows:
            point = point_of(row)
            if point is None:
                if row.outcome in ("ok", "unknown") and (row.effect in _LEAVES or of_the_original(row)):
                    undo.not_undoable.append(row)
                continue
            refuse_pruned(point, row.step, pruned)
            if point["kind"] in ("workspace", "rollback"):
                file_points.append(point["id"])
            if point["kind"] in ("sql", "rollback") and path is None:
                for record in await self._records(thread, point):
                    records.setdefault(str(record["resource"]), []).append(record)
            if point["kind"] == "http" and path is None:
                kept += await self._records(thread, point)
        return file_points, records, kept

    async def _add_unfinished(self, thread: Thread, cut: int, lineage: Lineage, undo: Undo) -> None:
        """What was begun and has no outcome may have left the system as well."""
        for intent, _ in await self._core.store.unfinished(thread.key):
            row = self._core.table.get(intent.action)
            sent = row is None or row.recovery in _SENT_ANEW
            beyond = intent.step > cut and lineage.holds(intent.branch, intent.step)
            if sent and beyond and intent.lane != OPERATOR_LANE and intent.effect in _LEAVES:
                undo.not_undoable.append(intent)
        undo.not_undoable.sort(key=lambda each: each.step, reverse=True)

    @staticmethod
    async def _records(thread: Thread, point: dict[str, Any]) -> Sequence[Any]:
        # INVARIANT: the journal says which points there are; one that the store lost stops the rollback.
        manifest = await asyncio.to_thread(thread.environment.snapshots.require, point["id"])
        return manifest.extra.get("sql", ()) if point["kind"] == "rollback" else (manifest.extra,)

    async def _plan_sql(
        self, thread: Thread, resource: str, images: Sequence[Any]
    ) -> sql_restore.SqlRestorePlan:
        target = thread.environment.sql.get(resource)
        if target is None:
            raise conflict(
                f"the database `{resource}` is no longer declared in the kernel file; declare it and try again"
            )
        return await sql_restore.plan_restore(target, images)

    async def _plan_state(self, thread: Thread, undo: Undo) -> None:
        store = self._core.store
        changed: dict[str, list[StateVersion]] = {}
        for version in await store.state_versions_after(thread.id, undo.cut):
            changed.setdefault(version.key, []).append(version)
        for key, versions in sorted(changed.items()):
            now = await store.state_get(key)
            newest = max(versions, key=lambda v: v.version)
            first = min(versions, key=lambda v: v.version)
            before = await store.state_before(key, first.version)
            if now is None or now.version != newest.version:
                by = "another agent" if now is None else f"`{now.agent}`"
                undo.state_conflicts[key] = f"changed since by {by}"
            elif (before.value if before else None) != now.value:
                undo.state.append((now, before))
