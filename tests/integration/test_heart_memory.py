"""What a kernel holds of an agent's past does not grow with its rows: a few bytes a step, and a page of rows."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from ringfence.kernel.past import HELD_BYTES
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(240)]

STEPS = 2000
VALUE = "x" * 1500


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def test_a_long_past_is_replayed_in_little_memory(heart: Heart) -> None:
    thread = await heart.agent(allow=['state.*: "**"'])
    await heart.call(thread, 0, "state.put", key="k", value=VALUE)
    for at in range(1, STEPS):
        await heart.call(thread, at, "state.get", key="k")
    heart.core.threads.pop(thread.key)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        again = await heart.adopted_again_from(thread)
        gc.collect()
        loaded = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.reset_peak()
        for at in range(STEPS):
            arguments = {"key": "k", "value": VALUE} if not at else {"key": "k"}
            answer = await heart.call(again, at, "state.get" if at else "state.put", **arguments)
            assert answer.replayed
            heart.forget_tasks()
        walked = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # The rows are 8 MB and more: held, they would show twenty times over.
    assert loaded < 64 * STEPS + 200_000, loaded
    assert walked < loaded + 2 * HELD_BYTES + 1_000_000, walked
    assert (await heart.call(again, STEPS, "state.get", key="k")).step == STEPS + 1
