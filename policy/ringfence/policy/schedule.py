"""When a schedule fires: cron lines on the clock of a time zone, and intervals.

Where a clock is put forward, a line with a fixed hour and minute whose time is skipped fires right after the gap; where it
is put back, it fires in the first of the two hours only. A line with `*` in its hour or minute field follows the clock
as it stands: not at all in a skipped hour, in both of a doubled one. Intervals know no clock changes.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

if TYPE_CHECKING:
    from ringfence.policy.manifest_types import Schedule

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
    try:
        for moment in CronSim(schedule.cron, after.astimezone(ZoneInfo(schedule.timezone))):
            fire = moment.astimezone(UTC)
            # In the second of two hours on the clock the line names a time of the first one.
            if fire > after:
                return fire
    except (StopIteration, RuntimeError, OverflowError):
        pass
    return None
