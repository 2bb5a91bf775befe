"""What operators do with agents: list, show, watch, freeze, end, start, fetch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from ringfence.kernel import freezing
from ringfence.kernel.descent import end_below
from ringfence.kernel.journal.types import AgentRecord, Damaged, Phase, StoredRow
from ringfence.kernel.launch import confined_by
from ringfence.kernel.operations import family, pools, schedules
from ringfence.kernel.operations.divergence import divergence_of, strays_of
from ringfence.kernel.operations.kernel import Kernel, agent_row, from_us, manifest_version, rfc3339, settled
from ringfence.kernel.problems import Problem, conflict
from ringfence.kernel.rollback_begin import goes_back
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.sandbox.trees import make_tar
from ringfence.sandbox.types import SandboxError
from ringfence.sandbox.workspace import WorkspaceError

CHUNK = 1 << 20
PAGE = 500


async def list_agents(kernel: Kernel, everything: bool) -> dict[str, Any]:
    """Agents as `ps` shows them."""
    records = await kernel.core.store.agents(everything)
    rows = [agent_row(kernel, record) for record in records]
    for row, record in zip(rows, records, strict=True):
        if row["steps"] is None:
            row["steps"] = int((await kernel.core.store.counts(record.key)).get("max_step", 0))
            used, _ = await kernel.core.store.amounts(record.key)
            row["tokens"], row["cost_usd"] = int(used["tokens"]), round(used["usd"], 6)
    return {"agents": rows}


async def show(kernel: Kernel, name: str) -> dict[str, Any]:
    """Everything about one agent."""
    record = await kernel.record(name)
    thread = await kernel.thread(name)
    stored = await kernel.record(record.id)  # as it was taken over
    try:
        checkpoint = await kernel.core.store.latest_checkpoint(record.key, thread.lineage.parts)
        damaged = False
    except Damaged as error:
        checkpoint, damaged = error, True
    grants = await kernel.core.store.grants(record.key, active=False)
    now = datetime.now(UTC)
    rules = [
        {"id": g.id, "verdict": g.verdict, "text": g.rule, "origin": g.origin}
        for g in grants
        if g.revoked_at is None and g.uses_left != 0 and (g.expires_at is None or g.expires_at > now)
    ]
    denies = [r for r in thread.manifest.rules if r.verdict == "deny"]
    rules += [{"id": r.id, "verdict": "deny", "text": r.text, "origin": "manifest"} for r in denies]
    ceilings = kernel.ownership.resources.file.ceilings.rules
    rules += [{"id": r.id, "verdict": str(r.verdict), "text": r.text, "origin": "ceiling"} for r in ceilings]
    return {
        **agent_row(kernel, record),
        "pid": None if thread.program is None else thread.program.identity.get("pid"),
        **await family.kin_of(kernel, record.key),
        "thread": record.thread,
        "branch": thread.branch,
        "workspace": str(kernel.layout.agent(record.id) / "live"),
        "manifest": {
            "version": manifest_version(record.manifest),
            "source": record.source,
            "text": record.manifest,
        },
        "rules": rules,
        "grants": [
            {
                "id": g.id,
                "rule": g.rule,
                "verdict": g.verdict,
                "origin": g.origin,
                "created_at": rfc3339(g.created_at),
                "created_by": g.created_by,
                "expires_at": rfc3339(g.expires_at),
                "uses_left": g.uses_left,
                "revoked_at": rfc3339(g.revoked_at),
            }
            for g in grants
        ],
        "budgets": [dataclasses.asdict(view) for view in thread.budgets.view()],
        "pools": await pools.views(kernel, pools.of(thread)),
        "sandbox": await _sandbox_of(kernel, thread),
        "unavailable": kernel.ownership.resources.unavailable(),
        "checkpoint": None
        if checkpoint is None
        else {
            "step": checkpoint.step,
            "schema_version": checkpoint.schema_version,
            "damaged": damaged,
        },
        "schedule": schedules.of(thread),
        "divergence": await divergence_of(kernel, thread),
        "strays": await strays_of(kernel, thread),
        "error": thread.error or None,
        "restarts": thread.restarts,
        "exit_code": stored.exit_code,
        "ended_at": rfc3339(stored.ended_at),
        "created_at": rfc3339(record.created_at),
    }


async def _sandbox_of(kernel: Kernel, thread: Thread) -> dict[str, Any]:
    held = confined_by(thread)
    return {
        "backend": thread.environment.sandbox.name,
        "identity": None if thread.program is None else dict(thread.program.identity),
        "walls": [
            {"name": w.name, "ok": w.ok, "form": held.get(w.name, w.form) or None, "detail": w.detail}
            for w in await kernel.walls(thread.environment.sandbox.name)
        ],
        "disk": _disk_of(thread),
        "require": list(thread.environment.require),
        "mounts": [mount.path for mount in thread.manifest.sandbox.mounts],
    }


def _disk_of(thread: Thread) -> dict[str, int | None]:
    """The live workspace's size as far as it is known: it is counted at the first change after a start."""
    meter = thread.environment.meter
    used = meter.known
    return {
        "used_bytes": None if used is None else used.content_bytes,
        "limit_bytes": meter.limit.content_bytes,
        "entries": None if used is None else used.entries,
        "entries_limit": meter.limit.entries,
    }


async def wait(kernel: Kernel, name: str, parked_for: str = "") -> dict[str, Any]:
    """Answer when the agent is at its end or needs a person; one with a schedule when a run of its has ended.

    What the caller has seen it parked for already is waited on.
    """
    thread = await kernel.thread(name)
    runs = thread.ended_runs

    def over() -> bool:
        seen = bool(parked_for) and (thread.state, thread.waiting_for) == ("parked", parked_for)
        return (settled(thread.state) and not seen) or thread.ended_runs > runs

    async with thread.changed:
        await thread.changed.wait_for(over)
    record = await kernel.record(thread.id)
    state = thread.state
    if thread.ended_runs > runs and thread.schedule is not None:
        state = thread.schedule.last_outcome or state
    return {
        "id": thread.id,
        "state": state,
        "exit_code": record.exit_code,
        "error": thread.error or None,
        "waiting_for": thread.waiting_for or None,
    }


def _over(kernel: Kernel, thread: Thread) -> bool:
    """Whether whoever follows an agent has seen all that this kernel will see of it. One that waits goes on some time."""
    elsewhere = kernel.core.threads.get(thread.key) is not thread
    return thread.state in FINAL_STATES or elsewhere or kernel.core.stopping


async def logs(kernel: Kernel, name: str, *, follow: bool, stderr: bool) -> AsyncIterator[bytes]:
    """The agent's own output."""
    thread = await kernel.thread(name)
    pump = kernel.processes.log_of(thread, "stderr" if stderr else "stdout")
    if follow:
        async for data in pump.follow(lambda: thread.program is None and _over(kernel, thread)):
            yield data
        return
    async for data in pump.read():
        yield data


# -- steps ----------------------------------------------------------------------------------------------------------


def step_document(intent: StoredRow | None, outcome: StoredRow | None, attempts: int = 1) -> dict[str, Any]:
    """One step as scripts read it, from its intent, its outcome, or both."""
    row = outcome or intent
    assert row is not None  # noqa: S101 - a step has one of them
    body: dict[str, Any] = json.loads(row.body)
    rules: list[str] = body.get("rules") or []
    error: dict[str, Any] | None = body.get("error")
    point: dict[str, Any] | None = body.get("point")
    return {
        "step": row.step,
        "lane": row.lane,
        "lane_step": row.lane_step,
        "branch": row.branch,
        "action": row.action,
        "resource": row.resource,
        "effect": row.effect,
        "verdict": row.verdict,
        "rule": rules[0] if rules else None,
        "outcome": row.outcome or None,
        "started_at": from_us(row.started_us),
        "duration_ms": row.duration_us / 1000 if outcome is not None else None,
        "rollback_point": point["id"] if point else None,
        "replayed": False,
        "recovered": bool(body.get("recovered")),
        "recognised": body.get("recognised"),
        "inherited": body.get("inherited"),
        "aside": bool(body.get("aside")),
        "effect_id": row.effect_id or None,
        "error": error["message"] if error else None,
        "reason": error["reason"] if error else None,
        "attempts": attempts,
        "reserved": None if outcome is not None else body.get("reserved"),
        "used": body.get("used"),
        "archived": row.archived,
    }


async def step_documents(
    kernel: Kernel, record: AgentRecord, after: int = 0
) -> AsyncIterator[dict[str, Any]]:
    """Steps in order, each once: of several rows of a step the newest outcome counts.

    What a fork knows of its original's later steps is left out.
    """
    intents: dict[int, StoredRow] = {}
    outcomes: dict[int, StoredRow] = {}
    attempts: Counter[int] = Counter()
    while True:
        rows = await kernel.core.store.steps_page(record.key, after, PAGE)
        if not rows:
            return
        intents.clear()
        outcomes.clear()
        attempts.clear()
        for row in rows:
            (intents if row.phase is Phase.INTENT else outcomes)[row.step] = row
            # A crash between effect and outcome leaves one; what goes on under it writes its own.
            attempts[row.step] += row.phase is Phase.INTENT
        for step in sorted(intents.keys() | outcomes.keys()):
            document = step_document(intents.get(step), outcomes.get(step), max(1, attempts[step]))
            if not document.pop("aside"):
                yield document
        after = max(row.step for row in rows)


async def steps(kernel: Kernel, name: str, *, follow: bool) -> AsyncIterator[dict[str, Any]]:
    """The journal as a person reads it. Of a followed agent a call that waits for a person is shown, and again when it went on."""
    record = await kernel.record(name, removed=True)
    last = 0
    parked: set[int] = set()
    while True:
        thread = kernel.core.threads.get(record.key)
        over = thread is None or _over(kernel, thread)
        under_way = set[int]() if thread is None else {flight.step for flight in thread.flights.values()}
        for step in sorted(parked - under_way):
            document = await anext(step_documents(kernel, record, step - 1), None)
            if document is not None and (document["step"], document["outcome"]) != (step, "parked"):
                parked.discard(step)
                yield document
        async for document in step_documents(kernel, record, last):
            if follow and document["outcome"] is None and not over:
                break
            last = document["step"]
            if document["outcome"] == "parked":
                parked.add(last)
            yield document
        if not follow or over:
            return
        await asyncio.sleep(0.1)


# -- operators' verbs -------------------------------------------------------------------------------------------------


def _short(kernel: Kernel, thread: Thread) -> dict[str, Any]:
    return {"id": thread.id, "state": thread.state, "process": kernel.processes.process_state(thread)}


async def pause(kernel: Kernel, name: str, operator: str) -> dict[str, Any]:
    """Freeze."""
    thread = await kernel.thread(name)
    if thread.state in FINAL_STATES:
        raise conflict(
            f"`{thread.id}` is {thread.state}; there is nothing to pause; see: ringfence show {thread.id}"
        )
    if not goes_back(thread):  # it is paused already, and says what for
        await freezing.pause(kernel.processes, thread)
    await kernel.core.operator_event("operator.pause", thread.id, operator=operator)
    return _short(kernel, thread)


async def resume(kernel: Kernel, name: str, operator: str) -> dict[str, Any]:
    """Thaw."""
    thread = await kernel.thread(name)
    await kernel.rollback.finish_interrupted(thread)
    if thread.state != "paused":
        hint = f"; start it again: ringfence start {thread.id}" if thread.state in FINAL_STATES else ""
        raise conflict(f"`{thread.id}` is {thread.state}, not paused{hint}")
    await kernel.core.operator_event("operator.resume", thread.id, operator=operator)
    async with thread.operation:
        rests = thread.program is None and await kernel.scheduler.rest_again(thread)
    try:
        if not rests:
            await freezing.resume(kernel.processes, thread)
    except SandboxError as error:
        raise Problem(f"`{thread.id}` can't start: {error}", exit_code=1, reason="SandboxError") from error
    return _short(kernel, thread)


async def start(kernel: Kernel, name: str, operator: str) -> dict[str, Any]:
    """Start again after an end, a park or a rollback; the thread continues by replay."""
    thread = await kernel.thread(name)
    if thread.program is not None:
        hint = f"; thaw it: ringfence resume {thread.id}" if thread.frozen else ""
        raise conflict(f"`{thread.id}` is running already{hint}")
    if thread.state == "unknown":
        raise conflict(
            f"`{thread.id}` waits for {thread.waiting_for}; settle it: ringfence resolve {thread.id} STEP --as done|not-done"
        )
    if thread.state == "done":
        raise conflict(
            f"`{thread.id}` is done; roll it back first: ringfence rollback {thread.id} --to STEP --start"
        )
    if thread.state == "sleeping" and not thread.asleep and thread.schedule is not None:
        raise conflict(
            f"`{thread.id}` waits for its schedule; run it now: ringfence schedule run {thread.id}"
        )
    await kernel.core.operator_event("operator.start", thread.id, operator=operator)
    await kernel.rollback.finish_interrupted(thread)
    async with thread.operation:
        if await kernel.scheduler.rest_again(thread):
            return _short(kernel, thread)
        thread.restarts = 0
        thread.asks_anew = thread.asks_anew or thread.state in FINAL_STATES
        try:
            await kernel.processes.start(thread)
        except SandboxError as error:
            raise Problem(
                f"`{thread.id}` can't start: {error}", exit_code=1, reason="SandboxError"
            ) from error
    kernel.scheduler.adopt(thread)
    return _short(kernel, thread)


async def kill(kernel: Kernel, name: str, operator: str, *, only: bool) -> dict[str, Any]:
    """End the whole process tree, and all agents that descend from this one; answers when they are gone."""
    thread = await kernel.thread(name)
    await kernel.core.operator_event("operator.kill", thread.id, operator=operator, only=only)
    await kernel.processes.kill(thread)
    descendants = [] if only else await end_below(kernel.core, kernel.processes, thread.key)
    return {**_short(kernel, thread), "descendants": descendants}


async def pull(kernel: Kernel, name: str, path: str) -> AsyncIterator[bytes]:
    """A tar of the live workspace or a part of it."""
    thread = await kernel.with_files(name)
    async with thread.environment.lock():
        try:
            parts = make_tar(
                kernel.layout.agent(thread.id) / "live",
                thread.environment.workspace.canonical(path or "/workspace"),
            )
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                for at in range(0, len(part), CHUNK):
                    yield part[at : at + CHUNK]
        except WorkspaceError as error:
            raise Problem(str(error), exit_code=4, reason=error.reason) from error
