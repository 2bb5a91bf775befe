"""Puts back what an agent did after a step: workspace, shared state, SQL targets. Never rights, spent budgets or history.

end the program     its memory is from the future
intent              the rollback itself is a step of the thread, so a crash in the middle is finished at start
point               the state from just before, so that a rollback can be undone
restore             per path, key and row: the oldest before-image after the cut; what others changed is a conflict
branch              a new branch whose prefix is the journal up to the cut; nothing is deleted
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ringfence.kernel import rollback_atoms
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Entry, Phase, Rewound, Row, StateVersion, StoredRow
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.processes import Processes
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.revocation import cancel
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import RestorePlan, SnapshotError
from ringfence.syscalls.errors import Killed
from ringfence.syscalls.sql_target import restore as sql_restore

SETTLE_S = 30.0
"""How long a call that has begun its effect may take to finish before a rollback is refused."""

COVERS_MAX = 256
"""Most things that the journal names of one point; its manifest has all of them."""


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
    late_conflicts: dict[str, str] = field(default_factory=dict[str, str])
    not_undoable: list[StoredRow] = field(default_factory=list[StoredRow])
    moved: list[Rewound] = field(default_factory=list[Rewound])


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


class Rollback:
    """Rollback of this kernel's agents."""

    def __init__(self, core: Core, ownership: Ownership, processes: Processes) -> None:
        self._core = core
        self._ownership = ownership
        self._processes = processes

    async def cut_for(self, thread: Thread, to: str) -> Cut:
        """The last step that is kept: a point keeps what was before its step, a step keeps itself, a time what was done by then.

        Raises:
            Problem: no such point or step.
        """
        rows = await self._lineage_rows(thread, 0)
        if to.startswith("p") and to[1:].isdigit():
            step = int(to[1:])
            row = next((row for row in rows if row.step == step and point_of(row)), None)
            if row is None:
                text = f"no rollback point `{to}` on the branch of `{thread.id}`; see: ringfence points {thread.id}"
                raise Problem(text, exit_code=4, reason="NoSuchPoint")
            # The point of a rollback leads back to the branch that it had left.
            left = json.loads(row.body)["result"].get("left_branch") if row.action == "rollback" else None
            return Cut(step=step - 1, parent=thread.branch if left is None else left, seen=thread.branch)
        if to.isdigit():
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

    async def _lineage_rows(self, thread: Thread, after: int) -> list[StoredRow]:
        parts = thread.lineage.parts
        return [row async for row in self._core.store.lineage_outcomes(thread.key, parts, after)]

    async def plan(self, thread: Thread, cut: int, path: str | None, parent: int) -> Undo:
        """Find out what a rollback would do, changing nothing."""
        undo = Undo(cut=cut)
        rows = sorted(await self._lineage_rows(thread, cut), key=lambda row: row.step, reverse=True)
        rows = [row for row in rows if counts(row, cut, parent)]
        file_points, records = await self._gather(thread, rows, undo, path)
        try:
            if file_points:
                undo.files = await asyncio.to_thread(
                    thread.environment.snapshots.plan_restore, thread.environment.workspace, file_points, path
                )
        except SnapshotError as error:
            raise conflict(f"a rollback point can't be used: {error}; nothing was changed") from error
        if path is None:
            undo.moved = await rollback_atoms.rewind(self._core, thread, cut, parent, dry=True)
            await self._plan_state(thread, undo)
            for resource, images in records.items():
                undo.sql[resource] = await self._plan_sql(thread, resource, images)
        return undo

    async def _gather(
        self, thread: Thread, rows: Sequence[StoredRow], undo: Undo, path: str | None
    ) -> tuple[list[str], dict[str, list[Any]]]:
        """Points of the workspace, and records of SQL targets by resource, newest first."""
        file_points: list[str] = []
        records: dict[str, list[Any]] = {}
        for row in rows:
            point = point_of(row)
            if point is None:
                if row.outcome in ("ok", "unknown") and row.effect in ("EXTERNAL", "DESTROY"):
                    undo.not_undoable.append(row)
                continue
            if point["kind"] in ("workspace", "rollback"):
                file_points.append(point["id"])
            if point["kind"] in ("sql", "rollback") and path is None:
                for record in await self._sql_records(thread, point):
                    records.setdefault(str(record["resource"]), []).append(record)
        return file_points, records

    @staticmethod
    async def _sql_records(thread: Thread, point: dict[str, Any]) -> Sequence[Any]:
        manifest = await asyncio.to_thread(thread.environment.snapshots.load, point["id"])
        if manifest is None:
            raise conflict(f"the rollback point {point['id']} is gone from the store; nothing was changed")
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

    # -- carrying it out ------------------------------------------------------------------------------------------

    async def execute(
        self, thread: Thread, cut: Cut, path: str | None, operator: str
    ) -> tuple[Undo, dict[str, Any]]:
        """Roll back; returns what was done and where it led.

        Raises:
            Problem: a point can't be verified or a target refuses; nothing is half done that a restart would not finish.
        """
        async with thread.operation:
            self._refuse_moved(thread, cut)
            lived = thread.program is not None
            await self._processes.end_program(thread)
            try:
                await self._end_calls(thread)
                # INVARIANT: an older rollback that a crash cut short is carried to its end first, never over newer work.
                older = await self._finish_older(thread)
                if older is not None and (older[0].cut, older[2]) == (cut.step, path):
                    return older[:2]  # this very one
                self._refuse_moved(thread, cut)
                undo = await self.plan(thread, cut.step, path, cut.parent)
            except Problem:
                if lived:
                    await self._processes.set_state(
                        thread, "paused", waiting_for="an operator, after a refused rollback"
                    )
                raise
            # No longer at its end: so a kernel that starts after a crash takes the agent over and finishes this.
            await self._processes.set_state(thread, "paused", waiting_for="a rollback that is under way")
            step = thread.take_step()
            await self._intent(thread, step, cut, path, operator)
            return undo, await self._carry_out(thread, undo, step, path, cut.parent)

    @staticmethod
    def _refuse_moved(thread: Thread, cut: Cut) -> None:
        if thread.branch != cut.seen:
            # The same number may be another step there, or none.
            raise conflict(f"`{thread.id}` was rolled back meanwhile; this one was not begun: look again")

    @staticmethod
    async def _end_calls(thread: Thread) -> None:
        """Cancel what has not begun its effect and await the rest.

        INVARIANT: nothing is planned while a call is under way: what it still changes would stay, unseen.
        """
        reason = Killed("the operator rolled the agent back")
        await asyncio.gather(*(cancel(f, reason, SETTLE_S) for f in list(thread.flights.values())))
        for step, flight in sorted(thread.flights.items()):
            raise conflict(
                f"step {step} of `{thread.id}`, {flight.row.action}, is still under way; its program is ended and nothing "
                "was changed: try again when the step is done"
            )

    async def _intent(self, thread: Thread, step: int, cut: Cut, path: str | None, operator: str) -> None:
        arguments = {"cut": cut.step, "parent": cut.parent, "path": path, "operator": operator}
        body = json.dumps({"arguments": arguments}).encode()
        row = Row(
            chain=thread.key,
            phase=Phase.INTENT,
            step=step,
            branch=thread.branch,
            lane=OPERATOR_LANE,
            action="rollback",
            resource=f"step {cut.step}",
            effect="WRITE",
            verdict="allow",
            started_us=time.time_ns() // 1000,
            body=body,
        )
        await self._core.append(Entry(row=row))

    async def _carry_out(
        self, thread: Thread, undo: Undo, step: int, path: str | None, parent: int
    ) -> dict[str, Any]:
        environment = thread.environment
        async with environment.lock():
            covers = await self._take_point(thread, undo, step)
            await self._core.failpoints.reach("rollback:before_restore", thread.id)
            if undo.files is not None and undo.files.items:
                await asyncio.to_thread(
                    environment.snapshots.restore, environment.workspace, undo.files.items
                )
            await self._core.failpoints.reach("rollback:after_restore", thread.id)
            for resource, plan in undo.sql.items():
                report = await sql_restore.restore(environment.sql[resource], plan)
                undo.late_conflicts |= {c.table.resource(resource): c.reason for c in report.conflicts}
            if undo.state:
                items = [
                    (now.key, now.version, before.value if before else None) for now, before in undo.state
                ]
                lost = await self._core.store.restore_state(thread.id, items, step)
                undo.state_conflicts |= {key: f"changed meanwhile by {by}" for key, _, by in lost}
        environment.forget_masks()
        branch = thread.branch
        if path is None:
            undo.moved = await rollback_atoms.rewind(self._core, thread, undo.cut, parent, dry=False)
            branch = (await self._core.store.add_branch(thread.key, parent, undo.cut)).branch
        point = f"p{step}" if covers else ""
        await self._outcome(thread, step, undo, point, covers, branch)
        if path is None:
            await self._ownership.switch_branch(thread, branch)
        thread.lanes.clear()
        await self._processes.set_state(thread, "paused", waiting_for="an operator, after a rollback")
        return {"point": point or None, "branch": branch, "step": step}

    async def _take_point(self, thread: Thread, undo: Undo, step: int) -> list[str]:
        """Keep the state from just before. A rollback that a crash cut short keeps the point it had taken."""
        environment = thread.environment
        files = [] if undo.files is None else [*undo.files.items]
        covers = [item.path for item in files]
        covers += [f"sql {name}" for name, plan in undo.sql.items() if plan.items]
        covers += [f"state {now.key}" for now, _ in undo.state]
        covers += [f"{change['kind']} {change['target']}" for change in rollback_atoms.changes(undo.moved)]
        store = environment.snapshots
        if not covers or await asyncio.to_thread(store.load, f"p{step}") is not None:
            return covers
        records = [
            await sql_restore.take_point(environment.sql[name], plan)
            for name, plan in undo.sql.items()
            if plan.items
        ]
        # With what each path will be afterwards, so that a rollback can itself be undone without conflicts.
        capture = functools.partial(
            store.capture,
            f"p{step}",
            environment.workspace,
            [item.path for item in files],
            expect={item.path: item.before.before for item in files},
            extra={"sql": records},
            beneath=False,
        )
        try:
            await asyncio.to_thread(capture)
        except SnapshotError as error:
            raise conflict(
                f"no point could be taken from just before: {error}; nothing was changed"
            ) from error
        return covers

    async def _outcome(
        self, thread: Thread, step: int, undo: Undo, point: str, covers: list[str], branch: int
    ) -> None:
        # On the new branch, so that the point from just before is among the points there.
        result = {"cut": undo.cut, "branch": branch, "left_branch": thread.branch}
        body: dict[str, Any] = {"result": result, "rules": [], "grants": []}
        if point:
            body["point"] = {
                "id": point,
                "kind": "rollback",
                "covers": covers[:COVERS_MAX],
                "size_bytes": 0,
                "verified": True,
            }
        row = Row(
            chain=thread.key,
            phase=Phase.OUTCOME,
            step=step,
            branch=branch,
            lane=OPERATOR_LANE,
            action="rollback",
            resource=f"step {undo.cut}",
            effect="WRITE",
            verdict="allow",
            outcome="ok",
            started_us=time.time_ns() // 1000,
            body=json.dumps(body).encode(),
        )
        await self._core.append_outcome(row)

    async def finish_interrupted(self, thread: Thread) -> bool:
        """Carry a rollback to its end that a dead kernel had begun. Restoring is idempotent."""
        async with thread.operation:
            return await self._finish_older(thread) is not None

    async def _finish_older(self, thread: Thread) -> tuple[Undo, dict[str, Any], str | None] | None:
        for intent, _ in await self._core.store.unfinished(thread.key):
            if intent.lane != OPERATOR_LANE or intent.action != "rollback":
                continue
            arguments = json.loads(intent.body)["arguments"]
            undo = await self.plan(thread, int(arguments["cut"]), arguments["path"], int(arguments["parent"]))
            path, parent = arguments["path"], int(arguments["parent"])
            return undo, await self._carry_out(thread, undo, intent.step, path, parent), path
        return None
