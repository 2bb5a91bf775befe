"""What schedules say about missed times, runs that overlap, jitter and clocks that are set, on a database and a clock of the test's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ringfence.kernel.scheduler import AT_ONCE
from ringfence.kernel.thread import Thread
from ringfence.policy.schedule import delay_of
from ringfence.sandbox.types import ExitReason
from support.heart import HandProgram, Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

T0 = datetime(2036, 3, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Clock:
    """The wall clock of the scheduler."""

    def __init__(self) -> None:
        self.now, self.steady = T0, 0.0

    def passes(self, by: timedelta) -> None:
        self.now += by
        self.steady += by.total_seconds()


class World:
    """A heart with that clock."""

    def __init__(self, heart: Heart, clock: Clock) -> None:
        self.heart, self.clock = heart, clock
        self.timers: Any = heart.kernel.scheduler.timers

    async def agent(self, schedule: str, first: datetime = T0 + HOUR, **more: Any) -> Thread:
        extra = more.pop("more", "")
        thread = await self.heart.agent(more=f"schedule: {{{schedule}}}\n{extra}", first_fire=first, **more)
        self.heart.kernel.scheduler.adopt(thread)
        return thread

    async def restarted(self, thread: Thread) -> Thread:
        """The agent under the next kernel, which starts what was running."""
        await self.heart.processes.end_program(thread)
        again = await self.heart.adopted_again(thread)
        if again.schedule is not None and again.schedule.running:
            await self.heart.start(again)
        self.heart.kernel.scheduler.adopt(again)
        return again

    async def passes(self, by: timedelta) -> None:
        self.clock.passes(by)
        await self.look()

    async def look(self) -> None:
        """Look at the clock, until nothing more is due at once."""
        while True:
            self.timers.look()
            work = list(self.timers._work)
            if not work:
                return
            await asyncio.gather(*work)

    async def end(self, thread: Thread, code: int = 0) -> None:
        """The program ends; returns when the run is over and what follows at once has begun."""
        runs, program = thread.ended_runs, thread.program
        assert isinstance(program, HandProgram)
        program.end(ExitReason.EXIT, code)
        await until(thread, lambda: thread.ended_runs > runs)
        await self.look()

    async def events(self, thread: Thread, action: str) -> list[dict[str, Any]]:
        rows = [row async for row in self.heart.core.store.audit(thread.key)]
        return [json.loads(row.body) for row in rows if row.action == action]

    async def fires(self, thread: Thread) -> list[str]:
        return [body["fire"] for body in await self.events(thread, "schedule.run")]


async def until(thread: Thread, met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30), thread.changed:
        await thread.changed.wait_for(met)


def at(hours: int) -> str:
    return (T0 + hours * HOUR).strftime("%Y-%m-%dT%H:%M:%SZ")


def runs(thread: Thread) -> int:
    assert thread.schedule is not None
    return thread.schedule.runs


@pytest.fixture
async def world(dsn: str) -> AsyncIterator[World]:
    clock = Clock()
    with short_directory() as directory:
        async with heart_on(dsn, directory, wall=lambda: clock.now, steady=lambda: clock.steady) as heart:
            yield World(heart, clock)


async def test_times_that_no_kernel_saw_are_made_up_as_asked(world: World) -> None:
    once = await world.agent("every: 1h", name="once")
    every = await world.agent("every: 1h, missed: all", name="all")
    none = await world.agent("every: 1h, missed: skip", name="none")
    world.clock.passes(4 * HOUR + timedelta(minutes=30))
    once, every, none = [await world.restarted(thread) for thread in (once, every, none)]
    await world.look()
    assert await world.fires(once) == [at(4)]
    assert [body["missed"] for body in await world.events(once, "schedule.run")] == [3]
    assert await world.fires(none) == []
    (skipped,) = await world.events(none, "schedule.skip")
    assert (skipped["fire"], skipped["first"], skipped["times"]) == (at(4), at(1), 4)
    assert skipped["because"] == "nobody could begin a run then"
    # All: one after the other, also over a kernel that is gone in between, and none of them twice.
    assert await world.fires(every) == [at(1)]
    assert every.schedule is not None
    assert len(every.schedule.queued) == 3
    await world.end(every)
    assert await world.fires(every) == [at(1), at(2)]
    await world.end(every)
    every = await world.restarted(every)
    await world.look()
    assert await world.fires(every) == [at(1), at(2), at(3)]
    await world.end(every)
    await world.end(every)
    assert await world.fires(every) == [at(1), at(2), at(3), at(4)]
    assert (every.state, every.waiting_for) == ("sleeping", f"schedule {at(5)}")


async def test_a_time_that_finds_a_run_under_way_waits_for_its_end(world: World) -> None:
    thread = await world.agent("every: 1h, overlap: queue")
    await world.passes(HOUR)
    await world.passes(HOUR)
    await world.passes(HOUR)
    assert await world.fires(thread) == [at(1)]
    assert thread.schedule is not None
    assert thread.schedule.queued == (T0 + 3 * HOUR,)
    # One waits, and the newest counts: the one before is passed by and told of.
    assert [body["fire"] for body in await world.events(thread, "schedule.skip")] == [at(2)]
    await world.end(thread, code=0)
    assert await world.fires(thread) == [at(1), at(3)]
    await world.end(thread)
    assert (thread.state, runs(thread)) == ("sleeping", 2)


async def test_a_run_that_fails_is_followed_by_the_one_that_waits(world: World) -> None:
    thread = await world.agent("every: 1h, overlap: queue", more="restart: {policy: never}")
    await world.passes(HOUR)
    await world.passes(HOUR)
    await world.end(thread, code=3)
    assert await world.fires(thread) == [at(1), at(2)]
    await world.end(thread)
    assert (thread.state, runs(thread)) == ("sleeping", 2)


async def test_a_time_that_finds_a_run_under_way_ends_it(world: World) -> None:
    thread = await world.agent("every: 1h, overlap: replace", allow=['fs.*: "/workspace/**"'])
    await world.passes(HOUR)
    first, run_of = world.heart.hand.programs[-1], thread.record.thread
    world.heart.read.stop("before")
    call = world.heart.begin(thread, 0, "fs.read")
    await world.heart.read.reached["before"].wait()
    await world.passes(HOUR)
    assert await world.fires(thread) == [at(1), at(2)]
    (replaced,) = await world.events(thread, "schedule.replace")
    assert (replaced["fire"], replaced["was"]) == (at(2), "running")
    # The old program is gone and its call is cancelled, the new run is one of its own.
    assert (await first.wait()).reason is ExitReason.KILLED
    assert (await call).failure is not None
    assert thread.record.thread != run_of
    assert (thread.state, thread.program is world.heart.hand.programs[-1]) == ("running", True)
    assert not thread.flights
    await world.end(thread)
    assert thread.schedule is not None
    assert (runs(thread), thread.schedule.last_outcome, thread.state) == (2, "done", "sleeping")


async def test_a_run_between_two_starts_is_ended_too_and_comes_back_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program has failed and waits to be started again; that start comes too late."""
    monkeypatch.setattr("ringfence.kernel.processes.BACKOFF_S", 1.0)
    thread = await world.agent("every: 1h, overlap: replace")
    await world.passes(HOUR)
    world.heart.hand.programs[-1].end(ExitReason.EXIT, 1)
    await until(thread, lambda: thread.state == "pending")
    await world.passes(HOUR)
    started = len(world.heart.hand.programs)
    assert (await world.fires(thread), thread.state) == ([at(1), at(2)], "running")
    processes: Any = world.heart.processes
    late = [task for task in processes._tasks if "_restart" in repr(task)]
    await asyncio.gather(*late)
    assert (len(late), len(world.heart.hand.programs), thread.restarts) == (1, started, 0)


async def test_what_a_person_holds_is_not_ended_by_the_clock(world: World) -> None:
    thread = await world.agent("every: 1h, overlap: replace")
    await world.passes(HOUR)
    await world.heart.processes.set_state(thread, "paused")
    await world.passes(HOUR)
    assert await world.fires(thread) == [at(1)]
    assert [body["because"] for body in await world.events(thread, "schedule.skip")] == [
        "the agent is paused"
    ]


async def test_jitter_is_added_where_the_clock_is_watched_and_nowhere_else(world: World) -> None:
    thread = await world.agent("every: 1h, jitter: 30m")
    asked = thread.manifest.schedule
    assert asked is not None
    delay = delay_of(asked, thread.id, T0 + HOUR)
    assert timedelta(0) < delay < timedelta(minutes=30)
    assert world.timers.at("fire", thread.key) == T0 + HOUR + delay
    thread = await world.restarted(thread)
    assert world.timers.at("fire", thread.key) == T0 + HOUR + delay
    await world.passes(HOUR)
    assert await world.fires(thread) == []
    await world.passes(delay)
    assert await world.fires(thread) == [at(1)]
    assert thread.schedule is not None
    assert thread.schedule.next_at == T0 + 2 * HOUR


async def test_a_clock_that_is_put_back_repeats_no_time_and_loses_none(world: World) -> None:
    line = await world.agent('cron: "0 * * * *"', name="line")
    interval = await world.agent("every: 1h", name="interval")
    await world.passes(HOUR)
    for thread in (line, interval):
        assert await world.fires(thread) == [at(1)]
        await world.heart.processes.kill(thread)
        await world.heart.core.store.end_run(thread.key, "done", "", state="sleeping")
        thread.schedule = await world.heart.core.store.schedule(thread.key)
        await world.heart.processes.set_state(thread, "sleeping")
        world.heart.kernel.scheduler.adopt(thread)
    # Back by two hours: the line's 13:00 is past, and comes again on this clock; the interval counts time that passes.
    world.clock.now -= 2 * HOUR
    await world.look()
    assert interval.schedule is not None
    assert interval.schedule.next_at == world.clock.now + HOUR
    assert [body["next"] for body in await world.events(interval, "schedule.clock")] == [at(0)]
    await world.passes(HOUR)
    assert await world.fires(interval) == [at(1), at(0)]
    await world.passes(HOUR + timedelta(minutes=30))
    assert await world.fires(line) == [at(1)]
    await world.passes(timedelta(minutes=30))
    assert await world.fires(line) == [at(1), at(2)]


async def test_a_clock_that_had_been_years_ahead_is_set_right(world: World) -> None:
    world.clock.now += timedelta(days=4000)
    thread = await world.agent('cron: "0 * * * *"', first=world.clock.now + HOUR)
    await world.heart.kernel.scheduler.move(thread, paused=False)
    world.clock.now = T0 + timedelta(minutes=10)
    thread = await world.restarted(thread)
    await world.look()
    assert thread.schedule is not None
    assert (thread.schedule.next_at, thread.waiting_for) == (T0 + HOUR, f"schedule {at(1)}")
    await world.passes(HOUR)
    assert await world.fires(thread) == [at(1)]


async def test_a_clock_that_is_put_ahead_makes_times_missed_and_none_of_them_twice(world: World) -> None:
    thread = await world.agent("every: 1h, missed: all")
    world.clock.now += timedelta(days=30)
    await world.look()
    for _ in range(120):
        if not (thread.schedule and thread.schedule.running):
            break
        await world.end(thread)
    fires = await world.fires(thread)
    assert len(fires) == len(set(fires)) == 100
    assert fires[-1] == at(30 * 24)
    (skipped,) = await world.events(thread, "schedule.skip")
    assert skipped == {"first": at(1), "because": "more than 100 were missed"}


async def test_a_pause_of_the_schedule_forgets_what_waits(world: World) -> None:
    thread = await world.agent("every: 1h, overlap: queue, missed: all")
    await world.passes(HOUR)
    await world.passes(2 * HOUR)
    assert thread.schedule is not None
    assert len(thread.schedule.queued) == 2
    await world.heart.kernel.scheduler.move(thread, paused=False)
    assert len(thread.schedule.queued) == 2
    await world.heart.kernel.scheduler.move(thread, paused=True)
    await world.end(thread)
    assert (await world.fires(thread), thread.state) == ([at(1)], "sleeping")
    await world.heart.kernel.scheduler.move(thread, paused=False)
    await world.look()
    assert await world.fires(thread) == [at(1)]


@pytest.mark.parametrize("back", [timedelta(0), timedelta(hours=3)])
async def test_who_fell_asleep_on_a_clock_that_was_put_back_since_is_woken_to_ask_anew(
    world: World, back: timedelta
) -> None:
    thread = await world.heart.agent(allow=["sleep"], started=True)
    world.heart.begin(thread, 0, "sleep", duration_ms=3_600_000)
    async with asyncio.timeout(30):
        while not any(wait.kind == "timer" for wait in thread.waits.values()):
            await asyncio.sleep(0)
    wake_at = datetime.now(UTC) + HOUR
    await world.heart.processes.set_state(thread, "sleeping", asleep=True, wake_at=wake_at)
    world.clock.now = datetime.now(UTC) - back
    again = await world.restarted(thread)
    assert world.timers.at("wake", again.key) == (AT_ONCE if back else wake_at)


async def test_a_run_whose_kernel_died_before_it_told_of_it_is_told_of_by_the_next_one(world: World) -> None:
    scheduler = world.heart.kernel.scheduler
    thread = await world.agent("every: 1h")
    await world.passes(HOUR)
    await world.end(thread)
    assert thread.schedule is not None
    core = world.heart.core
    begun = await core.store.begin_run(
        thread.key,
        kernel=core.kernel,
        fence=core.fence,
        thread="t-0123456789abcdef",
        last_step=0,
        before=thread.schedule,
        next_at=thread.schedule.next_at,
        queued=(),
        settled_at=thread.schedule.settled_at,
    )
    assert begun is not None
    for _ in range(2):
        thread = await world.restarted(thread)
        await scheduler.tell_again(thread)
    told = await world.events(thread, "schedule.run")
    assert [(body["run"], body["thread"] == "t-0123456789abcdef") for body in told] == [(1, False), (2, True)]
    # Of one that was told of nothing more is said.
    await world.end(thread)
    await world.passes(HOUR)
    await scheduler.tell_again(await world.restarted(thread))
    assert len(await world.events(thread, "schedule.run")) == 3
