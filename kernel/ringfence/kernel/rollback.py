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
from typing import Any

from ringfence.kernel import descent, rollback_atoms
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Entry, Phase, Row
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.problems import Problem, conflict
from ringfence.kernel.processes import Processes
from ringfence.kernel.replay import OPERATOR_LANE, Lineage
from ringfence.kernel.revocation import cancel
from ringfence.kernel.rollback_plan import Cut, Plans, Undo
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.errors import Killed
from ringfence.syscalls.http_undo import put_back
from ringfence.syscalls.sql_target import restore as sql_restore

SETTLE_S = 30.0
"""How long a call that has begun its effect may take to finish before a rollback is refused."""

COVERS_MAX = 256
"""Most things that the journal names of one point; its manifest has all of them."""


class Rollback:
    """Rollback of this kernel's agents."""

    def __init__(self, core: Core, ownership: Ownership, processes: Processes) -> None:
        self._core = core
        self._ownership = ownership
        self._processes = processes
        self.plans = Plans(core)

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
                waited = await descent.waiting(self._core, thread)
                await self._end_calls(thread)
                await self._core.store.withdraw_approvals(thread.key, cut.step, "the agent was rolled back")
                # INVARIANT: an older rollback that a crash cut short is carried to its end first, never over newer work.
                older = await self._finish_older(thread)
                if older is not None and (older[0].cut, older[2]) == (cut.step, path):
                    return older[:2]  # this very one
                self._refuse_moved(thread, cut)
                undo = await self.plans.plan(thread, cut.step, path, cut.parent)
                undo.others[:0] = waited
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
            return undo, await self._carry_out(thread, undo, step, path, cut)

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
        self, thread: Thread, undo: Undo, step: int, path: str | None, cut: Cut
    ) -> dict[str, Any]:
        environment = thread.environment
        await descent.end_children(self._core, self._processes, undo.others)
        async with environment.lock():
            environment.meter.forget()  # whatever comes of it; a rollback is refused for no size
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
            await put_back(environment.http, undo.http)
            if undo.state:
                items = [
                    (now.key, now.version, before.value if before else None) for now, before in undo.state
                ]
                lost = await self._core.store.restore_state(thread.id, items, step)
                undo.state_conflicts |= {key: f"changed meanwhile by {by}" for key, _, by in lost}
        environment.forget_masks()
        if path is None:
            undo.moved = await rollback_atoms.rewind(self._core, thread, cut.step, cut.parent, dry=False)
        branch = cut.seen if path is not None else await self._branch(thread, cut)
        await self._core.failpoints.reach("rollback:after_branch", thread.id)
        point = f"p{step}" if covers else ""
        await self._outcome(thread, step, cut, point, covers, branch)
        if path is None:
            await self._ownership.switch_branch(thread, branch)
        thread.lanes.clear()
        await self._processes.set_state(thread, "paused", waiting_for="an operator, after a rollback")
        return {"point": point or None, "branch": branch, "step": step}

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
        covers += [f"sql {name}" for name, plan in undo.sql.items() if plan.items]
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
            if plan.items
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

    async def finish_interrupted(self, thread: Thread) -> bool:
        """Carry a rollback to its end that a dead kernel had begun. Restoring is idempotent."""
        async with thread.operation:
            return await self._finish_older(thread) is not None

    async def _finish_older(self, thread: Thread) -> tuple[Undo, dict[str, Any], str | None] | None:
        for intent, _ in await self._core.store.unfinished(thread.key):
            if intent.lane != OPERATOR_LANE or intent.action != "rollback":
                continue
            arguments = json.loads(intent.body)["arguments"]
            path = arguments["path"]
            cut = Cut(step=int(arguments["cut"]), parent=int(arguments["parent"]), seen=intent.branch)
            # The crash may have come after the new branch was made: what is to be undone lies on the one that is left.
            left = Lineage.of(cut.seen, await self._core.store.branches(thread.key))
            undo = await self.plans.plan(thread, cut.step, path, cut.parent, left)
            return undo, await self._carry_out(thread, undo, intent.step, path, cut), path
        return None
