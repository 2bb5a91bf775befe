"""A call that began its effect and could not be recorded is settled before anybody makes it again, under the same kernel too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.syscalls.errors import Fenced, JournalUnavailable
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

ALL = ['http.*: "http://pay.test/**"']


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


async def lose_the_outcome(heart: Heart, thread: Thread) -> None:
    """A post is sent; its outcome can't be written, for the journal takes no more rows of the agent just then."""
    heart.post.stop("after")
    calling = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    heart.core.journal.forget(thread.key)
    heart.post.go("after")
    assert isinstance((await calling).failure, Fenced)
    await heart.core.journal.adopt(thread.key)
    assert len(heart.post.effects) == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_takes_no_key_becomes_unknown_and_is_not_sent_again(heart: Heart, restarted: bool) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    heart.post.idempotent = False
    await lose_the_outcome(heart, thread)
    if restarted:
        await heart.processes.kill(thread)
        await heart.start(thread)
    heart.begin(thread, 0)
    await until(thread.replay.waits)
    await until(lambda: thread.state == "unknown")
    assert len(heart.post.effects) == 1
    assert [outcome for _, outcome in await heart.outcomes(thread)] == ["unknown"]


async def test_what_takes_a_key_is_sent_again_under_the_same(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    await lose_the_outcome(heart, thread)
    assert (await heart.call(thread, 0)).failure is None
    (first_step, first_key), (second_step, second_key) = heart.post.effects
    assert (first_step, first_key) == (second_step, second_key)


FILES = ['fs.append: "/workspace/**"']


async def append(heart: Heart, thread: Thread, lane_step: int = 0) -> Answer:
    return await heart.call(thread, lane_step, "fs.append", path="/workspace/a.txt", data="eA==")


async def begin_and_die(heart: Heart, thread: Thread) -> Thread:
    """A kernel writes the intent of an append and dies; gives the agent as the next one finds it."""
    async with thread.environment.lock():
        calling = heart.begin(thread, 0, "fs.append", path="/workspace/a.txt", data="eA==")
        await until(lambda: any(f.intent_written for f in thread.flights.values()))
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
    return await heart.adopted_again(thread)


async def test_a_step_that_was_refused_and_then_made_is_not_made_a_third_time(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kernel dies after the intent, the second can't make the call at first, then dies after the effect."""
    thread = await begin_and_die(heart, await heart.agent(allow=FILES))
    live = heart.kernel.layout.agent(thread.id) / "live" / "a.txt"
    thread.fenced = True
    assert isinstance((await append(heart, thread)).failure, Fenced)
    thread.fenced = False
    workspace = thread.environment.workspace
    append_to = workspace.append

    def lose(path: str, data: bytes) -> tuple[int, str]:
        heart.core.journal.forget(thread.key)
        return append_to(path, data)

    monkeypatch.setattr(workspace, "append", lose)
    assert isinstance((await append(heart, thread)).failure, Fenced)
    assert live.read_bytes() == b"x"
    thread = await heart.adopted_again(thread)
    assert (await append(heart, thread)).failure is None
    assert live.read_bytes() == b"x"
    assert await heart.outcomes(thread) == [(1, "ok")]
    assert (await heart.core.store.counts(thread.key))["calls"] == 1
    assert thread.budgets.spent["calls"] == 1


async def test_of_two_who_ask_while_it_is_settled_one_makes_it(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    await lose_the_outcome(heart, thread)
    answers = await asyncio.gather(heart.begin(thread, 0), heart.begin(thread, 0))
    assert [answer.failure for answer in answers] == [None, None]
    assert len(heart.post.effects) == 2


async def test_a_try_whose_refusal_was_lost_does_not_make_its_successor_doubtful(heart: Heart) -> None:
    """The kernel takes a point, may not go on, makes the call as another step, and dies before it could say all that."""
    thread = await heart.agent(allow=FILES)
    others = asyncio.all_tasks()
    async with thread.environment.lock():
        calling = heart.begin(thread, 0, "fs.append", path="/workspace/a.txt", data="eA==")
        await until(lambda: any(f.intent_written for f in thread.flights.values()))
        heart.core.journal.forget(thread.key)
        thread.fenced = True
    assert isinstance((await calling).failure, Fenced)
    await until(lambda: asyncio.all_tasks() <= others)
    await heart.core.journal.adopt(thread.key)
    thread.fenced = False
    assert (await append(heart, thread, 0)).failure is None
    assert (await append(heart, thread, 1)).failure is None
    thread = await heart.adopted_again(thread)
    assert (thread.state, thread.replay.waits(), thread.replay.unfinished) == ("pending", [], {})
    assert (await append(heart, thread, 0)).replayed
    assert (await append(heart, thread, 1)).replayed
    assert (heart.kernel.layout.agent(thread.id) / "live" / "a.txt").read_bytes() == b"xx"
    assert await heart.outcomes(thread) == [(2, "ok"), (3, "ok"), (1, "refused")]


async def test_a_kernel_at_its_end_waits_for_what_it_has_begun(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next kernel would find nothing done, make the call again, and the file would be changed twice."""
    thread = await heart.agent(allow=FILES)
    workspace = thread.environment.workspace
    append_to = workspace.append
    begun, go = threading.Event(), threading.Event()

    def slow(path: str, data: bytes) -> tuple[int, str]:
        begun.set()
        go.wait(60)
        return append_to(path, data)

    monkeypatch.setattr(workspace, "append", slow)
    calling = heart.begin(thread, 0, "fs.append", path="/workspace/a.txt", data="eA==")
    await until(begun.is_set)
    (flight,) = thread.flights.values()
    assert flight.task is not None
    closing = asyncio.create_task(heart.core.close())
    await until(flight.task.cancelling)
    assert not closing.done()
    go.set()
    await closing
    assert (heart.kernel.layout.agent(thread.id) / "live" / "a.txt").read_bytes() == b"x"
    assert isinstance((await calling).failure, JournalUnavailable)
    assert await heart.outcomes(thread) == []
