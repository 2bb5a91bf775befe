"""A sandbox that dies while it is made counts as an end of the program: the restart policy says what comes next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from ringfence.kernel.thread import Thread
from ringfence.sandbox.types import ExitReason, ProgramSpec, SandboxError, SandboxLostError
from support.heart import Hand, HandProgram, Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres


@pytest.fixture
async def heart(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Heart]:
    monkeypatch.setattr("ringfence.kernel.processes.BACKOFF_S", 0.001)
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


def lose(heart: Heart, monkeypatch: pytest.MonkeyPatch, times: int) -> list[ProgramSpec]:
    """The next sandboxes die while they are made, as when their launcher is killed."""
    lost: list[ProgramSpec] = []
    make = Hand.start

    async def start(hand: Hand, spec: ProgramSpec) -> HandProgram:
        if len(lost) < times:
            lost.append(spec)
            raise SandboxLostError(
                "the launcher failed before the program ran: it was killed; start it again"
            )
        return await make(hand, spec)

    monkeypatch.setattr(Hand, "start", start)
    return lost


async def until_state(thread: Thread, state: str) -> None:
    async with asyncio.timeout(30), thread.changed:
        await thread.changed.wait_for(lambda: thread.state == state)


@pytest.mark.parametrize("first", [True, False])
async def test_a_launcher_that_is_killed_is_followed_by_another(
    heart: Heart, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    thread = await heart.agent(allow=[], more="restart: {policy: on-failure, max: 5}", started=not first)
    lost = lose(heart, monkeypatch, 2)
    if first:
        async with thread.operation:
            await heart.processes.start(thread)
        assert thread.state == "pending"
    else:
        heart.hand.programs[-1].end(ExitReason.EXIT, 1)
        await until_state(thread, "pending")
    await until_state(thread, "running")
    assert (len(lost), thread.restarts) == (2, 2 if first else 3)
    record = await heart.core.store.agent_by_key(thread.key)
    assert record is not None
    assert (record.state, record.restarts) == ("running", thread.restarts)


async def test_it_fails_in_the_end(heart: Heart, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = await heart.agent(allow=[], more="restart: {policy: on-failure, max: 2}", started=True)
    lost = lose(heart, monkeypatch, 100)
    heart.hand.programs[-1].end(ExitReason.EXIT, 1)
    await until_state(thread, "failed")
    assert (len(lost), thread.restarts) == (2, 2)
    assert "the launcher failed" in thread.error


async def test_a_policy_of_never_is_kept(heart: Heart, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = await heart.agent(allow=[], more="restart: {policy: never}")
    lose(heart, monkeypatch, 1)
    with pytest.raises(SandboxError, match="the launcher failed"):
        await heart.start(thread)
    assert thread.state == "failed"
