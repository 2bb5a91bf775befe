"""What was read of an agent while it waited counts only where nothing was recorded of it since."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ringfence.kernel import lookahead
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.lookahead import Lookahead
from ringfence.kernel.thread import Thread


class World:
    def __init__(self) -> None:
        self.heads: dict[int, tuple[int, bytes]] = {}
        self.threads: dict[int, Any] = {}
        self.reads: list[int] = []
        core = SimpleNamespace(
            journal=SimpleNamespace(head=self.heads.__getitem__), threads=self.threads, stopping=False
        )
        self.ahead = Lookahead(cast("Core", core), self.load)
        self.fails = False

    async def load(self, thread: Thread) -> None:
        self.reads.append(thread.key)
        thread.loaded = not self.fails
        if self.fails:
            raise Unavailable("away")

    def thread(self, key: int = 1, **more: Any) -> Any:
        self.heads[key] = (7, b"h")
        facts = {
            "key": key, "id": f"a{key}", "branch": 0, "state": "pending", "program": None, "generation": 3, "loaded": True,
            "operation": asyncio.Lock(), "settling": asyncio.Lock(), "unsettled": set[Any](),
        }  # fmt: skip
        self.threads[key] = SimpleNamespace(**facts | more)
        return self.threads[key]


async def test_it_counts_once() -> None:
    world = World()
    thread = world.thread()
    assert not world.ahead.take(thread)
    await world.ahead.read(thread)
    assert world.ahead.take(thread)
    assert not world.ahead.take(thread)
    assert world.reads == [1]


@pytest.mark.parametrize("since", ["recorded", "branch", "unloaded", "taken"])
async def test_what_was_recorded_since_is_read_again(since: str) -> None:
    world = World()
    thread = world.thread()
    await world.ahead.read(thread)
    match since:
        case "recorded":
            world.heads[1] = (8, b"i")
        case "branch":
            thread.branch = 1
        case "unloaded":
            thread.loaded = False
        case _:
            del world.heads[1]
    assert not world.ahead.take(thread)


async def test_what_comes_while_it_is_read_is_not_passed_over() -> None:
    world = World()
    thread = world.thread()
    real = world.load

    async def slowly(thread: Thread) -> None:
        await real(thread)
        world.heads[thread.key] = (8, b"i")

    ahead = Lookahead(cast("Core", SimpleNamespace(
        journal=SimpleNamespace(head=world.heads.__getitem__), threads=world.threads, stopping=False)), slowly)  # fmt: skip
    await ahead.read(thread)
    assert not ahead.take(thread)


@pytest.mark.parametrize(
    "more", [{"state": "running"}, {"state": "killed"}, {"program": object()}, {"generation": 0}]
)
async def test_who_does_not_wait_is_not_read(more: dict[str, Any]) -> None:
    world = World()
    await world.ahead.read(world.thread(**more))
    assert world.reads == []


async def test_what_cannot_be_read_is_left_to_the_start() -> None:
    world = World()
    world.fails = True
    thread = world.thread()
    await world.ahead.read(thread)
    assert not world.ahead.take(thread)


async def test_those_who_gave_up_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "AGENTS", 2)
    world = World()
    for key in (1, 2, 3):
        await world.ahead.read(world.thread(key))
    assert world.reads == [1, 2]
    world.threads[1].state = "killed"
    await world.ahead.read(world.threads[3])
    assert world.reads == [1, 2, 3]
    assert world.ahead.take(world.threads[2])
    assert world.ahead.take(world.threads[3])
