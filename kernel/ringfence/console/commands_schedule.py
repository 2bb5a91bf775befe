"""Commands about schedules: ls, pause, resume, run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import records
from ringfence.console.durations import span
from ringfence.console.errors import ExitCode
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = Commands()

_COLUMNS = (
    Column(title="AGENT", flex=True),
    Column(title="WHEN", flex=True),
    Column(title="NEXT"),
    Column(title="RUNS", right=True),
    Column(title="LAST"),
    Column(title="OUTCOME"),
)


@commands.add("ls", "ringfence schedule ls")
def list_schedules(session: Session) -> int:
    """List the schedules with their next time and how the last run ended. Times are UTC."""
    found = records(session.client().call("ScheduleList"), "schedules")
    if session.as_json:
        render.emit_array(found)
        return ExitCode.OK
    if not found:
        render.note("no schedules; a manifest has one with `schedule: {every: 15m}`")
        return ExitCode.OK
    render.table(_COLUMNS, [_cells(row) for row in found])
    return ExitCode.OK


@commands.add("pause", "ringfence schedule pause nightly")
@click.argument("name")
def pause(session: Session, name: str) -> int:
    """Let a schedule fire no more; a run under way goes on."""
    return _change(session, "SchedulePause", name)


@commands.add("resume", "ringfence schedule resume nightly")
@click.argument("name")
def resume(session: Session, name: str) -> int:
    """Let a paused schedule fire again, from its next time on."""
    return _change(session, "ScheduleResume", name)


@commands.add("run", "ringfence schedule run nightly")
@click.argument("name")
def run(session: Session, name: str) -> int:
    """Begin a run now; the next one comes at its time all the same."""
    return _change(session, "ScheduleRun", name)


def _change(session: Session, method: str, name: str) -> int:
    document = session.client().call(method, agent=name)
    if session.as_json:
        render.emit(document)
    else:
        upcoming = f"next {_time(document.get('next_at'))}" if document.get("next_at") else "no next time"
        state = "paused" if document.get("paused") else upcoming
        render.say(f"{safe(document.get('agent', name))}: {safe(document.get('state', ''))}, {safe(state)}")
    return ExitCode.OK


def _cells(row: Mapping[str, Any]) -> list[str]:
    every = row.get("every_ms")
    when = f"every {_interval(every)}" if every is not None else row.get("cron") or "?"
    zone = row.get("timezone")
    upcoming = "paused" if row.get("paused") else _time(row.get("starts_at") or row.get("next_at"))
    waiting = len(row.get("queued") or ())
    outcome = row.get("last_outcome") or "-"
    return [
        safe(row.get("agent", "")),
        safe(when if zone in (None, "UTC") else f"{when} {zone}"),
        safe(upcoming),
        safe(row.get("runs", "")),
        safe(_time(row.get("last_at"))),
        safe(f"{outcome}, {waiting} queued" if waiting else outcome),
    ]


def _interval(milliseconds: float) -> str:
    """As a manifest says it: `15m`, not `15m00s`."""
    return span(milliseconds).removesuffix("00s").removesuffix("00m")


def _time(value: object) -> str:
    """A time to the second."""
    return "-" if not value else f"{str(value)[:19].replace('T', ' ')}Z"
