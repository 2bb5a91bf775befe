"""What times come to that are due: missed ones, those that find a run under way, and clocks that were set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.kernel.fires import MISSED_MAX, after_step_back, plan
from ringfence.kernel.journal.types import AgentKey, ScheduleRecord
from ringfence.policy.manifest_types import Schedule
from ringfence.policy.schedule import delay_of, next_fire

T0 = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
BERLIN = "Europe/Berlin"


def record(**values: Any) -> ScheduleRecord:
    plain: dict[str, Any] = {
        "agent": AgentKey(1),
        "next_at": T0,
        "paused": False,
        "running": False,
        "runs": 1,
        "last_at": None,
        "last_outcome": "",
        "last_error": "",
        "settled_at": T0 - HOUR,
    }
    return ScheduleRecord(**(plain | values))


def hourly(**more: Any) -> Schedule:
    return Schedule(every_s=3600.0, **more)


def times(*hours: int) -> tuple[datetime, ...]:
    return tuple(T0 + HOUR * hour for hour in hours)


def test_nothing_is_due_before_its_time() -> None:
    assert plan(hourly(), "a", record(), "sleeping", T0 - timedelta(microseconds=1)) is None
    assert plan(hourly(), "a", record(next_at=None), "sleeping", T0) is None


def test_a_time_that_comes_begins_a_run() -> None:
    found = plan(hourly(), "a", record(), "sleeping", T0)
    assert found is not None
    assert (found.run, found.next_at, found.settled_at) == (T0, T0 + HOUR, T0)
    assert (found.missed, found.queued, found.passed, found.replaces) == (0, (), (), False)


def test_times_that_were_missed() -> None:
    now = T0 + 3 * HOUR + timedelta(minutes=5)
    once = plan(hourly(), "a", record(), "sleeping", now)
    every = plan(hourly(missed="all"), "a", record(), "sleeping", now)
    none = plan(hourly(missed="skip"), "a", record(), "sleeping", now)
    assert once is not None
    assert every is not None
    assert none is not None
    assert (once.run, once.missed, once.queued, once.passed) == (T0 + 3 * HOUR, 3, (), ())
    assert (every.run, every.missed, every.queued, every.passed) == (T0, 0, times(1, 2, 3), ())
    assert (none.run, none.queued, none.passed) == (None, (), times(0, 1, 2, 3))
    assert {once.next_at, every.next_at, none.next_at} == {T0 + 4 * HOUR}
    # Just after its time is not late.
    prompt = plan(hourly(missed="skip"), "a", record(), "sleeping", now - timedelta(minutes=4, seconds=1))
    assert prompt is not None
    assert (prompt.run, prompt.passed) == (T0 + 3 * HOUR, times(0, 1, 2))


def test_no_more_are_made_up_than_the_limit() -> None:
    asked = Schedule(every_s=1.0, missed="all")
    now = T0 + timedelta(days=400)
    found = plan(asked, "a", record(), "sleeping", now)
    assert found is not None
    assert found.run is not None
    assert (len(found.queued), found.queued[-1]) == (MISSED_MAX - 1, now)
    assert (found.run, found.beyond) == (now - timedelta(seconds=MISSED_MAX - 1), T0)
    short = plan(asked, "a", record(), "sleeping", T0 + timedelta(seconds=MISSED_MAX - 1))
    assert short is not None
    assert (len(short.queued), short.beyond) == (MISSED_MAX - 1, None)


def test_a_time_that_finds_a_run_under_way() -> None:
    live = record(running=True)
    skip = plan(hourly(), "a", live, "running", T0)
    queue = plan(hourly(overlap="queue"), "a", live, "running", T0)
    replace = plan(hourly(overlap="replace"), "a", live, "running", T0)
    assert skip is not None
    assert queue is not None
    assert replace is not None
    assert (skip.run, skip.queued, skip.passed) == (None, (), (T0,))
    assert (queue.run, queue.queued, queue.passed) == (None, (T0,), ())
    assert (replace.run, replace.replaces, replace.passed) == (T0, True, ())
    # What a person holds, or has to look at, is not ended by the clock.
    for state in ("paused", "unknown"):
        held = plan(hourly(overlap="replace"), "a", live, state, T0)
        assert held is not None
        assert (held.run, held.passed) == (None, (T0,))


def test_one_waits_and_the_newest_counts_unless_all_are_to_run() -> None:
    waits = record(running=True, next_at=T0 + HOUR, queued=times(0))
    one = plan(hourly(overlap="queue"), "a", waits, "running", T0 + HOUR)
    every = plan(hourly(overlap="queue", missed="all"), "a", waits, "running", T0 + HOUR)
    assert one is not None
    assert every is not None
    assert (one.queued, one.passed) == (times(1), times(0))
    assert (every.queued, every.passed) == (times(0, 1), ())
    full = record(running=True, queued=tuple(T0 - HOUR * n for n in range(MISSED_MAX, 0, -1)))
    most = plan(hourly(overlap="queue", missed="all"), "a", full, "running", T0)
    assert most is not None
    assert (len(most.queued), most.queued[-1], most.passed) == (MISSED_MAX, T0, (full.queued[0],))


def test_what_waits_begins_when_the_run_is_over() -> None:
    waits = record(queued=times(-2, -1))
    found = plan(hourly(missed="all"), "a", waits, "sleeping", T0 - timedelta(minutes=1))
    assert found is not None
    assert (found.run, found.queued, found.next_at) == (T0 - 2 * HOUR, times(-1), T0)
    assert found.settled_at == waits.settled_at
    # Held by an operator between runs, nothing is kept for later.
    held = plan(hourly(missed="all"), "a", waits, "paused", T0)
    assert held is not None
    assert (held.run, held.queued, held.passed) == (None, (), times(-2, -1, 0))


def test_jitter_puts_a_run_off_and_leaves_its_time() -> None:
    asked = hourly(jitter_s=1800.0)
    delay = delay_of(asked, "a", T0)
    assert plan(asked, "a", record(), "sleeping", T0 + delay - timedelta(microseconds=1)) is None
    found = plan(asked, "a", record(), "sleeping", T0 + delay)
    assert found is not None
    assert (found.run, found.next_at) == (T0, T0 + HOUR)
    # Of two times of which the second still waits for its delay, the first is not missed.
    later = T0 + HOUR + delay_of(asked, "a", T0 + HOUR) / 2
    first = plan(asked, "a", record(), "sleeping", later)
    assert first is not None
    assert (first.run, first.missed, first.next_at) == (T0, 0, T0 + HOUR)


# A wall clock as it may be: it goes on, it is set forward, it is set back.
STEPS = st.lists(
    st.one_of(
        st.integers(1, 7200),
        st.integers(-7200, -1),
        st.sampled_from([86400 * 3, -86400 * 3, 86400 * 400, -86400 * 400]),
    ),
    min_size=1,
    max_size=40,
)
ASKED = st.sampled_from(
    [
        Schedule(cron="30 2 * * *", timezone=BERLIN),
        Schedule(cron="*/20 * * * *", timezone=BERLIN, missed="all"),
        Schedule(cron="0 * * * *", missed="skip"),
    ]
)


@settings(deadline=None)
@given(ASKED, STEPS)
def test_however_a_clock_is_set_no_time_of_a_line_has_two_runs_and_none_stands_still(
    asked: Schedule, steps: list[int]
) -> None:
    now = T0
    state = record(next_at=next_fire(asked, now, now), settled_at=now)
    begun: set[datetime] = set()
    for step in steps:
        now += timedelta(seconds=step)
        anew = after_step_back(asked, state, now)
        if anew is not None:
            # Only where the clock had been a day ahead: what it named then means nothing.
            assert state.settled_at > now + timedelta(days=1)
            state, begun = record(next_at=anew, settled_at=now, queued=state.queued), set[datetime]()
        while (found := plan(asked, "a", state, "sleeping", now)) is not None:
            if found.run is not None:
                assert found.run not in begun
                begun.add(found.run)
            state = record(next_at=found.next_at, settled_at=found.settled_at, queued=found.queued)
        # It goes on within a day of the first time that this clock names and that has had no run.
        assert state.next_at is not None
        upcoming = next_fire(asked, max(now, state.settled_at), now)
        assert upcoming is not None
        assert state.next_at <= upcoming
        assert state.settled_at <= now + timedelta(days=1)


@given(STEPS)
def test_an_interval_never_waits_for_longer_than_itself(steps: list[int]) -> None:
    now, asked = T0, hourly()
    state = record(next_at=now + HOUR, settled_at=now)
    for step in steps:
        now += timedelta(seconds=step)
        anew = after_step_back(asked, state, now)
        if anew is not None:
            state = record(next_at=anew, settled_at=now)
        found = plan(asked, "a", state, "sleeping", now)
        if found is not None:
            state = record(next_at=found.next_at, settled_at=found.settled_at)
        assert state.next_at is not None
        assert now < state.next_at <= now + HOUR + timedelta(seconds=1)


@pytest.mark.parametrize("back", [timedelta(minutes=5), timedelta(hours=23)])
def test_a_clock_that_is_put_back_a_little_repeats_nothing(back: timedelta) -> None:
    """02:30 has had its run; the clock shows 02:30 again."""
    asked = Schedule(cron="30 2 * * *")
    fired = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)
    state = record(next_at=fired + timedelta(days=1), settled_at=fired)
    for minute in range(0, int(back.total_seconds() // 60) + 1, 5):
        now = fired - back + timedelta(minutes=minute)
        assert after_step_back(asked, state, now) is None
        assert plan(asked, "a", state, "sleeping", now) is None


def test_a_clock_that_had_been_years_ahead_does_not_stop_a_schedule_for_years() -> None:
    asked = Schedule(cron="30 2 * * *")
    wrong = datetime(2031, 1, 1, 2, 30, tzinfo=UTC)
    state = record(next_at=wrong + timedelta(days=1), settled_at=wrong)
    assert after_step_back(asked, state, T0) == datetime(2026, 3, 2, 2, 30, tzinfo=UTC)
