"""Calls that go straight to their commit, and what turns them back to the long way."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.journal.types import Entry, OwnerMoved, Unavailable
from ringfence.kernel.outcomes import Request
from ringfence.kernel.revocation import cancel
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.syscalls import fs_read
from ringfence.syscalls.errors import (
    Conflict,
    Denied,
    Internal,
    JournalUnavailable,
    Killed,
    NoSuchResource,
    Revoked,
)
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

ALL = ['fs.*: "/workspace/**"', 'state.*: "**"']


class Asked:
    """A call that a test starts as the door does."""

    def __init__(self, heart: Heart, thread: Thread, lane_step: int, action: str, **arguments: Any) -> None:
        self.answers: list[Answer] = []
        self.arrived = asyncio.Event()
        raw = json.dumps(arguments).encode()
        request = Request(lane="0", lane_step=lane_step, action=action, raw=raw)
        self.straight = heart.dispatcher.begin(thread, request, self._reply)

    def _reply(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.arrived.set()

    async def answer(self) -> Answer:
        async with asyncio.timeout(30):
            await self.arrived.wait()
        assert len(self.answers) == 1
        return self.answers[0]


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            table: Any = heart.core.table
            table["fs.read"] = dataclasses.replace(table["fs.read"], body=fs_read)
            heart.dispatcher = Dispatcher(heart.core)
            yield heart


@pytest.fixture
async def thread(heart: Heart) -> Thread:
    thread = await heart.agent(allow=ALL)
    for name, size in (("small", 5), ("large", 5000)):
        thread.environment.workspace.write(f"/workspace/{name}", b"x" * size)
    return thread


async def test_reads_and_changes_go_straight_and_move_their_lane_when_they_are_committed(
    heart: Heart, thread: Thread
) -> None:
    read = Asked(heart, thread, 0, "fs.read", path="small")
    assert read.straight
    assert not read.answers
    assert not Asked(heart, thread, 0, "fs.read", path="small").straight, "its place is taken"
    assert not Asked(heart, thread, 1, "fs.read", path="small").straight, "the one before is not committed"
    answer = await read.answer()
    assert json.loads(answer.result or b"")["size_bytes"] == 5
    put = Asked(heart, thread, 1, "state.put", key="k", value=7)
    assert put.straight
    assert json.loads((await put.answer()).result or b"") == {"version": 1}
    assert await heart.outcomes(thread) == [(1, "ok"), (2, "ok")]
    assert thread.budgets.spent["calls"] == 2
    assert not thread.flights
    assert not thread.by_lane


async def test_a_read_keeps_no_descriptor(heart: Heart, thread: Thread) -> None:
    def kept() -> list[str]:
        return [str(fd) for fd in Path("/proc/self/fd").iterdir() if "/live/" in os.path.realpath(fd)]

    for step, path in enumerate(["small", "large", "none", ".", "small"]):
        await heart.call(thread, step, "fs.read", path=path)
    denied = await heart.agent(allow=['state.*: "**"'])
    denied.environment.workspace.write("/workspace/small", b"secret")
    assert isinstance((await heart.call(denied, 0, "fs.read", path="small")).failure, Denied)
    assert not kept()


async def test_what_is_large_or_not_there_goes_the_long_way(heart: Heart, thread: Thread) -> None:
    answer = await Asked(heart, thread, 0, "fs.read", path="large").answer()
    assert json.loads(answer.result or b"")["size_bytes"] == 5000
    assert isinstance(
        (await Asked(heart, thread, 1, "fs.read", path="none").answer()).failure, NoSuchResource
    )
    assert await heart.outcomes(thread) == [(1, "ok"), (2, "error")]
    assert thread.next_of("0") == 2


async def test_a_link_is_decided_by_what_it_names(heart: Heart) -> None:
    thread = await heart.agent(allow=['fs.read: "/workspace/out/**"'])
    workspace = thread.environment.workspace
    workspace.write("/workspace/secret", b"secret")
    workspace.write("/workspace/out/there", b"open")
    (workspace.root / "out" / "link").symlink_to("../secret")
    (workspace.root / "link").symlink_to("out/there")
    refused = await heart.call(thread, 0, "fs.read", path="out/link")
    assert isinstance(refused.failure, Denied)
    assert "/workspace/secret" in (await heart.core.store.steps(thread.key))[-1].resource
    assert b"b3Blbg==" in ((await heart.call(thread, 1, "fs.read", path="link")).result or b"")


@pytest.mark.parametrize(
    ("action", "arguments"), [("fs.read", {"path": "small"}), ("state.put", {"key": "k"})]
)
async def test_a_right_that_goes_while_it_queues_is_not_used(
    heart: Heart, thread: Thread, action: str, arguments: dict[str, Any]
) -> None:
    revoked = asyncio.create_task(heart.core.store.revoke(thread.key, None))
    asked: list[Asked] = []
    hand_in = heart.core.journal.hand_in

    def held(entry: Entry, waiter: Any) -> None:
        # Handed in only when the database has the new epoch, and this kernel does not know it yet.
        revoked.add_done_callback(lambda _: hand_in(entry, waiter))

    heart.core.journal.hand_in = held  # type: ignore[method-assign]
    asked.append(Asked(heart, thread, 0, action, **arguments))
    assert asked[0].straight
    heart.core.journal.hand_in = hand_in  # type: ignore[method-assign]
    assert isinstance((await asked[0].answer()).failure, (Revoked, Denied))
    assert await heart.outcomes(thread) == [(1, "denied")]
    assert await heart.core.store.state_get("k") is None
    assert thread.budgets.spent["calls"] == 0


async def test_a_call_that_is_ended_while_it_queues_is_not_run_again(heart: Heart, thread: Thread) -> None:
    waiters: list[Any] = []
    hand_in = heart.core.journal.hand_in
    heart.core.journal.hand_in = lambda _entry, waiter: waiters.append(waiter)  # type: ignore[method-assign]
    asked = Asked(heart, thread, 0, "fs.read", path="small")
    heart.core.journal.hand_in = hand_in  # type: ignore[method-assign]
    ended = asyncio.create_task(cancel(thread.flights[1], Killed("the agent is ended")))
    await asyncio.sleep(0)
    waiters[0].set_exception(OwnerMoved("not now"))
    assert isinstance((await asked.answer()).failure, Killed)
    assert await ended == "cancelled"


async def test_without_a_database_it_may_be_made_again(heart: Heart, thread: Thread) -> None:
    hand_in = heart.core.journal.hand_in
    away = Unavailable("away")
    heart.core.journal.hand_in = lambda _entry, waiter: waiter.set_exception(away)  # type: ignore[method-assign]
    answer = await Asked(heart, thread, 0, "fs.read", path="small").answer()
    assert answer.step == 0
    assert isinstance(answer.failure, JournalUnavailable)
    assert thread.budgets.spent["calls"] == 0
    heart.core.journal.hand_in = hand_in  # type: ignore[method-assign]
    assert (await Asked(heart, thread, 0, "fs.read", path="small").answer()).failure is None


async def test_a_conflict_is_answered_and_a_bug_is_named(heart: Heart, thread: Thread) -> None:
    assert (await Asked(heart, thread, 0, "state.put", key="k", value=1).answer()).failure is None
    late = Asked(heart, thread, 1, "state.put", key="k", value=2, if_version=0)
    assert isinstance((await late.answer()).failure, Conflict)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    async def run(*_: Any) -> Any:
        raise ZeroDivisionError

    table: Any = heart.core.table
    body = SimpleNamespace(plan=fs_read.plan, plan_at_once=fs_read.plan_at_once, run_at_once=broken, run=run)
    table["fs.read"] = dataclasses.replace(table["fs.read"], body=body)
    heart.dispatcher = Dispatcher(heart.core)
    assert isinstance((await Asked(heart, thread, 2, "fs.read", path="small").answer()).failure, Internal)
    assert await heart.outcomes(thread) == [(1, "ok"), (2, "error"), (3, "error")]
