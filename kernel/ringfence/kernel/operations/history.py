"""What operators do with the past: points, rollback, diff, resolve, audit."""

from __future__ import annotations

import asyncio
import difflib
import io
import json
import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import msgspec
from ringfence.kernel import rollback_atoms
from ringfence.kernel.journal.audit import export, verify_store
from ringfence.kernel.journal.types import Phase, Row, StoredRow
from ringfence.kernel.operations.kernel import Kernel, from_us
from ringfence.kernel.operations.results import settled_result
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.retention import POINTS_DAYS, POINTS_KEPT
from ringfence.kernel.rollback_plan import Undo, point_of, pruned_before, refuse_pruned
from ringfence.kernel.settled import decided_part, used_amounts
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.types import SandboxError
from ringfence.sandbox.workspace import WorkspaceError

DIFF_BYTES_MAX = 256 << 10
_NO_NEWLINE = "\n\\ No newline at end of file\n"
"""What a unified diff says of a last line without its end."""


async def _outcomes(kernel: Kernel, thread: Thread, after: int = 0) -> list[StoredRow]:
    rows = kernel.core.store.lineage_outcomes(thread.key, thread.lineage.parts, after)
    return [row async for row in rows]


async def points(kernel: Kernel, name: str, *, verify: bool) -> dict[str, Any]:
    """Rollback points of the agent's branch."""
    thread = await kernel.thread(name)
    found: list[dict[str, Any]] = []
    pruned = await pruned_before(kernel.core.store, thread)
    for row in await _outcomes(kernel, thread):
        point = point_of(row)
        if point is None or (row.step < pruned and point["kind"] != "state"):
            continue
        verified = bool(point["verified"])
        if verify and point["kind"] != "state":
            verified = await asyncio.to_thread(thread.environment.snapshots.verify, point["id"])
        found.append(
            {
                "id": point["id"],
                "step": row.step,
                "kind": point["kind"],
                "action": row.action,
                "covers": point["covers"],
                "size_bytes": point["size_bytes"],
                "verified": verified,
                "at": from_us(row.started_us),
            }
        )
    return {"points": found}


async def prune_points(
    kernel: Kernel, name: str, *, keep: int | None, older_than_ms: int | None, operator: str
) -> dict[str, Any]:
    """Remove the agent's oldest points; without a number or an age those that an ended agent would lose."""
    thread = await kernel.thread(name)
    if keep is None and older_than_ms is None:
        keep, older_than_ms = POINTS_KEPT, POINTS_DAYS * 86_400_000
    age = None if older_than_ms is None else older_than_ms / 1000
    done = await kernel.retention.prune(thread, keep=keep, older_than_s=age, operator=operator)
    facts = {"before_step": done["before_step"], "points": len(done["pruned"])}
    await kernel.core.operator_event("operator.points_prune", thread.id, operator=operator, **facts)
    return done


# -- rollback -------------------------------------------------------------------------------------------------------


def undo_document(undo: Undo) -> dict[str, Any]:
    """What a rollback does, as `--preview` shows it."""
    changes: list[dict[str, Any]] = []
    conflicts: list[dict[str, Any]] = [
        {"kind": "state", "target": key, "reason": reason} for key, reason in undo.state_conflicts.items()
    ]
    if undo.files is not None:
        changes += [
            {"kind": undo.files.kinds[i.path], "target": i.path, "action": i.action, "detail": ""}
            for i in undo.files.items
        ]
        conflicts += [
            {"kind": undo.files.kinds[path], "target": path, "reason": undo.files.reasons.get(path, "")}
            for path in undo.files.conflicts
        ]
    for now, before in undo.state:
        action = "restore" if before is not None and before.value is not None else "remove"
        changes.append(
            {"kind": "state", "target": now.key, "action": action, "detail": f"version {now.version}"}
        )
    conflicts += [
        {"kind": "sql", "target": table, "reason": reason} for table, reason in undo.late_conflicts.items()
    ]
    changes += [
        {"kind": "http", "target": kept.put_back_url, "action": "restore", "detail": kept.method}
        for kept in undo.http.items
    ]
    conflicts += [{"kind": "http", "target": url, "reason": why} for url, why in undo.http.conflicts.items()]
    for plan in undo.sql.values():
        for entry in plan.describe():
            key = ", ".join(f"{column}={value}" for column, value in entry["key"].items())
            target = f"{entry['table']} {key}".strip()
            if entry["action"] == "conflict":
                conflicts.append({"kind": "sql", "target": target, "reason": entry["reason"]})
            else:
                changes.append({"kind": "row", "target": target, "action": entry["action"], "detail": ""})
    changes += rollback_atoms.changes(undo.moved)
    return {
        "to_step": undo.cut,
        "changes": changes,
        "conflicts": conflicts,
        "not_undoable": [
            {
                "step": r.step,
                "action": r.action,
                "resource": r.resource,
                "effect": r.effect,
                # Without an outcome nobody knows whether it was sent.
                "outcome": r.outcome or "unknown",
            }
            for r in undo.not_undoable
        ]
        + rollback_atoms.not_undoable(undo.moved),
        "others": list(undo.others),
    }


async def rollback(
    kernel: Kernel, name: str, to: str, *, preview: bool, path: str, start: bool, operator: str
) -> dict[str, Any]:
    """Put effects back, or say what that would do."""
    thread = await kernel.with_files(name)
    cut = await kernel.rollback.plans.cut_for(thread, to)
    wanted = thread.environment.workspace.canonical(path, follow=False) if path else None
    if preview:
        undo = await kernel.rollback.plans.plan(thread, cut.step, wanted, cut.parent)
        return {
            "preview": True,
            **undo_document(undo),
            "point": None,
            "branch": thread.branch,
            "state": thread.state,
        }
    if thread.fenced:
        raise conflict(f"another kernel owns `{thread.id}` now; nothing was changed, connect to that one")
    try:
        undo, facts = await kernel.rollback.execute(thread, cut, wanted, operator)
    except (SnapshotError, WorkspaceError) as error:
        raise conflict(
            f"the rollback stopped: {error}; mend that and run it again, it continues where it was"
        ) from error
    await kernel.core.operator_event("operator.rollback", thread.id, operator=operator, cut=cut.step, **facts)
    if start:
        async with thread.operation:
            try:
                await kernel.processes.start(thread)
            except SandboxError as error:
                raise Problem(
                    f"rolled back, but `{thread.id}` can't start: {error}", exit_code=1, reason="SandboxError"
                ) from error
    return {"preview": False, **undo_document(undo), **facts, "state": thread.state}


# -- diff -----------------------------------------------------------------------------------------------------------


async def diff(kernel: Kernel, name: str, start: str, end: str) -> dict[str, Any]:
    """Workspace changes between two points, each the state just before its step; without `end`: until now."""
    thread = await kernel.with_files(name)
    low = (await kernel.rollback.plans.cut_for(thread, start)).step if start else 0
    high = (await kernel.rollback.plans.cut_for(thread, end)).step if end else thread.last_step
    before: dict[str, Any] = {}
    later: dict[str, Any] = {}
    pruned = await pruned_before(kernel.core.store, thread)
    for row in await _outcomes(kernel, thread, low):
        point = point_of(row)
        if point is None or point["kind"] not in ("workspace", "rollback"):
            continue
        if _went_back(row) and low < row.step - 1:
            if end and high == row.step - 1:
                raise bad_usage(
                    f"`{end}` is of the branch that was left; give it as `--from` to see what went back"
                )
            # Its point is of the branch it left; on this one it brought back what stood after the step it went to.
            continue
        refuse_pruned(point, row.step, pruned)
        try:
            manifest = await asyncio.to_thread(thread.environment.snapshots.require, point["id"])
        except SnapshotError as error:
            raise conflict(str(error)) from error
        for entry in manifest.paths:
            (before if row.step <= high else later).setdefault(entry.path, entry)
    changes = [
        change
        for path in sorted(before)
        if (change := await asyncio.to_thread(_change, thread, path, before[path], later.get(path)))
        is not None
    ]
    return {"changes": changes}


def _went_back(row: StoredRow) -> bool:
    """Whether a row is of a whole rollback, which begins a branch; one of a single path is a change like others."""
    if row.action != "rollback":
        return False
    result: dict[str, Any] = json.loads(row.body)["result"]
    return result.get("branch") != result.get("left_branch")


def _change(thread: Thread, path: str, before: Any, later: Any) -> dict[str, Any] | None:
    workspace = thread.environment.workspace
    after = later.before if later is not None else workspace.fingerprint(path)
    if before.before == after:
        return None
    kind = "created" if before.before == "absent" else "removed" if after == "absent" else "modified"
    return {
        "path": path,
        "kind": kind,
        "before": before.before,
        "after": after,
        "diff": _text(thread, path, before, later),
    }


def _text(thread: Thread, path: str, before: Any, later: Any) -> str | None:
    """A unified diff where both sides are short text."""
    store = thread.environment.snapshots
    try:
        old: bytes = store.content(before)
        new: bytes = store.content(later) if later is not None else _current(thread, path)
        if max(len(old), len(new)) > DIFF_BYTES_MAX:
            return None
        sides = [io.StringIO(side.decode(), newline="\n").readlines() for side in (old, new)]
    except (UnicodeDecodeError, SnapshotError, WorkspaceError):
        return None
    lines = difflib.unified_diff(sides[0], sides[1], f"before{path}", f"after{path}")
    return "".join(line if line.endswith("\n") else line + _NO_NEWLINE for line in lines) or None


def _current(thread: Thread, path: str) -> bytes:
    try:
        return thread.environment.workspace.read(path).data
    except WorkspaceError as error:
        if error.reason == "NoSuchResource":
            return b""
        raise


# -- resolve ----------------------------------------------------------------------------------------------------------


async def resolve(
    kernel: Kernel, name: str, step: int, outcome: str, result: str, operator: str
) -> dict[str, Any]:
    """Settle a call whose outcome is unknown; the agent goes on from there."""
    if outcome not in ("done", "not-done"):
        raise bad_usage(f"`{outcome}` is neither `done` nor `not-done`; give one of them")
    if result and outcome != "done":
        raise bad_usage("a call that did not happen has no result; leave `--result` out")
    thread = await kernel.thread(name)
    async with thread.operation:
        # INVARIANT: one at a time: the agent goes on by the first word, so a second one is refused.
        held = await _unsettled(kernel, thread, step)
        value = settled_result(kernel.core.table, held.action, result) if outcome == "done" else None
        await _record_resolution(kernel, thread, held, outcome, value, operator)
        await kernel.ownership.load_replay(thread)
        await _go_on(kernel, thread)
    return {"step": step, "outcome": "ok" if outcome == "done" else "cancelled", "state": thread.state}


async def _unsettled(kernel: Kernel, thread: Thread, step: int) -> StoredRow:
    """The outcome that waits to be settled, also where the agent goes on from a later checkpoint."""
    rows = [row for row in await kernel.core.store.step(thread.key, step) if row.phase is Phase.OUTCOME]
    held = rows[-1] if rows and thread.lineage.holds(rows[-1].branch, step) else None
    if held is None or held.lane == OPERATOR_LANE:
        raise Problem(
            f"`{thread.id}` has no step {step} that waits; see: ringfence steps {thread.id}",
            exit_code=4,
            reason="NoSuchStep",
        )
    if held.outcome != "unknown":
        raise conflict(
            f"step {step} of `{thread.id}` is settled already: its outcome is {held.outcome}; see: ringfence steps {thread.id}"
        )
    return held


async def _record_resolution(
    kernel: Kernel, thread: Thread, held: StoredRow, outcome: str, value: Any, operator: str
) -> None:
    step = held.step
    used = used_amounts(held)
    # INVARIANT: at the head of the body, where budgets are counted from.
    spent = {"used": used} if used else {}
    body: dict[str, Any] = {**spent, **decided_part(held.body), "resolved_by": operator}
    if outcome == "done":
        body["result"] = value
    else:
        text = "an operator said that it was not done; it is made again"
        body["error"] = {"reason": "Killed", "message": text, "metadata": {}}
    row = Row(
        chain=thread.key,
        phase=Phase.OUTCOME,
        step=step,
        branch=held.branch,
        lane=held.lane,
        lane_step=held.lane_step,
        action=held.action,
        resource=held.resource,
        effect=held.effect,
        verdict=held.verdict,
        outcome="ok" if outcome == "done" else "cancelled",
        digest=held.digest,
        effect_id=held.effect_id,
        started_us=time.time_ns() // 1000,
        body=msgspec.json.encode(body),
    )
    await kernel.core.append_outcome(row)
    await kernel.core.operator_event(
        "operator.resolve", thread.id, operator=operator, step=step, outcome=outcome
    )


async def _go_on(kernel: Kernel, thread: Thread) -> None:
    """Let the calls that were settled go on, and the agent where nothing else is left to settle."""
    left = thread.replay.waits()
    if thread.state == "unknown":
        if left:
            await kernel.processes.set_state(thread, "unknown", waiting_for=f"the outcome of step {left[0]}")
        elif thread.program is not None:
            await kernel.processes.set_state(thread, "running")
        else:
            await kernel.processes.start(thread)
    async with thread.resolved:
        thread.resolved.notify_all()


# -- audit ------------------------------------------------------------------------------------------------------------


async def audit(kernel: Kernel, name: str, since: str) -> AsyncIterator[dict[str, Any]]:
    """The evidence, record by record."""
    chain = (await kernel.record(name, removed=True)).key if name else None
    try:
        moment = datetime.fromisoformat(since) if since else None
    except ValueError:
        raise bad_usage(f"`{since}` is no time in RFC 3339; write it as 2026-01-31T12:00:00Z") from None
    async for record in export(kernel.core.store, chain, moment):
        yield record


async def audit_verify(kernel: Kernel) -> dict[str, Any]:
    """Check every chain and its anchors."""
    report = await verify_store(kernel.core.store, kernel.anchor, kernel.core.journal)
    return {
        "ok": report.ok,
        "rows": report.rows,
        "chains": report.chains,
        "anchors": report.anchors,
        "archived": report.archived,
        "pruned": report.pruned,
        "first_bad": None if report.first_bad is None else dict(report.first_bad),
    }
