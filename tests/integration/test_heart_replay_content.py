"""Calls that are known by what they ask, and what of it is ignored: every effect once, and another way is asked about."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ringfence.kernel.divergence import EVENT
from ringfence.kernel.journal.types import Phase
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.settled import Answer
from ringfence.syscalls.codec import canonical_json
from support.heart import URL, Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

ALL = ['http.*: "http://pay.test/**"']
NAMED = "restart: {ignore: [{action: http.post, at: /headers/x-request-id}]}"


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


async def nobody(_thread: Any, _answer: Answer) -> None: ...


def desk_of(heart: Heart, thread: Any) -> Desk:
    """The door of a thread's present start."""
    return Desk(thread, heart.dispatcher, nobody)


async def ask(desk: Desk, ident: str, url: str = URL) -> Answer:
    return await desk.in_order("http.post", canonical_json({"url": url, "headers": {"x-request-id": ident}}))


async def again(heart: Heart, thread: Any) -> Desk:
    await heart.processes.kill(thread)
    await heart.start(thread)
    return desk_of(heart, thread)


async def test_an_action_that_the_recipe_names_is_known_by_the_rest(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, more=NAMED, started=True)
    desk = desk_of(heart, thread)
    first, second = await ask(desk, "1"), await ask(desk, "2")
    desk = await again(heart, thread)
    assert [(await ask(desk, ident)).step for ident in ("3", "4")] == [first.step, second.step]
    assert (await ask(desk, "5")).step > second.step
    assert len(heart.post.effects) == 3
    # One that is under way when its program dies is joined by the next.
    heart.post.stop("after")
    flying = asyncio.ensure_future(ask(desk, "6"))
    await heart.post.reached["after"].wait()
    desk = await again(heart, thread)
    for ident in ("7", "8", "9"):
        await ask(desk, ident)
    joined = asyncio.ensure_future(ask(desk, "10"))
    heart.post.go("after")
    assert (await joined).step == (await flying).step
    assert len(heart.post.effects) == 4


async def test_one_that_was_cut_off_is_made_as_recorded(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, more=NAMED)
    heart.post.stop("after")
    first = asyncio.ensure_future(ask(desk_of(heart, thread), "1"))
    await heart.post.reached["after"].wait()
    # The kernel is gone before the outcome is recorded.
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert len(heart.post.effects) == 1
    thread = await heart.adopted_again(thread)
    heart.post.stops.clear()
    assert (await ask(desk_of(heart, thread), "3")).failure is None
    (one, other) = heart.post.effects
    assert one == other
    rows = await heart.core.store.step(thread.key, one[0])
    asked = [json.loads(row.body)["arguments"]["headers"] for row in rows if row.phase is Phase.INTENT]
    assert asked == [{"x-request-id": "1"}] * 2
    assert len({row.digest for row in rows}) == 1


async def test_one_that_no_recipe_names_is_another_call_and_asked_about(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    first = await ask(desk_of(heart, thread), "1")
    desk = await again(heart, thread)
    other = asyncio.ensure_future(ask(desk, "2"))
    await until(lambda: thread.waits)
    assert len(heart.post.effects) == 1
    event = await heart.core.store.last_event(thread.key, EVENT)
    assert event is not None
    (told,) = json.loads(event.body)["calls"]
    assert told["recorded_step"] == first.step
    assert told["differences"] == [{"at": "/headers/x-request-id", "recorded": "1", "made": "2"}]
    # From where it has asked for all that is recorded, rules alone count again.
    assert (await ask(desk, "1")).step == first.step
    assert (await ask(desk, "3")).failure is None
    assert len(heart.post.effects) == 2
    assert not other.done()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


SAVES = [*ALL, "checkpoint.save"]


async def save(heart: Heart, thread: Any, lane_step: int) -> None:
    saved = await heart.call(
        thread, lane_step, "checkpoint.save", state={"at": lane_step}, schema_version=1, next_child=0
    )
    assert saved.failure is None


async def test_the_same_call_before_a_checkpoint_and_after_it_are_two(heart: Heart) -> None:
    thread = await heart.agent(allow=SAVES, started=True)
    desk = desk_of(heart, thread)
    before = await ask(desk, "1")
    await save(heart, thread, 0)
    after = await ask(desk, "1")
    assert len(heart.post.effects) == 2
    # The program goes on behind its checkpoint: it asks again for what came after, and for nothing else.
    desk = await again(heart, thread)
    assert (await ask(desk, "1")).step == after.step
    assert len(heart.post.effects) == 2
    more = await ask(desk, "1")
    assert more.step not in (before.step, after.step)
    await save(heart, thread, 1)
    # Nothing of it is left behind this one: the next is another.
    desk = await again(heart, thread)
    assert (await ask(desk, "1")).step > more.step
    assert len(heart.post.effects) == len({effect for _, effect in heart.post.effects}) == 4
    # What a loop asked in its first start and in its second is one row of calls.
    last = await ask(desk, "1")
    desk = await again(heart, thread)
    assert [(await ask(desk, "1")).step for _ in range(3)][1] == last.step
    assert len(heart.post.effects) == 6


async def test_one_behind_a_checkpoint_that_its_kernel_left_is_the_same_call(heart: Heart) -> None:
    thread = await heart.agent(allow=SAVES, started=True)
    desk = desk_of(heart, thread)
    await ask(desk, "1")
    await save(heart, thread, 0)
    heart.post.stop("after")
    cut = asyncio.ensure_future(ask(desk, "1"))
    await heart.post.reached["after"].wait()
    # Its program dies, and the next one joins it.
    desk = await again(heart, thread)
    joined = asyncio.ensure_future(ask(desk, "1"))
    heart.post.go("after")
    assert (await joined).step == (await cut).step
    heart.post.stop("after")
    cut = asyncio.ensure_future(ask(desk, "1"))
    await heart.post.reached["after"].wait()
    # Its kernel dies, and the next one makes it again with its own key.
    await heart.processes.kill(thread)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    thread = await heart.adopted_again(thread)
    heart.post.stops.clear()
    desk = desk_of(heart, thread)
    await ask(desk, "1")
    assert (await ask(desk, "1")).failure is None
    assert heart.post.effects[2] == heart.post.effects[3]
    assert len({effect for _, effect in heart.post.effects}) == 3
