"""What the times of a schedule come to that are due: which run begins, what waits for one, and what is passed by. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from ringfence.policy.schedule import delay_of, fires_until, next_fire

if TYPE_CHECKING:
    from ringfence.kernel.journal.types import ScheduleRecord
    from ringfence.policy.manifest_types import Schedule

MISSED_MAX: Final = 100
"""Most times that wait for runs of their own; the newest count."""

LATE_S: Final = 60.0
"""A time that is looked at later than this was missed, for `missed: skip`."""

CLOCK_BACK_S: Final = 86400.0
"""How far a clock may be put back while times that were dealt with are waited for again; beyond, a schedule begins anew."""

REPLACEABLE: Final = frozenset({"pending", "running", "waiting", "sleeping", "parked"})
"""States in which a run may be ended for the next one: nobody holds it, and nothing about it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done.

    Attributes:
        run: the time whose run begins now; None: none does.
        replaces: whether the run under way is ended for it.
        missed: how many times that run stands for besides its own.
        queued: times that wait for runs of their own afterwards, oldest first.
        passed: times for which no run begins, oldest first.
        beyond: the oldest of times that no run begins for because there are too many; None: all are counted.
        next_at: when the schedule fires next.
        settled_at: up to when all times are dealt with.
    """

    run: datetime | None = None
    replaces: bool = False
    missed: int = 0
    queued: tuple[datetime, ...] = ()
    passed: tuple[datetime, ...] = ()
    beyond: datetime | None = None
    next_at: datetime | None
    settled_at: datetime


def due_times(asked: Schedule, agent: str, first: datetime | None, now: datetime) -> tuple[datetime, ...]:
    """The newest times that are due, oldest first: those whose delay is over, too."""
    if first is None:
        return ()
    due = fires_until(asked, first, now, MISSED_MAX + 1)
    # One may still wait for its delay, which is shorter than the time between two.
    if due and due[-1] + delay_of(asked, agent, due[-1]) > now:
        due = due[:-1]
    return due[-MISSED_MAX:]


def plan(asked: Schedule, agent: str, record: ScheduleRecord, state: str, now: datetime) -> Plan | None:
    """What the times that are due come to.

    Args:
        asked: the manifest's schedule.
        agent: its id.
        record: the schedule as it is stored.
        state: of the agent.
        now: the wall clock.

    Returns:
        None where nothing is due.
    """
    due = due_times(asked, agent, record.next_at, now)
    if not due and (record.running or not record.queued):
        return None
    next_at, settled_at = record.next_at, record.settled_at
    if due:
        next_at, settled_at = next_fire(asked, due[-1], due[-1]), max(due[-1], settled_at)
    wanted, folded, passed = _wanted(asked, agent, due, now)
    run, replaces, queued = None, False, record.queued
    if not record.running:
        if state == "sleeping":
            waiting = (*queued, *wanted)
            run, queued = (waiting[0], waiting[1:]) if waiting else (None, ())
        else:
            passed, queued = (*passed, *queued, *wanted), ()
    elif asked.overlap == "queue":
        queued = (*queued, *wanted)
    elif asked.overlap == "replace" and state in REPLACEABLE and wanted:
        run, replaces = wanted[-1], True
    else:
        passed = (*passed, *wanted)
    most = MISSED_MAX if asked.missed == "all" else 1
    if len(queued) > most:
        passed, queued = (*passed, *queued[:-most]), queued[-most:]
    if run is None:
        passed, folded = (*passed, *folded), ()
    return Plan(
        run=run,
        replaces=replaces,
        missed=len(folded),
        queued=queued,
        passed=tuple(sorted(passed)),
        beyond=record.next_at if due and due[0] != record.next_at and asked.missed == "all" else None,
        next_at=next_at,
        settled_at=settled_at,
    )


def _wanted(
    asked: Schedule, agent: str, due: tuple[datetime, ...], now: datetime
) -> tuple[tuple[datetime, ...], tuple[datetime, ...], tuple[datetime, ...]]:
    """Times that are to have a run, those that the last of these stands for, and those that were missed for good."""
    if not due or asked.missed == "all":
        return due, (), ()
    if asked.missed == "once":
        return due[-1:], due[:-1], ()
    late = now - due[-1] - delay_of(asked, agent, due[-1]) > timedelta(seconds=LATE_S)
    return ((), (), due) if late else (due[-1:], (), due[:-1])


def after_step_back(asked: Schedule, record: ScheduleRecord, now: datetime) -> datetime | None:
    """When a schedule fires next whose clock was put back, so that it would stand still; None: all is well.

    An interval never waits for longer than its length. The times of a line that were dealt with don't come again until the
    clock is past them, unless it was put back by more than a day: then it had been wrong, and they mean nothing.
    """
    if record.next_at is None:
        return None
    if asked.every_s is not None:
        every = timedelta(seconds=asked.every_s)
        return now + every if record.next_at > now + every + timedelta(seconds=1) else None
    if record.settled_at <= now + timedelta(seconds=CLOCK_BACK_S):
        return None
    return next_fire(asked, now, now)
