"""When schedules fire: clock changes of time zones, and that the next time is always later."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ringfence.policy.manifest_types import Schedule
from ringfence.policy.schedule import (
    cron_problem,
    delay_of,
    fires_until,
    next_fire,
    shortest_gap_s,
    zone,
)

BERLIN = "Europe/Berlin"
ANCHOR = datetime(2026, 1, 1, 0, 7, 3, tzinfo=UTC)


def fires(line: str, after: str, count: int, timezone: str = BERLIN) -> list[str]:
    """The next times as UTC, to the minute."""
    moment, found = datetime.fromisoformat(after), list[str]()
    for _ in range(count):
        later = next_fire(Schedule(cron=line, timezone=timezone), moment, ANCHOR)
        assert later is not None
        moment = later
        found.append(moment.strftime("%m-%dT%H:%M"))
    return found


def test_a_fixed_time_that_is_skipped_fires_right_after_the_gap() -> None:
    # On 29 March 2026 the clock of Berlin goes from 2:00 to 3:00.
    assert fires("30 2 * * *", "2026-03-28T00:00Z", 3) == ["03-28T01:30", "03-29T01:00", "03-30T00:30"]


def test_a_fixed_time_in_a_doubled_hour_fires_in_the_first_only() -> None:
    # On 25 October 2026 the hour from 2:00 to 3:00 comes twice.
    assert fires("30 2 * * *", "2026-10-24T00:00Z", 3) == ["10-24T00:30", "10-25T00:30", "10-26T01:30"]
    # Asked in the second of the two, it names no time that is past.
    assert fires("30 2 * * *", "2026-10-25T01:10Z", 1) == ["10-26T01:30"]


def test_a_wildcard_follows_the_clock_on_the_wall() -> None:
    assert fires("30 * * * *", "2026-03-29T00:00Z", 2) == ["03-29T00:30", "03-29T01:30"]
    assert fires("30 * * * *", "2026-10-24T23:45Z", 3) == ["10-25T00:30", "10-25T01:30", "10-25T02:30"]
    skipped = fires("*/30 2 * * *", "2026-03-28T01:45Z", 2)
    assert skipped == ["03-30T00:00", "03-30T00:30"]
    doubled = fires("*/30 2 * * *", "2026-10-25T00:00Z", 3)
    assert doubled == ["10-25T00:30", "10-25T01:00", "10-25T01:30"]


def test_half_hours_and_clocks_that_move_at_midnight() -> None:
    # Lord Howe moves by half an hour; Beirut has moved at midnight, so that a day began at 1:00.
    assert fires("15 2 * * *", "2026-10-03T00:00Z", 2, "Australia/Lord_Howe") == [
        "10-03T15:30",
        "10-04T15:15",
    ]
    assert fires("0 0 * * *", "2024-03-30T00:00Z", 2, "Asia/Beirut") == ["03-30T22:00", "03-31T21:00"]


def test_an_interval_is_counted_from_its_start_and_knows_no_clock_changes() -> None:
    schedule = Schedule(every_s=900.0)
    first = next_fire(schedule, ANCHOR, ANCHOR)
    assert first is not None
    assert first == ANCHOR + timedelta(minutes=15)
    assert next_fire(schedule, first, ANCHOR) == ANCHOR + timedelta(minutes=30)
    assert next_fire(schedule, first - timedelta(microseconds=1), ANCHOR) == first
    # A clock that was put back far: not before its start.
    assert next_fire(schedule, ANCHOR - timedelta(days=1), ANCHOR) == ANCHOR


def test_lines_that_are_none() -> None:
    assert cron_problem("30 2 * * mon-fri") is None
    assert cron_problem("0 0 29 2 *") is None
    for line in (
        "60 * * * *",
        "* 24 * * *",
        "0 0 30 2 *",
        "*/0 * * * *",
        "a * * * *",
        "5-1 * * * *",
        "0 0 L/2/ * *",
    ):
        assert cron_problem(line) is not None, line


def test_zones() -> None:
    assert zone(BERLIN) == ZoneInfo(BERLIN)
    for name in ("Europe/Atlantis", "Europe", "../etc/passwd", "", "/etc/localtime"):
        assert zone(name) is None, name


FIELDS = st.tuples(
    st.one_of(st.just("*"), st.just("*/7"), st.integers(0, 59).map(str), st.just("1,59")),
    st.one_of(st.just("*"), st.just("*/5"), st.integers(0, 23).map(str), st.just("1-3")),
    st.one_of(st.just("*"), st.integers(1, 28).map(str), st.just("L")),
    st.just("*"),
    st.one_of(st.just("*"), st.integers(0, 7).map(str)),
).map(" ".join)
ZONES = st.sampled_from(
    [BERLIN, "UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Asia/Beirut"]
)
# Around the changes of clocks, to the second, and anywhere.
MOMENTS = st.one_of(
    st.integers(-7200, 7200).map(lambda s: datetime(2026, 10, 25, 1, tzinfo=UTC) + timedelta(seconds=s)),
    st.integers(-7200, 7200).map(lambda s: datetime(2026, 3, 29, 1, tzinfo=UTC) + timedelta(seconds=s)),
    st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001 - given one
)


@settings(deadline=None)
@given(FIELDS, ZONES, MOMENTS)
@example("30 2 * * *", BERLIN, datetime(2026, 10, 25, 1, 10, tzinfo=UTC))
def test_the_next_time_is_always_later(line: str, timezone: str, moment: datetime) -> None:
    schedule = Schedule(cron=line, timezone=timezone)
    times = [moment]
    for _ in range(4):
        later = next_fire(schedule, times[-1], ANCHOR)
        assert later is not None
        times.append(later)
    assert all(a < b for a, b in pairwise(times))
    # Nothing is passed over: asked from just before, the same time is found.
    for later in times[2:]:
        assert next_fire(schedule, later - timedelta(seconds=1), ANCHOR) == later


@pytest.mark.parametrize("seconds", [1.0, 59.5, 86400.0])
def test_intervals_always_grow(seconds: float) -> None:
    moment = ANCHOR
    for _ in range(50):
        later = next_fire(Schedule(every_s=seconds), moment, ANCHOR)
        assert later is not None
        assert moment < later <= moment + timedelta(seconds=seconds)
        moment = later


def test_a_line_that_never_fires_is_told_from_a_bad_field() -> None:
    for line in ("0 0 30 2 *", "0 0 31 feb,apr *", "0 0 31 4,6,9,11 *"):
        assert cron_problem(line) == "never fires", line
    for line in ("0 0 32 2 *", "0 0 0 2 *", "0 0 30 13 *", "61 0 30 2 *", "30 2", ""):
        assert (cron_problem(line) or "").startswith("can't be read"), line


def test_an_interval_whose_next_time_lies_ahead_fires_then() -> None:
    """However often it is asked meanwhile: nobody can put a fire off by asking."""
    due = datetime(2026, 3, 1, 12, 5, tzinfo=UTC)
    every = Schedule(every_s=900.0)
    for minutes in range(1, 15):
        assert next_fire(every, due - timedelta(minutes=minutes), due) == due
    assert next_fire(every, due, due) == due + timedelta(minutes=15)


def one_by_one(schedule: Schedule, first: datetime, now: datetime) -> list[datetime]:
    found: list[datetime] = []
    fire: datetime | None = first
    while fire is not None and fire <= now:
        found.append(fire)
        fire = next_fire(schedule, fire, first)
    return found


@settings(deadline=None, max_examples=60)
@given(FIELDS, ZONES, MOMENTS, st.integers(0, 3 * 24 * 60), st.integers(1, 40))
@example("30 2 * * *", BERLIN, datetime(2026, 3, 28, tzinfo=UTC), 3 * 24 * 60, 5)
@example("30 2 * * *", BERLIN, datetime(2026, 10, 24, tzinfo=UTC), 3 * 24 * 60, 5)
@example("* * * * *", BERLIN, datetime(2026, 10, 24, 23, tzinfo=UTC), 5 * 60, 400)
def test_the_newest_times_are_those_that_asking_one_by_one_finds(
    line: str, timezone: str, moment: datetime, minutes: int, most: int
) -> None:
    schedule = Schedule(cron=line, timezone=timezone)
    first = next_fire(schedule, moment, ANCHOR)
    assert first is not None
    now = first + timedelta(minutes=minutes)
    assert list(fires_until(schedule, first, now, most)) == one_by_one(schedule, first, now)[-most:]


@pytest.mark.parametrize(
    ("day", "fires_of_the_day"),
    [
        # The night that an hour is left out, and the one in which it comes twice: one run each.
        ("2026-03-29", ["2026-03-29T01:00"]),
        ("2026-10-25", ["2026-10-25T00:30"]),
    ],
)
def test_a_nightly_line_has_one_time_in_both_nights_of_a_clock_change(
    day: str, fires_of_the_day: list[str]
) -> None:
    schedule = Schedule(cron="30 2 * * *", timezone=BERLIN)
    noon = datetime.fromisoformat(f"{day}T12:00Z")
    first = next_fire(schedule, noon - timedelta(days=1), ANCHOR)
    assert first is not None
    assert [f.strftime("%Y-%m-%dT%H:%M") for f in fires_until(schedule, first, noon, 9)] == fires_of_the_day


def test_years_without_a_kernel_are_reckoned_at_once() -> None:
    first = datetime(2016, 1, 1, tzinfo=UTC)
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    each_minute = fires_until(Schedule(cron="* * * * *"), first, now, 100)
    assert (len(each_minute), each_minute[-1]) == (100, now.replace(second=0))
    each_second = fires_until(Schedule(every_s=1.0), first, now, 100)
    assert (each_second[0], each_second[-1]) == (now - timedelta(seconds=99), now)
    new_year = fires_until(Schedule(cron="0 0 1 1 *"), first, now, 100)
    assert [fire.year for fire in new_year] == list(range(2016, 2027))
    assert fires_until(Schedule(every_s=1.0), now, first, 100) == ()


def test_a_delay_is_the_same_wherever_it_is_reckoned_and_other_for_each_fire() -> None:
    schedule = Schedule(every_s=3600.0, jitter_s=600.0)
    here = ANCHOR.astimezone(ZoneInfo("Asia/Tokyo"))
    assert delay_of(schedule, "a-1", ANCHOR) == delay_of(schedule, "a-1", here)
    # Written down once: a kernel of a later release has to agree with one of today.
    assert round(delay_of(schedule, "a-1", ANCHOR).total_seconds(), 3) == 280.699
    delays = [delay_of(schedule, f"a-{n}", ANCHOR + timedelta(hours=h)) for n in range(20) for h in range(20)]
    assert len(set(delays)) == 400
    assert timedelta(0) <= min(delays) < timedelta(seconds=60)
    assert timedelta(seconds=540) < max(delays) < timedelta(seconds=600)
    assert delay_of(Schedule(every_s=3600.0), "a-1", ANCHOR) == timedelta(0)


def test_the_shortest_time_between_two_fires() -> None:
    assert shortest_gap_s(Schedule(every_s=900.0)) == 900.0
    assert shortest_gap_s(Schedule(cron="0 9,10 * * *")) == 3600.0
    assert shortest_gap_s(Schedule(cron="*/7 * * * *")) == 240.0
