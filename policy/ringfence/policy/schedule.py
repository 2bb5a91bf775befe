"""When a schedule fires: cron lines on the clock of a time zone, and intervals.

Where a clock is put forward, a line with a fixed hour and minute whose time is skipped fires right after the gap; where it
is put back, it fires in the first of the two hours only. A line with `*` in its hour or minute field follows the clock
as it stands: not at all in a skipped hour, in both of a doubled one. Intervals know no clock changes.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

if TYPE_CHECKING:
    from ringfence.policy.manifest_types import Schedule

MISSED: Final = ("once", "all", "skip")
OVERLAP: Final = ("skip", "queue", "replace")
_GAPS: Final = 64
"""Fires of a cron line that are looked at for the shortest time between two."""

_LOOKED_FROM: Final = datetime(2024, 1, 1, tzinfo=UTC)
_FIELDS: Final = 5
_BAD_LINE: Final = (CronSimError, ValueError, AssertionError, TypeError, RecursionError)


def zone(name: str) -> ZoneInfo | None:
    """The time zone of this name; None where neither the system nor `tzdata` knows it."""
    try:
        return ZoneInfo(name)
    except (OSError, ValueError):  # `ZoneInfoNotFoundError` is a KeyError, directories an OSError
        return None
    except KeyError:
        return None


def cron_problem(line: str) -> str | None:
    """What is wrong with a cron line; None where it is good and fires some time."""
    try:
        next(CronSim(line, _LOOKED_FROM))
    except StopIteration:
        return "never fires"
    except _BAD_LINE as error:
        if len(line.split()) >= _FIELDS and _reads_in_some_month(line):
            return "never fires"
        return f"can't be read: {str(error) or 'a field is wrong'}".lower()
    return None


def _reads_in_some_month(line: str) -> bool:
    """Whether only its month is in the way, as in `0 0 30 2 *`."""
    *before, days, months, weekdays = line.split()
    try:
        CronSim(" ".join((*before, days, "*", weekdays)), _LOOKED_FROM)
        CronSim(" ".join((*before, "*", months, weekdays)), _LOOKED_FROM)
    except _BAD_LINE:
        return False
    return True


def next_fire(schedule: Schedule, after: datetime, anchor: datetime) -> datetime | None:
    """The first time after `after` that the schedule fires, in UTC.

    Args:
        schedule: the schedule; its line and zone were checked when the manifest was read.
        after: an aware time.
        anchor: what intervals are counted from.

    Returns:
        None where the line never fires again.
    """
    after = after.astimezone(UTC)
    if schedule.every_s is not None:
        every = timedelta(seconds=schedule.every_s)
        # An anchor that lies ahead is a fire itself, and not one interval before the next.
        passed = max(-1, (after - anchor) // every)
        return anchor.astimezone(UTC) + every * (passed + 1)
    return next(_of_line(schedule, after), None)


def _of_line(schedule: Schedule, after: datetime) -> Iterator[datetime]:
    """All times after `after` at which a cron line fires, in UTC and in order."""
    line = CronSim(schedule.cron, after.astimezone(ZoneInfo(schedule.timezone)))
    while True:
        try:
            fire = next(line).astimezone(UTC)
        except (StopIteration, RuntimeError, OverflowError):
            return
        # In the second of two hours on the clock the line names a time of the first one.
        if fire > after:
            after = fire
            yield fire


def fires_until(schedule: Schedule, first: datetime, now: datetime, most: int) -> tuple[datetime, ...]:
    """The newest times at which a schedule fires, from `first`, which is one, up to `now`; oldest first.

    Args:
        schedule: whose.
        first: a fire; intervals are counted from it.
        now: the last moment that counts.
        most: how many, at most.
    """
    if first > now:
        return ()
    if schedule.every_s is not None:
        every = timedelta(seconds=schedule.every_s)
        last = (now - first) // every
        return tuple(first + every * number for number in range(max(0, last - most + 1), last + 1))
    span = timedelta(minutes=most)
    while True:
        # Looked for from ever further back: a kernel may have been gone for years, and a line fires each minute.
        start = max(first, now - span)
        before = start - timedelta(microseconds=1) if start == first else start
        found = deque(takewhile(lambda fire: fire <= now, _of_line(schedule, before)), maxlen=most)
        if len(found) == most or start == first:
            return tuple(found)
        span *= 4


def delay_of(schedule: Schedule, agent: str, fire: datetime) -> timedelta:
    """How long after its time a run begins: less than `jitter`, and the same on every kernel that reckons it.

    Args:
        schedule: whose.
        agent: id of the agent.
        fire: the time.
    """
    if not schedule.jitter_s:
        return timedelta(0)
    named = f"{agent} {int(fire.timestamp() * 1_000_000)}".encode()
    share = int.from_bytes(hashlib.sha256(named).digest()[:8]) / (1 << 64)
    return timedelta(seconds=schedule.jitter_s * share)


def shortest_gap_s(schedule: Schedule) -> float | None:
    """The shortest time between two fires, in seconds; of a cron line among the next ones. None: it fires only once."""
    if schedule.every_s is not None:
        return schedule.every_s
    fires = islice(_of_line(schedule, _LOOKED_FROM), _GAPS)
    return min(((later - fire).total_seconds() for fire, later in pairwise(fires)), default=None)
