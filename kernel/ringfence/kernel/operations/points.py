"""What operators do with rollback points: list them, read them back, remove the oldest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.kernel.journal.types import StoredRow
from ringfence.kernel.operations.kernel import Kernel, from_us
from ringfence.kernel.retention import ended_kept
from ringfence.kernel.rollback_cuts import done_since, point_of, pruned_before
from ringfence.kernel.thread import Thread
from ringfence.policy.keeping import PointsKept
from ringfence.sandbox.points import Damage


async def points(kernel: Kernel, name: str, *, verify: bool) -> dict[str, Any]:
    """Rollback points of the agent's branch; with `verify` those of every branch, read back here and in the shared store."""
    thread = await kernel.thread(name)
    rows = await _kept(kernel, thread, every_branch=verify)
    # A key's old version is in the database: there is nothing to read back.
    kept = [str(point["id"]) for _, point in rows if point["kind"] != "state"] if verify else []
    damages = await asyncio.to_thread(thread.environment.snapshots.damages, kept)
    found: list[dict[str, Any]] = []
    for row, point in rows:
        document = {
            "id": point["id"],
            "step": row.step,
            "kind": point["kind"],
            "action": row.action,
            "covers": point["covers"],
            "size_bytes": point["size_bytes"],
            "verified": bool(point["verified"]),
            "at": from_us(row.started_us),
        }
        if verify:
            damage = _damage(damages.get(str(point["id"]), ()), row, rows)
            document |= {"verified": bool(point["verified"]) and not damage, "damage": damage}
        found.append(document)
    return {"points": found}


async def _kept(
    kernel: Kernel, thread: Thread, *, every_branch: bool
) -> list[tuple[StoredRow, dict[str, Any]]]:
    """Outcomes that carry a point which was not pruned, by step, each with its point."""
    store = kernel.core.store
    if every_branch:
        # INVARIANT: a rollback undoes what was done on any branch, so all of it is read back.
        outcomes = sorted(await done_since(store, thread, 0), key=lambda row: (row.step, row.pos))
    else:
        outcomes = [row async for row in store.lineage_outcomes(thread.key, thread.lineage.parts, 0)]
    pruned = await pruned_before(store, thread)
    found = [(row, point) for row in outcomes if (point := point_of(row)) is not None]
    gone = 0
    if pruned:
        every = outcomes if every_branch else await done_since(store, thread, 0)
        # A key's old version stays. Nothing leads back to before a point that is gone, on whatever branch that was.
        lost = (row.step for row in every if row.step < pruned and _is_file(point_of(row)))
        gone = max(lost, default=0)
    return [
        (row, point)
        for row, point in found
        if row.step > gone and (row.step >= pruned or not _is_file(point))
    ]


def _is_file(point: Mapping[str, Any] | None) -> bool:
    """Whether there is a point whose content is a file among the agent's points, which pruning removes."""
    return point is not None and point["kind"] != "state"


def _damage(
    damages: Sequence[Damage], row: StoredRow, rows: Sequence[tuple[StoredRow, Mapping[str, Any]]]
) -> list[dict[str, str]]:
    """What is damaged, with what nobody gets back any more for it."""
    found: list[dict[str, str]] = []
    for one in damages:
        if not one.path:
            lost = f"every way back to before step {row.step}"
        else:
            earlier = [r.step for r, point in rows if r.step < row.step and one.path in point["covers"]]
            since = f"step {max(earlier)}" if earlier else "the beginning"
            lost = f"{one.path} as it stood from {since} on until step {row.step}"
        if one.where == "store":
            lost += ", where another node takes the agent over"
        found.append({"path": one.path, "where": one.where, "why": one.why, "lost": lost})
    return found


async def prune_points(kernel: Kernel, name: str, kept: PointsKept, *, operator: str) -> dict[str, Any]:
    """Remove the agent's oldest points; without any bound those that an ended agent would lose."""
    thread = await kernel.thread(name)
    if kept == PointsKept():
        told = kernel.ownership.resources.file.retention.of(thread.record.labels).points
        kept = told or ended_kept()
    done = await kernel.retention.prune(thread, kept, operator=operator)
    facts = {"before_step": done["before_step"], "points": len(done["pruned"])}
    await kernel.core.operator_event("operator.points_prune", thread.id, operator=operator, **facts)
    return done
