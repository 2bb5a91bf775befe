"""What operators do with the past: resolve, audit."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import msgspec
from ringfence.kernel.journal.audit import export, verify_store
from ringfence.kernel.journal.types import Phase, Row, StoredRow
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.operations.results import settled_result
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.settled import decided_part, used_amounts
from ringfence.kernel.thread import Thread

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
    await thread.announce_resolved()


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
