"""A call that began its effect and could not be recorded is settled before anybody makes it again, under the same kernel too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ringfence.kernel.thread import Thread
from ringfence.syscalls.errors import Fenced
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
