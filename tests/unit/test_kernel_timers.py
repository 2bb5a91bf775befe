"""Timers on a wall clock that people set."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from ringfence.kernel.journal.types import AgentKey
from ringfence.kernel.timers import LOOK_S, START_S, STORM, Purpose, Timers

T0 = datetime(2026, 3, 1, 12, tzinfo=UTC)
A, B = AgentKey(1), AgentKey(2)


class Clocks:
    """A wall clock that can be set, and one that can't."""

    def __init__(self) -> None:
        self.now, self.steady = T0, 100.0
        self.due: list[tuple[Purpose, AgentKey]] = []
        self.steps: list[float] = []
        self.timers = Timers(self._due, wall=lambda: self.now, steady=lambda: self.steady)
        self.timers.on_step = lambda by: self.steps.append(by.total_seconds())

    async def _due(self, purpose: Purpose, key: AgentKey) -> None:
        self.due.append((purpose, key))

    async def passes(self, seconds: float) -> list[tuple[Purpose, AgentKey]]:
        """Time goes by; gives what it made due."""
        self.now += timedelta(seconds=seconds)
        self.steady += seconds
        return await self.look()

    async def look(self) -> list[tuple[Purpose, AgentKey]]:
        self.timers.look()
        for _ in range(3):
            await asyncio.sleep(0)
        due, self.due = self.due, []
        return due


@pytest.fixture
async def clocks() -> Clocks:
    clocks = Clocks()
    await clocks.look()
    return clocks


async def test_what_is_due_is_done_once(clocks: Clocks) -> None:
    clocks.timers.set("wake", A, T0 + timedelta(seconds=10))
    clocks.timers.set("fire", A, T0 + timedelta(seconds=20))
    assert clocks.timers.look() == 10.0
    assert await clocks.passes(9) == []
    assert await clocks.passes(1) == [("wake", A)]
    assert await clocks.passes(60) == [("fire", A)]
    assert await clocks.passes(60) == []
    assert len(clocks.timers) == 0
    assert clocks.timers.look() == LOOK_S
    assert clocks.steps == []


@pytest.mark.parametrize("hours", [-3, 3, -24 * 365, 24 * 365])
async def test_a_sleep_takes_as_long_whatever_the_clock_is_set_to(clocks: Clocks, hours: int) -> None:
    clocks.timers.set("wake", A, T0 + timedelta(seconds=100))
    assert await clocks.passes(30) == []
    clocks.now += timedelta(hours=hours)
    assert await clocks.look() == []
    assert clocks.steps == [hours * 3600.0]
    assert await clocks.passes(69) == []
    assert await clocks.passes(1) == [("wake", A)]


async def test_a_time_of_day_stays_what_it_is(clocks: Clocks) -> None:
    clocks.timers.set("fire", A, T0 + timedelta(hours=1))
    clocks.now += timedelta(hours=2)
    assert await clocks.look() == [("fire", A)]
    clocks.timers.set("fire", A, T0 + timedelta(hours=5))
    clocks.now -= timedelta(hours=2)
    assert await clocks.look() == []
    assert clocks.timers.at("fire", A) == T0 + timedelta(hours=5)


async def test_what_is_told_of_a_step_may_set_timers_that_are_due_at_once(clocks: Clocks) -> None:
    clocks.timers.set("fire", B, T0 + timedelta(hours=9))
    clocks.timers.on_step = lambda _by: clocks.timers.set("fire", B, clocks.now)
    clocks.now -= timedelta(days=3)
    assert await clocks.look() == [("fire", B)]


async def test_a_clock_that_is_slewed_is_none_that_was_set(clocks: Clocks) -> None:
    for _ in range(20):
        clocks.now += timedelta(seconds=0.2)
        assert await clocks.passes(30) == []
    assert clocks.steps == []


class Ahead:
    """Who is told before their time."""

    def __init__(self, clocks: Clocks) -> None:
        self.told: list[AgentKey] = []
        clocks.timers.early = self._early

    async def _early(self, key: AgentKey, _at: datetime) -> None:
        self.told.append(key)


async def test_those_that_wake_together_are_told_before_once_and_are_due_all_the_same(clocks: Clocks) -> None:
    ahead = Ahead(clocks)
    keys = [AgentKey(n) for n in range(1, STORM * 3)]
    for key in keys:  # nearly together
        clocks.timers.set("wake", key, T0 + timedelta(seconds=60, milliseconds=key))
    clocks.timers.set("fire", A, T0 + timedelta(seconds=60))
    assert clocks.timers.look() == LOOK_S
    assert await clocks.passes(49) == []
    assert ahead.told == []
    assert 0 < clocks.timers.look() < 1.1
    assert await clocks.passes(1) == []
    assert clocks.timers.look() < 1.0
    assert await clocks.passes(9.4) == []
    for _ in keys:
        await asyncio.sleep(0)
    assert ahead.told
    assert ahead.told == keys[: len(ahead.told)]
    due = await clocks.passes(2)
    assert sorted(key for purpose, key in due if purpose == "wake") == keys
    assert ahead.told == keys[: len(ahead.told)]


async def test_all_of_a_storm_have_begun_before_its_time(clocks: Clocks) -> None:
    ahead = Ahead(clocks)
    keys = {AgentKey(n) for n in range(1, STORM * 12)}
    moment = T0 + timedelta(seconds=30)
    for key in keys:
        clocks.timers.set("wake", key, moment)
    # As whoever looks at the clock does, up to the last look before the moment.
    while clocks.now + timedelta(seconds=(wait_s := clocks.timers.look())) < moment:
        assert await clocks.passes(wait_s) == []
        for _ in keys:
            await asyncio.sleep(0)
    assert set(ahead.told) == keys


async def test_those_that_come_one_after_the_other_are_woken_when_it_is_time(clocks: Clocks) -> None:
    ahead = Ahead(clocks)
    for key in range(1, 10 * STORM):
        clocks.timers.set("wake", AgentKey(key), T0 + timedelta(seconds=20 + key * START_S * 1.1))
    await clocks.passes(19)
    assert ahead.told == []


async def test_few_are_woken_when_it_is_time(clocks: Clocks) -> None:
    ahead = Ahead(clocks)
    for key in range(1, STORM):
        clocks.timers.set("wake", AgentKey(key), T0 + timedelta(seconds=20))
    for key in range(STORM, 3 * STORM):
        clocks.timers.set("wake", AgentKey(key), T0 + timedelta(seconds=90))
    await clocks.passes(19)
    assert ahead.told == []


async def test_who_no_longer_waits_is_not_told(clocks: Clocks) -> None:
    ahead = Ahead(clocks)
    for key in range(1, 3 * STORM):
        clocks.timers.set("wake", AgentKey(key), T0 + timedelta(seconds=20))
    for key in range(STORM, 3 * STORM):
        clocks.timers.set("wake", AgentKey(key), None)
    await clocks.passes(19)
    assert ahead.told == []
