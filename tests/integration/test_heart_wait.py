"""Who waits for an agent learns that it needs a person, whether or not its process lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from ringfence.kernel.operations import agents
from ringfence.syscalls.errors import OutcomeUnknown
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

ALL = ['http.*: "http://pay.test/**"', 'fs.*: "/workspace/**"']


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def test_an_unknown_outcome_ends_the_wait_while_the_process_lives(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    waiting = asyncio.create_task(agents.wait(heart.kernel, thread.id))
    heart.post.idempotent = False
    heart.post.raises.append(OutcomeUnknown("the answer was lost"))
    heart.begin(thread, 0)  # it is answered when a person has settled it
    async with asyncio.timeout(30):
        document = await waiting
    assert (document["state"], document["waiting_for"]) == ("unknown", "the outcome of step 1")
    assert heart.processes.process_state(thread) == "live"


async def test_a_park_that_was_seen_is_waited_for(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    assert (await heart.call(thread, 0, "fs.read")).failure is None
    parks = heart.parker(thread)
    diverged = await heart.call(thread, 0, "http.get")
    waiting = asyncio.create_task(agents.wait(heart.kernel, thread.id))
    await parks(thread, diverged)
    async with asyncio.timeout(30):
        parked = await waiting
    assert parked["state"] == "parked"
    assert parked["waiting_for"] == diverged.park
    again = asyncio.create_task(agents.wait(heart.kernel, thread.id, parked_for=parked["waiting_for"]))
    await thread.announce()
    await heart.start(thread)
    assert not again.done()
    await heart.processes.kill(thread)
    async with asyncio.timeout(30):
        assert (await again)["state"] == "killed"
