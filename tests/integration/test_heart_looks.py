"""What a kernel looks at again and again goes on after a look that the disk refused."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator

import pytest
from ringfence.kernel import takeover
from ringfence.kernel.journal.types import AgentRecord
from ringfence.kernel.nursery import Nurseries
from ringfence.kernel.operations import pruning
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.takeover import Takeover
from ringfence.kernel.thread import Thread
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def test_agents_are_looked_for_again(heart: Heart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "CLAIM_EVERY_S", 0)
    loop, again = asyncio.get_running_loop(), asyncio.Event()
    looks: list[int] = []

    def here(_: Nurseries) -> list[str]:
        looks.append(len(looks))
        if len(looks) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(looks) > 2:
            loop.call_soon_threadsafe(again.set)
        return []

    monkeypatch.setattr(Nurseries, "here", here)
    took = Takeover(heart.kernel, heart.core.fence)
    await took.open()
    try:
        await asyncio.wait_for(again.wait(), 30)
    finally:
        await took.close()


async def test_an_agent_is_taken_over_once_there_are_descriptors_again(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = await heart.agent(allow=["now"])
    adopt, taken, tries = Ownership.adopt, asyncio.Event(), list[str]()

    async def adopted(self: Ownership, record: AgentRecord) -> Thread:
        tries.append(record.id)
        if len(tries) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        found = await adopt(self, record)
        taken.set()
        return found

    monkeypatch.setattr(Ownership, "adopt", adopted)
    took = Takeover(heart.kernel, heart.core.fence)
    took.take_up(thread.record)
    try:
        await asyncio.wait_for(taken.wait(), 30)
    finally:
        await took.close()
    assert tries == [thread.id] * 2


async def test_files_of_one_agent_that_cannot_be_looked_at_hold_nobody_up(heart: Heart) -> None:
    first, second = [await heart.agent(allow=["now"], name=name) for name in ("first", "second")]
    for thread in (first, second):
        logs = heart.kernel.layout.agent(thread.id) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "old.1.log").write_text("old")
        os.utime(logs / "old.1.log", (1, 1))
    (heart.kernel.layout.agent(first.id) / "logs/gone.1.log").symlink_to("nowhere")
    done = await pruning.prune(heart.kernel, "", older_than_ms=0, dry=False, operator="me")
    assert [one["agent"] for one in done["skipped"]] == [first.id]
    assert not (heart.kernel.layout.agent(second.id) / "logs/old.1.log").exists()
