"""A sandbox that dies while it is made counts as an end of the program: the restart policy says what comes next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from ringfence.kernel.operations.agents import list_agents, show
from ringfence.kernel.retries import ordinal
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


async def test_it_says_until_when_which_time_and_what_it_failed_of(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.kernel.processes.BACKOFF_S", 900.0)
    monkeypatch.setattr("ringfence.kernel.processes.BACKOFF_S_MAX", 3600.0)
    monkeypatch.setattr(Hand, "walls", lambda _hand: [], raising=False)
    thread = await heart.agent(allow=[], more="restart: {policy: on-failure, max: 5}")
    thread.restarts = 2
    program = await heart.start(thread)
    before = datetime.now(UTC)
    program.end(ExitReason.EXIT, 3)
    await until_state(thread, "pending")
    (row,) = (await list_agents(heart.kernel, everything=False))["agents"]
    retry = row["restart"]
    at = datetime.fromisoformat(retry["at"])
    # The third waits for four times as long as the first.
    assert before + timedelta(hours=1) <= at <= datetime.now(UTC) + timedelta(hours=1)
    assert (retry["number"], retry["max"], retry["error"]) == (3, 5, "exit status 3")
    wanted = f"a restart until {at:%Y-%m-%dT%H:%M:%SZ} (3rd of 5; last error: exit status 3)"
    assert (row["state"], row["waiting_for"]) == ("pending", wanted)
    shown = await show(heart.kernel, thread.id)
    assert (shown["waiting_for"], shown["restart"], shown["error"]) == (wanted, retry, "exit status 3")
    record = await heart.core.store.agent_by_key(thread.key)
    assert record is not None
    assert record.waiting_for == wanted
    # Whoever does something else with it ends the wait.
    await heart.processes.kill(thread)
    (row,) = (await list_agents(heart.kernel, everything=True))["agents"]
    assert (row["state"], row["restart"], row["waiting_for"]) == ("killed", None, None)


async def test_after_the_last_one_it_says_when_it_ended_and_what_of(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hand, "walls", lambda _hand: [], raising=False)
    thread = await heart.agent(allow=[], more="restart: {policy: on-failure, max: 1}", started=True)
    heart.hand.programs[-1].end(ExitReason.EXIT, 1)
    async with asyncio.timeout(30), thread.changed:
        await thread.changed.wait_for(lambda: (thread.state, thread.restarts) == ("running", 1))
    heart.hand.programs[-1].end(ExitReason.MEMORY, -9)
    await until_state(thread, "failed")
    shown = await show(heart.kernel, thread.id)
    assert shown["error"].endswith("; it was restarted 1 times")
    assert shown["error"].startswith("out of memory")
    assert datetime.fromisoformat(shown["ended_at"]) <= datetime.now(UTC)
    assert shown["restart"] is None


def test_ordinals() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 101, 111, 1000)
    said = "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd 101st 111th 1000th"
    assert [ordinal(number) for number in numbers] == said.split()
