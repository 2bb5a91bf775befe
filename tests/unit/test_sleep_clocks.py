"""A `sleep` on a wall clock that people set while it lasts, and on what is left of it after a restart."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from ringfence.syscalls import sleep

START = 1_800_000_000.0


class World:
    """Clocks in the test's hand: a sleep of the task is time that passes, and at some moment somebody sets the wall clock."""

    CLOCK_BOOTTIME = 7

    def __init__(self, *, set_by: float) -> None:
        self.wall, self.steady, self.set_by = START, 50.0, set_by
        self.progress: bytes | None = None
        self.passed = 0.0

    def time(self) -> float:
        return self.wall

    def time_ns(self) -> int:
        return int(self.wall * 1e9)

    def clock_gettime(self, clock: int) -> float:
        assert clock == self.CLOCK_BOOTTIME
        return self.steady

    async def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds
        self.passed += seconds
        self.wall, self.set_by = self.wall + self.set_by, 0.0

    async def record(self, progress: bytes) -> None:
        self.progress = progress

    @contextlib.asynccontextmanager
    async def waiting(self, *_: object) -> AsyncGenerator[None]:
        yield


async def slept(world: World, monkeypatch: pytest.MonkeyPatch, minutes: float) -> float:
    monkeypatch.setattr(sleep, "time", world)
    monkeypatch.setattr(sleep, "asyncio", SimpleNamespace(sleep=world.sleep))
    before = world.passed
    call: Any = world
    await sleep.run(call, sleep.Arguments(duration_ms=int(minutes * 60_000)))
    return world.passed - before


@pytest.mark.parametrize("set_by", [0.0, 3 * 3600.0, -3 * 3600.0, 400 * 86400.0, -400 * 86400.0])
async def test_it_takes_as_long_whatever_the_wall_clock_is_set_to(
    set_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await slept(World(set_by=set_by), monkeypatch, 10) == pytest.approx(600.0)


async def test_after_a_restart_it_waits_for_what_is_left_and_never_longer_than_it_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(set_by=0.0)
    await slept(world, monkeypatch, 10)
    world.wall = START + 240
    assert await slept(world, monkeypatch, 10) == pytest.approx(360.0)
    # The clock was put back while no kernel ran.
    world.wall = START - 9 * 3600
    assert await slept(world, monkeypatch, 10) == pytest.approx(600.0)
    # What is left is on record by the clock of now: a start in the middle of it waits for that.
    world.wall = START - 9 * 3600 + 240
    assert await slept(world, monkeypatch, 10) == pytest.approx(360.0)
    world.wall = START + 9 * 3600
    assert await slept(world, monkeypatch, 10) == 0.0
