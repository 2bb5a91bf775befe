"""Forks: a new agent that goes on from a step of another one, which is left as it is.

It inherits the past up to that step, the rights in force now, what was spent, and what left the system at any time. The
workspace is a copy of the live one, put back to the step. Keys of `state.*` and SQL targets are shared and stay as they are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence.kernel.config import AGENT_UID_BASE
from ringfence.kernel.inherit import Past, append_all
from ringfence.kernel.journal.store_move import branch_document, grant_document
from ringfence.kernel.journal.types import AgentRecord, BranchRecord, StoredRow
from ringfence.kernel.operations.exports import refuse_children
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.operations.removal import discard
from ringfence.kernel.operations.submit import STAGING
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.replay import HAPPENED, Lineage
from ringfence.kernel.rollback_cuts import Cut, done_since, point_of, pruned_before, refuse_pruned
from ringfence.kernel.stillness import held_still
from ringfence.kernel.thread import Thread
from ringfence.policy.sections import is_name
from ringfence.sandbox.direct import LEDGER
from ringfence.sandbox.points import PointManifest, RestorePlan
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.sandbox.trees import copy_tree
from ringfence.sandbox.types import SandboxError
from ringfence.sandbox.workspace import Workspace, WorkspaceError

NAME_MAX = 63
_UNFINISHED = "the copy was not finished; remove it: ringfence rm {id}"


@dataclass(slots=True, kw_only=True)
class _Plan:
    """What the fork is made from.

    Attributes:
        undone: points whose undoing leads back to the step, newest first.
        shared: what the original did after the step that stays done: it is not the fork's to undo.
    """

    source: Thread
    cut: Cut
    record: AgentRecord
    lineage: Lineage
    undone: list[str] = field(default_factory=list[str])
    shared: list[StoredRow] = field(default_factory=list[StoredRow])


async def fork(
    kernel: Kernel, name: str, at: str, *, new_name: str, start: bool, operator: str
) -> dict[str, Any]:
    """Make a new agent from the past of another.

    Raises:
        Problem: no such agent or step, a bad name, a call that does not finish, or a point that can't be used.
    """
    if new_name and not is_name(new_name):
        raise bad_usage(
            f"`{new_name}` is no name for an agent; use up to 63 letters, digits, `.`, `-` and `_`"
        )
    source = await kernel.with_whole_past(name)
    await refuse_children(kernel, source, "forked")
    await kernel.rollback.finish_interrupted(source)
    async with held_still(source, kernel.processes.boundaries.thaw):
        if source.fenced:
            raise conflict(f"another kernel owns `{source.id}` now; nothing was done, connect to that one")
        cut = await kernel.rollback.plans.cut_for(source, at)
        copy_name = new_name or f"{source.record.name[: NAME_MAX - 5]}-fork"
        record = await copied_record(kernel, source.record, copy_name, operator)
        try:
            conflicts = await _fill(kernel, source, cut, record, operator)
        except BaseException as error:
            await discard(kernel, record, str(error))
            if isinstance(error, SnapshotError | WorkspaceError):
                raise conflict(f"the fork can't be made: {error}; nothing is left of it") from error
            raise
    thread = await settle_copy(kernel, record, "an operator, after a fork")
    await kernel.core.operator_event(
        "operator.fork", record.id, operator=operator, source=source.id, at=cut.step
    )
    if start:
        await start_copy(kernel, thread)
    return {
        "id": record.id,
        "name": record.name,
        "state": thread.state,
        "source": source.id,
        "at_step": cut.step,
        "branch": thread.branch,
        **conflicts,
    }


async def copied_record(kernel: Kernel, like: AgentRecord, name: str, operator: str) -> AgentRecord:
    """An agent with the manifest, the input and the thread of another. It is `failed` until it is whole."""
    store = kernel.core.store
    record = await store.create_agent(
        name=name,
        thread=like.thread,
        manifest=like.manifest,
        source=like.source,
        labels=like.labels,
        input=like.input,
        owner=kernel.core.kernel,
        uid_base=AGENT_UID_BASE if os.geteuid() == 0 else None,
        grants=[],
        submitted_by=operator,
    )
    await start_unfinished(kernel, record)
    return record


async def start_unfinished(kernel: Kernel, record: AgentRecord) -> None:
    """Let the chain of a new copy be written, and nobody take it for whole."""
    # INVARIANT: a kernel that starts after a crash neither runs nor takes over what is not whole.
    await kernel.core.store.set_agent(record.key, state="failed", error=_UNFINISHED.format(id=record.id))
    await kernel.core.journal.adopt(record.key)


async def settle_copy(kernel: Kernel, record: AgentRecord, waiting_for: str) -> Thread:
    """Take a whole copy into this kernel's care, paused."""
    await kernel.core.store.set_agent(record.key, state="paused", error="", waiting_for=waiting_for)
    fresh = await kernel.core.store.agent_by_key(record.key)
    assert fresh is not None  # noqa: S101 - it was made above
    return await kernel.ownership.adopt(fresh)


async def start_copy(kernel: Kernel, thread: Thread) -> None:
    """Start it.

    Raises:
        Problem: its sandbox can't be had; the copy stays.
    """
    async with thread.operation:
        try:
            await kernel.processes.start(thread)
        except SandboxError as error:
            text = f"`{thread.id}` is there, but it can't start: {error}"
            raise Problem(text, exit_code=1, reason="SandboxError") from error


async def _fill(
    kernel: Kernel, source: Thread, cut: Cut, record: AgentRecord, operator: str
) -> dict[str, Any]:
    core = kernel.core
    branches = list(await core.store.branches(source.key))
    branch = max(b.branch for b in branches) + 1
    branches.append(
        BranchRecord(branch=branch, parent=cut.parent, cut_step=cut.step, created_at=branches[0].created_at)
    )
    lineage = Lineage.of(branch, branches)
    plan = _Plan(source=source, cut=cut, record=record, lineage=lineage)
    await _after(kernel, plan)
    grants = [grant_document(g) for g in await core.store.grants(source.key)]
    documents = [branch_document(b) for b in branches]
    await core.store.take_branches_and_grants(record.key, documents, branch, grants)
    up_to, head = core.journal.head(source.key)
    facts = {"source": source.id, "source_chain": source.key, "source_pos": up_to, "source_hash": head.hex()}
    await core.event(
        record.key, "agent.fork", record.id, operator=operator, at=cut.step, branch=branch, **facts
    )
    pruned = await pruned_before(core.store, source)
    past = Past(source=source.id, chain=record.key, kept=lineage, up_to=up_to, pruned=pruned)
    await append_all(core, past.rows(core, source.key))
    await core.store.fork_kept(record.key, source.key, lineage.parts)
    await core.failpoints.reach("fork:before_files", record.id)
    restored = await asyncio.to_thread(_lay_out, kernel, plan, list(dict.fromkeys(past.points)))
    return {
        "conflicts": [
            {"kind": restored.kinds[path], "target": path, "reason": restored.reasons.get(path, "")}
            for path in restored.conflicts
        ],
        "shared": [
            {"step": r.step, "action": r.action, "resource": r.resource, "effect": r.effect}
            for r in plan.shared
        ],
    }


async def _after(kernel: Kernel, plan: _Plan) -> None:
    """Find what leads from the workspace of now back to the step."""
    source, cut = plan.source, plan.cut
    pruned = await pruned_before(kernel.core.store, source)
    for row in await done_since(kernel.core.store, source, cut.step):
        point = point_of(row)
        if point is not None:
            refuse_pruned(point, row.step, pruned)
        if point is not None and point["kind"] in ("workspace", "rollback"):
            plan.undone.append(str(point["id"]))
        elif not source.lineage.holds(row.branch, row.step):
            continue  # it was undone with the branch, or was said to stay by that rollback
        elif row.outcome in HAPPENED and (point is not None or row.effect in ("EXTERNAL", "DESTROY")):
            plan.shared.append(row)


def _lay_out(kernel: Kernel, plan: _Plan, points: Sequence[str]) -> RestorePlan:
    """Make the fork's files beside the others, and let them appear under its name when they are whole."""
    home = kernel.layout.agent(plan.record.id)
    old = kernel.layout.agent(plan.source.id)
    uid = plan.record.uid if os.geteuid() == 0 else None
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=home.parent))
    try:
        for part in ("live", "image"):
            copy_tree(old / part, staging / part, uid=uid)
        if (old / LEDGER).exists():
            shutil.copyfile(old / LEDGER, staging / LEDGER)
        (staging / "scratch").mkdir(mode=0o711)
        (staging / "logs").mkdir(mode=0o700)
        store = plan.source.environment.snapshots
        owners = (plan.source.record.uid, plan.record.uid) if uid is not None else None
        _take_points(store, SnapshotStore(kernel.layout.points(plan.record.id)), points, owners)
        # The way back is needed only now: these points are of what the fork has not done.
        back = SnapshotStore(staging / "back")
        _take_points(store, back, plan.undone, owners)
        workspace = Workspace(staging / "live", uid=uid)
        restored = back.plan_restore(workspace, plan.undone)
        back.restore(workspace, restored.items)
        shutil.rmtree(back.root, ignore_errors=True)
        staging.rename(home)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return restored


def _take_points(
    store: SnapshotStore,
    target: SnapshotStore,
    points: Sequence[str],
    owners: tuple[int | None, int | None] | None,
) -> None:
    for point in points:
        target.keep(_owned(store.require(point), owners), store.open_blob)


def _owned(manifest: PointManifest, owners: tuple[int | None, int | None] | None) -> PointManifest:
    """The point as the new agent has it: its files are its own, and rows of SQL targets are not its to put back."""
    extra = {key: value for key, value in manifest.extra.items() if key != "sql"}
    if owners is None:
        return dataclasses.replace(manifest, extra=extra)
    old, new = owners
    paths = [
        dataclasses.replace(
            path,
            uid=new if path.uid == old and new is not None else path.uid,
            gid=new if path.gid == old and new is not None else path.gid,
        )
        for path in manifest.paths
    ]
    return dataclasses.replace(manifest, paths=tuple(paths), extra=extra)
