"""Rollbacks that are held up: they are tried again until they are done, and go on where whoever asked goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from ringfence.kernel import rollback_again
from ringfence.kernel.failpoints import Failpoints
from ringfence.kernel.operations import agents
from ringfence.kernel.rollback_cuts import Cut
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.types import SandboxError
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

CUT = Cut(step=0, parent=0, seen=0)
RESTS = ("paused", "an operator, after a rollback")


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def true(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def with_a_key(heart: Heart) -> Thread:
    thread = await heart.agent(allow=['state.*: "**"'])
    assert (await heart.call(thread, 0, "state.put", key="k", value=1)).failure is None
    return thread


async def stuck(heart: Heart) -> tuple[Thread, Path]:
    """An agent whose rollback could not go on, for the place of its points is taken, and what stands in the way."""
    thread = await with_a_key(heart)
    points = heart.kernel.layout.points(thread.id)
    assert not points.exists()
    points.parent.mkdir(parents=True, exist_ok=True)
    points.write_text("in the way")
    with pytest.raises(SnapshotError):
        await heart.kernel.rollback.execute(thread, CUT, None, "tester")
    return thread, points


async def test_it_is_tried_again_until_it_is_done(heart: Heart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback_again, "AGAIN_S", 0.02)
    thread, points = await stuck(heart)
    await true(lambda: "(3rd time; last error: " in thread.waiting_for)
    assert thread.state == "paused"
    assert thread.waiting_for.startswith("a rollback that is under way, tried again at ")
    assert thread.error
    row = await heart.core.store.agent_by_key(thread.key)
    assert row is not None
    assert (row.state, bool(row.error)) == ("paused", True)
    with pytest.raises(SandboxError, match="a rollback of it is under way"):
        await heart.processes.start(thread)
    assert thread.state == "paused"
    await agents.pause(heart.kernel, thread.id, "tester")
    assert thread.waiting_for.startswith("a rollback that is under way")
    points.unlink()
    await true(lambda: (thread.state, thread.waiting_for) == RESTS)
    assert thread.error == ""
    assert await heart.outcomes(thread) == [(1, "ok"), (2, "ok")]
    await heart.start(thread)
    assert thread.program is not None


async def test_an_operator_who_asks_again_finishes_it(heart: Heart) -> None:
    thread, points = await stuck(heart)
    with pytest.raises(SnapshotError):
        await agents.start(heart.kernel, thread.id, "tester")
    points.unlink()
    _, facts = await heart.kernel.rollback.execute(thread, CUT, None, "tester")
    assert (facts["step"], thread.state, thread.waiting_for) == (2, *RESTS)
    assert await heart.outcomes(thread) == [(1, "ok"), (2, "ok")]


@pytest.mark.parametrize("how", ["fenced", "killed"])
async def test_whose_kernel_is_another_and_who_is_killed_is_tried_no_more(
    heart: Heart, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(rollback_again, "AGAIN_S", 0.02)
    thread, points = await stuck(heart)
    (trying,) = [task for task in asyncio.all_tasks() if "Again._insist" in repr(task)]
    if how == "fenced":
        thread.fenced = True
    else:
        await agents.kill(heart.kernel, thread.id, "tester", only=True)
    async with asyncio.timeout(30):
        await trying
    points.unlink()
    assert await heart.outcomes(thread) == [(1, "ok")]
    if how == "killed":
        # What is left of it is done before it is started.
        await agents.start(heart.kernel, thread.id, "tester")
        assert await heart.outcomes(thread) == [(1, "ok"), (2, "ok")]
        assert thread.program is not None


@pytest.mark.parametrize("together", [False, True])
async def test_it_goes_on_where_whoever_asked_goes_away(heart: Heart, tmp_path: Path, together: bool) -> None:
    heart.core.failpoints = Failpoints(tmp_path)
    thread = await with_a_key(heart)
    point = tmp_path / "rollback:before_restore"
    point.touch()
    rollback = heart.kernel.rollback
    work: Any = (
        rollback.execute_all([(thread, CUT)], "tester")
        if together
        else rollback.execute(thread, CUT, None, "tester")
    )
    asked = asyncio.create_task(work)
    await true((tmp_path / f"{point.name}.hit").exists)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert asked.cancelled()
    assert thread.operation.locked()
    point.unlink()
    await true(lambda: (thread.state, thread.waiting_for) == RESTS)
    assert await heart.outcomes(thread) == [(1, "ok"), (2, "ok")]
