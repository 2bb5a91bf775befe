"""What is left of an agent that sleeps: its calls are let go, its rights and environment folded, and nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from ringfence.kernel.operations import rights
from ringfence.kernel.operations.kernel import agent_row
from ringfence.kernel.resting import fold
from ringfence.kernel.thread import LIVELY, Thread
from ringfence.syscalls.errors import Denied
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

HOUR_US = 3_600_000_000
ALLOW = ["sleep", 'messages.*: "*"', 'fs.*: "/workspace/**"']


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not met():
            await asyncio.sleep(0.002)


async def sleeper(heart: Heart, action: str = "sleep", more: str = "", **arguments: Any) -> Thread:
    """An agent that made one call, waits in a second one and was put to sleep."""
    thread = await heart.agent(
        name="s", allow=ALLOW, more=f"approvals: {{linger: 10ms}}\n{more}", started=True
    )
    await heart.call(thread, 0, "fs.read")
    thread.live_lanes = 1
    heart.begin(thread, 1, action, **(arguments or {"duration_ms": HOUR_US // 1000}))
    await until(lambda: thread.asleep and thread.program is None and not thread.operation.locked())
    return thread


async def take(heart: Heart, thread: Thread, rule: str) -> dict[str, Any]:
    return await rights.revoke(heart.kernel, thread.id, rule, everything=False, purge=False, operator="root")


async def starts_again(heart: Heart, thread: Thread) -> None:
    """Its program is started, and comes by replay to where it waited."""
    await heart.processes.wake(thread)
    assert thread.program is not None
    thread.live_lanes = 2  # something else of it goes on, so that it does not fall asleep again
    assert (await heart.call(thread, 0, "fs.read")).replayed


async def test_a_sleeper_keeps_neither_calls_nor_rights_and_goes_on_where_it_was(heart: Heart) -> None:
    thread = await sleeper(heart, more="budgets: {total: {calls: 5}}")
    assert (thread.flights, thread.waits, thread.folded is not None) == ({}, {}, True)
    at = heart.kernel.scheduler.timers.at("wake", thread.key)
    assert at is not None
    spent = dict(thread.budgets.spent)
    await starts_again(heart, thread)
    assert thread.folded is None
    heart.begin(thread, 1, "sleep", duration_ms=HOUR_US // 1000)
    await until(lambda: bool(thread.waits))
    ((step, wait),) = thread.waits.items()
    assert (step, dict(thread.budgets.spent)) == (2, spent)
    assert wait.until_us is not None
    assert abs(wait.until_us / 1e6 - at.timestamp()) < 1


def kept(thread: Thread) -> set[str]:
    """Parts that a thread has at hand, without a look that would make one."""

    def there(name: str) -> bool:
        try:
            Thread.__dict__[name].__get__(thread)
        except AttributeError:
            return False
        return True

    return {name for name in LIVELY if there(name)}


async def test_a_sleeper_keeps_of_its_parts_only_what_something_is_in(heart: Heart) -> None:
    thread = await sleeper(heart)
    assert "unsettled" in kept(thread)
    assert not {"replay", "facts", "flights", "by_lane", "waits"} & kept(thread)
    assert thread.replay.bare
    assert thread.facts.plain
    assert thread.unsettled == {("0", 1)}
    with pytest.raises(AttributeError):
        _ = getattr(thread, "replays")  # noqa: B009 - no part of that name
    await starts_again(heart, thread)
    assert not thread.replay.bare


async def test_what_comes_for_a_sleeper_stays_when_it_is_folded_again(heart: Heart) -> None:
    thread = await sleeper(heart)
    thread.consumed_effects.add("e-1")
    assert thread.environment is not None
    token = thread.new_token()
    assert thread.folded is None
    assert thread.token_matches(token)
    fold(thread)
    assert thread.folded is not None
    assert kept(thread) >= {"consumed_effects", "unsettled"}
    assert thread.consumed_effects == {"e-1"}
    assert not thread.token_matches(token)


async def test_the_clock_is_set_and_the_wait_is_as_long(heart: Heart) -> None:
    thread = await sleeper(heart)
    timers = heart.kernel.scheduler.timers
    at = timers.at("wake", thread.key)
    assert at is not None
    timers.on_step(timedelta(hours=-2))
    await starts_again(heart, thread)
    # Two hours back on a clock that was not really set: the wait is over since an hour.
    async with asyncio.timeout(60):
        await heart.call(thread, 1, "sleep", duration_ms=HOUR_US // 1000)
    assert (2, "ok") in await heart.outcomes(thread)


async def test_who_waits_for_a_message_is_woken_by_one_and_who_waits_for_some_time_keeps_its_call(
    heart: Heart,
) -> None:
    patient = await sleeper(heart, "messages.receive", timeout_ms=None)
    timed = await sleeper(heart, "messages.receive", timeout_ms=60_000)
    assert [len(thread.flights) for thread in (patient, timed)] == [0, 1]
    assert heart.kernel.scheduler.timers.at("wake", patient.key) is None
    await heart.processes.set_state(timed, "paused")
    for thread in (patient, timed):
        heart.core.mailboxes.wake(thread.key)
    await until(lambda: patient.program is not None)
    assert timed.program is None


async def test_a_right_that_is_taken_away_cancels_what_was_let_go(heart: Heart) -> None:
    thread = await sleeper(heart, "messages.receive", timeout_ms=None)
    told = await take(heart, thread, ALLOW[1])
    assert [(call["step"], call["action"], call["fate"]) for call in told["affected"]] == [
        (2, "messages.receive", "cancelled")
    ]
    await until(lambda: thread.program is not None)
    assert (await heart.call(thread, 0, "fs.read")).replayed
    answer = await heart.call(thread, 1, "messages.receive", timeout_ms=None)
    assert isinstance(answer.failure, Denied)


async def test_another_right_that_is_taken_away_leaves_it_asleep(heart: Heart) -> None:
    thread = await sleeper(heart)
    told = await take(heart, thread, ALLOW[2])
    assert (told["affected"], thread.asleep, thread.program) == ([], True, None)
    assert thread.folded is not None
    assert thread.folded.rights.epoch == thread.epoch == thread.rights.epoch
    await starts_again(heart, thread)
    assert isinstance((await heart.call(thread, 0, "fs.read", lane="0.0")).failure, Denied)


async def test_who_has_the_environment_has_the_one_in_force(heart: Heart) -> None:
    """Its lock is the workspace's: two of them would let two change it at once."""
    thread = await sleeper(heart)
    environment = thread.environment
    async with environment.lock():
        fold(thread)
        assert thread.folded is None
    fold(thread)
    assert thread.folded is not None
    assert thread.environment is environment
    fold(thread)
    del environment
    assert thread.folded is not None
    assert thread.folded.held() is None


async def test_what_operators_see_of_it_is_the_same(heart: Heart) -> None:
    thread = await sleeper(heart)
    record = await heart.kernel.record(thread.id)
    rows: list[dict[str, Any]] = []
    for folded in (True, False):
        assert (thread.folded is not None) == folded
        rows.append(agent_row(heart.kernel, record) | {"age_ms": 0})
        thread.unfold()
    assert rows[0] == rows[1]
    assert (rows[0]["state"], rows[0]["process"], rows[0]["steps"]) == ("sleeping", "none", 2)
