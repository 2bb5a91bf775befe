"""What operators ask about schedules: list, pause, resume, run now."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ringfence.kernel.journal.types import AgentRecord, ScheduleRecord
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.problems import Problem, conflict
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.manifest_types import Schedule
from ringfence.policy.problems import ManifestError
from ringfence.policy.schedule import delay_of


async def listing(kernel: Kernel) -> dict[str, Any]:
    """Every schedule, also of agents that ended or that other kernels own."""
    agents = {record.key: record for record in await kernel.core.store.agents(all=True)}
    schedules = await kernel.core.store.schedules()
    return {"schedules": [_row(kernel, agents[s.agent], s) for s in schedules if s.agent in agents]}


def _row(kernel: Kernel, record: AgentRecord, schedule: ScheduleRecord) -> dict[str, Any]:
    thread = kernel.core.threads.get(record.key)
    return document(
        record,
        schedule,
        _asked(record) if thread is None else thread.manifest.schedule,
        record.state if thread is None else thread.state,
    )


def _asked(record: AgentRecord) -> Schedule | None:
    try:
        return parse_manifest(record.manifest, record.source).schedule
    except ManifestError:
        return None  # another release took it


def document(
    record: AgentRecord, schedule: ScheduleRecord, asked: Schedule | None, state: str
) -> dict[str, Any]:
    """One schedule as scripts read it."""
    outcome = schedule.last_outcome
    if schedule.running:
        outcome = state if state in FINAL_STATES else "running"
    every_s = None if asked is None else asked.every_s
    return {
        "agent": record.id,
        "name": record.name,
        "state": state,
        "cron": (asked.cron or None) if asked is not None else None,
        "every_ms": None if every_s is None else int(every_s * 1000),
        "timezone": None if asked is None or every_s is not None else asked.timezone,
        "paused": schedule.paused,
        "next_at": rfc3339(schedule.next_at),
        "starts_at": rfc3339(_starts_at(record, schedule, asked)),
        "missed": None if asked is None else asked.missed,
        "overlap": None if asked is None else asked.overlap,
        "jitter_ms": None if asked is None else int(asked.jitter_s * 1000),
        "queued": [rfc3339(fire) for fire in schedule.queued],
        "runs": schedule.runs,
        "last_at": rfc3339(schedule.last_at),
        "last_outcome": outcome or None,
        "last_error": schedule.last_error or None,
    }


def _starts_at(record: AgentRecord, schedule: ScheduleRecord, asked: Schedule | None) -> datetime | None:
    if asked is None or schedule.next_at is None:
        return None
    return schedule.next_at + delay_of(asked, record.id, schedule.next_at)


def of(thread: Thread) -> dict[str, Any] | None:
    """The schedule of one agent, for `show`; None where it has none."""
    if thread.schedule is None:
        return None
    return document(thread.record, thread.schedule, thread.manifest.schedule, thread.state)


async def _scheduled(kernel: Kernel, name: str) -> Thread:
    thread = await kernel.thread(name)
    if thread.schedule is None:
        text = f"`{thread.id}` has no schedule; give its manifest one (`schedule: {{every: 15m}}`) and submit it again"
        raise Problem(text, exit_code=4, reason="NoSchedule")
    return thread


async def pause(kernel: Kernel, name: str, operator: str) -> dict[str, Any]:
    """Let it fire no more until it is resumed; a run under way goes on."""
    return await _move(kernel, name, operator, paused=True)


async def resume(kernel: Kernel, name: str, operator: str) -> dict[str, Any]:
    """Let it fire again, from the next time on: what was passed by meanwhile is not made up."""
    return await _move(kernel, name, operator, paused=False)


async def _move(kernel: Kernel, name: str, operator: str, *, paused: bool) -> dict[str, Any]:
    thread = await _scheduled(kernel, name)
    verb = "pause" if paused else "resume"
    await kernel.core.operator_event(f"operator.schedule.{verb}", thread.id, operator=operator)
    await kernel.scheduler.move(thread, paused=paused)
    return of(thread) or {}


async def run(kernel: Kernel, name: str, operator: str) -> dict[str, Any]:
    """Begin a run now; the next fire stays where it is."""
    thread = await _scheduled(kernel, name)
    async with thread.operation:
        if thread.schedule is not None and thread.schedule.running:
            raise conflict(
                f"a run of `{thread.id}` is not over ({thread.state}); see: ringfence show {thread.id}"
            )
        if thread.state != "sleeping":
            verb = "resume" if thread.state == "paused" else "start"
            raise conflict(
                f"`{thread.id}` is {thread.state}; let it wait for its schedule first: ringfence {verb} {thread.id}"
            )
        await kernel.core.operator_event("operator.schedule.run", thread.id, operator=operator)
        await kernel.scheduler.run_now(thread)
    return of(thread) or {}
