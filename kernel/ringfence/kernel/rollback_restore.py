"""Carries a planned rollback of one agent out: a point from just before, then files, rows, keys and messages, then the branch.

INVARIANT: every part may be done again with the same plan, or with one that is made anew after a crash: what is as it should
be is left alone.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from ringfence.kernel import compensation, descent, rollback_atoms, rollback_readers
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Phase, Row
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.problems import conflict
from ringfence.kernel.processes import Processes
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.rollback_cuts import Cut
from ringfence.kernel.rollback_plan import Undo
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.object_undo import restore_objects
from ringfence.syscalls.sql_target import restore as sql_restore

COVERS_MAX = 256
"""Most things that the journal names of one point; its manifest has all of them."""


class Restoring:
    """Carries rollbacks of this kernel's agents out."""

    def __init__(self, core: Core, ownership: Ownership, processes: Processes) -> None:
        self._core = core
        self._ownership = ownership
        self._processes = processes

    async def carry_out(
        self,
        thread: Thread,
        undo: Undo,
        step: int,
        path: str | None,
        cut: Cut,
        together: Collection[str] = (),
    ) -> dict[str, Any]:
        """Do it; the agent's operation is the caller's.

        Args:
            thread: the agent. Its program is ended, and no call of it is under way.
            undo: what is to be done.
            step: the rollback's own, whose intent is recorded.
            path: the only path that goes back; None: everything.
            cut: where it leads.
            together: agents that go back with it, and end their own programs.

        Raises:
            Problem: no point could be taken, or a target refuses; what is left is done when it is run again.
        """
        environment, reach = thread.environment, self._core.failpoints.reach
        apart = [other for other in undo.others if other["id"] not in together]
        await descent.end_children(self._core, self._processes, apart)
        await reach("rollback:before_point", thread.id)
        async with environment.lock():
            environment.meter.forget()  # whatever comes of it; a rollback is refused for no size
            covers = await self._take_point(thread, undo, step)
            await reach("rollback:before_restore", thread.id)
            if undo.files is not None and undo.files.items:
                await asyncio.to_thread(
                    environment.snapshots.restore, environment.workspace, undo.files.items
                )
            await reach("rollback:after_restore", thread.id)
            for resource, plan in undo.sql.items():
                report = await sql_restore.restore(environment.sql[resource], plan)
                undo.late_conflicts |= {c.table.resource(resource): c.reason for c in report.conflicts}
            await reach("rollback:after_rows", thread.id)
            await compensation.carry_out(self._core, thread, undo.http)
            await restore_objects(environment.objects, undo.objects)
            await self._state(thread, undo, step)
            await reach("rollback:after_state", thread.id)
        environment.forget_masks()
        if path is None:
            undo.moved = await rollback_atoms.rewind(self._core, thread, cut, dry=False)
            rollback_atoms.match([undo.moved])  # what it had sent to itself is gone, as the plan says
            await rollback_readers.tell(self._core, thread, step, cut.step, undo.others)
            await reach("rollback:after_messages", thread.id)
        branch = cut.seen if path is not None else await self._branch(thread, cut)
        await reach("rollback:after_branch", thread.id)
        point = f"p{step}" if covers else ""
        await self._outcome(thread, step, cut, point, covers, branch)
        await reach("rollback:after_outcome", thread.id)
        if path is None:
            await self._ownership.switch_branch(thread, branch)
        thread.lanes.clear()
        return {"point": point or None, "branch": branch, "step": step}

    async def _state(self, thread: Thread, undo: Undo, step: int) -> None:
        if undo.state:
            items = [(now.key, now.version, before.value if before else None) for now, before in undo.state]
            lost = await self._core.store.restore_state(thread.id, items, step)
            undo.state_conflicts |= {key: f"changed meanwhile by {by}" for key, _, by in lost}

    async def follow(self, thread: Thread) -> None:
        """Go on with the branch that a rollback made, where it is on record and the past could not be read again.

        Raises:
            Unavailable: the database is away.
        """
        newest = max(record.branch for record in await self._core.store.branches(thread.key))
        if thread.branch != newest:
            await self._ownership.switch_branch(thread, newest)

    async def rest(self, thread: Thread, *, ended: bool) -> None:
        """Leave the agent paused after it, or ended where the rollback of the one that spawned it undoes that."""
        thread.going_back = False
        if ended:
            await self._processes.set_state(thread, "killed", ended_at=datetime.now(UTC))
        else:
            await self._processes.set_state(thread, "paused", waiting_for="an operator, after a rollback")

    async def _branch(self, thread: Thread, cut: Cut) -> int:
        """The branch to go on with. One that is newer than the branch left was made by this very rollback, before a crash."""
        newest = max(record.branch for record in await self._core.store.branches(thread.key))
        if newest > cut.seen:
            return newest
        return (await self._core.store.add_branch(thread.key, cut.parent, cut.step)).branch

    async def _take_point(self, thread: Thread, undo: Undo, step: int) -> list[str]:
        """Keep the state from just before. A rollback that a crash cut short keeps the point it had taken."""
        environment = thread.environment
        files = [] if undo.files is None else [*undo.files.items]
        covers = [item.path for item in files]
        covers += [f"sql {name}" for name, plan in undo.sql.items() if not plan.empty]
        covers += [f"state {now.key}" for now, _ in undo.state]
        covers += [f"{change['kind']} {change['target']}" for change in rollback_atoms.changes(undo.moved)]
        store = environment.snapshots
        taken = await asyncio.to_thread(store.load, f"p{step}")
        if taken is not None:
            store.touch(f"p{step}")
            # What is left to put back says less than the point, which is from before the crash.
            return [str(name) for name in taken.extra.get("covers", covers)]
        if not covers:
            return covers
        records = [
            await sql_restore.take_point(environment.sql[name], plan)
            for name, plan in undo.sql.items()
            if not plan.empty
        ]
        # With what each path will be afterwards, so that a rollback can itself be undone without conflicts.
        capture = functools.partial(
            store.capture,
            f"p{step}",
            environment.workspace,
            [item.path for item in files],
            expect={item.path: item.before.before for item in files},
            extra={"sql": records, "covers": covers},
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
        self, thread: Thread, step: int, cut: Cut, point: str, covers: list[str], branch: int
    ) -> None:
        # On the new branch, so that the point from just before is among the points there.
        result = {"cut": cut.step, "branch": branch, "left_branch": cut.seen}
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
            resource=f"step {cut.step}",
            effect="WRITE",
            verdict="allow",
            outcome="ok",
            started_us=time.time_ns() // 1000,
            body=json.dumps(body).encode(),
        )
        await self._core.append_outcome(row)
