"""Replies of lanes come in their recorded order, whatever the order in which they are asked for; and nobody waits for ever."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel import releases
from ringfence.kernel.places import NEWEST
from ringfence.kernel.releases import Line, Releases


def drained(line: Line[int]) -> list[int]:
    found: list[int] = []
    while (item := line.next()) is not None:
        found.append(item)
    return found


@given(st.sets(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_the_recorded_order_whatever_is_asked_first(positions: set[int], data: st.DataObject) -> None:
    line: Line[int] = Line(sorted(positions))
    asked = data.draw(st.permutations(sorted(positions)))
    new = data.draw(st.lists(st.integers(2000, 3000), unique=True, max_size=5))
    came: list[int] = []
    for item in (*asked[:3], *new, *asked[3:]):
        if not line.join(item if item < 2000 else 0, item):
            came.append(item)
        came += drained(line)
    assert came == [*sorted(positions), *new]
    assert line.over
    assert not len(line)
    assert not line.join(NEWEST, 1)


@given(st.sets(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_what_is_never_asked_for_is_passed_over_and_nobody_is_lost(
    positions: set[int], data: st.DataObject
) -> None:
    line: Line[int] = Line(sorted(positions))
    asked = data.draw(st.lists(st.sampled_from(sorted(positions)), unique=True))
    came: list[int] = []
    for item in asked:
        if not line.join(item, item):
            came.append(item)  # its turn was over
        came += drained(line)
        if data.draw(st.integers(0, 9)) == 0:
            line.pass_over()
            came += drained(line)
    data.draw(st.sampled_from([line.pass_over, line.give_up]))()
    while len(line):
        came += drained(line)
        line.pass_over()
    assert sorted(came) == sorted(asked)


def test_the_same_place_asked_twice_gets_both_answers() -> None:
    line: Line[str] = Line([1, 2])
    assert line.join(2, "two")
    assert line.join(2, "two again")
    assert line.next() is None
    assert line.join(1, "one")
    assert [line.next(), line.next(), line.next()] == ["one", "two again", "two"]
    assert not line.join(1, "one again")


# -- with clocks ----------------------------------------------------------------------------------------------------


def program(live: int = 0) -> Any:
    return SimpleNamespace(id="a-1", live_lanes=live, frozen=False, flights={}, releases=None)


async def turn(order: Releases, lane: str, position: int) -> None:
    given = asyncio.Event()
    order.turn(lane, position, given.set)
    await given.wait()


def begun(thread: Any, positions: list[int]) -> Releases:
    thread.releases = Releases(thread, positions)
    return thread.releases


async def test_a_reply_waits_for_those_before_it_and_the_order_ends_with_the_record() -> None:
    thread = program(live=3)
    order = begun(thread, [10, 20])
    came: list[str] = []

    async def asks(lane: str, position: int) -> None:
        order.asked(lane)
        await turn(order, lane, position)
        came.append(lane)

    async with asyncio.TaskGroup() as group:
        for lane, position in (("0.2", 0), ("0.1", 20)):
            group.create_task(asks(lane, position))
        for _ in range(3):
            await asyncio.sleep(0)
        assert came == []
        group.create_task(asks("0.0", 10))
    assert came == ["0.0", "0.1", "0.2"]
    assert thread.releases is None


async def test_where_every_lane_waits_what_nobody_asked_for_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "STUCK_S", 0.001)
    thread = program(live=1)
    order = begun(thread, [10, 20, 30])
    async with asyncio.timeout(20):
        order.asked("0")
        await turn(order, "0", 20)
        # The order goes on behind it.
        thread.live_lanes = 2
        later = asyncio.create_task(turn(order, "0.1", 0))
        order.asked("0")
        await turn(order, "0", 30)
        await later
    assert thread.releases is None


@pytest.mark.parametrize("live", [0, 2])
async def test_where_nothing_comes_for_long_the_order_is_given_up(
    monkeypatch: pytest.MonkeyPatch, live: int
) -> None:
    for name in ("STUCK_S", "HOLD_S", "SILENT_S"):
        monkeypatch.setattr(releases, name, 0.001)
    thread = program(live=live)
    order = begun(thread, [10, 20])
    async with asyncio.timeout(20):
        await turn(order, "0", 20)
    assert thread.releases is None


async def test_a_frozen_program_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STUCK_S", "HOLD_S", "SILENT_S"):
        monkeypatch.setattr(releases, name, 0.001)
    thread = program()
    thread.frozen = True
    order = begun(thread, [10, 20])
    waiting = asyncio.create_task(turn(order, "0.1", 20))
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.02  # twenty times what would have it given up
    async with asyncio.timeout(20):
        while loop.time() < until:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        await turn(order, "0.0", 10)
        await waiting


async def test_a_start_that_is_over_holds_nobody() -> None:
    thread = program()
    order = begun(thread, [10, 20])
    waiting = asyncio.create_task(turn(order, "0.1", 20))
    await asyncio.sleep(0)
    order.close()
    async with asyncio.timeout(20):
        await waiting


async def test_a_thread_makes_something_of_its_reply_before_another_gets_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "SETTLE_S", 60.0)
    thread = program(live=2)
    order = begun(thread, [10, 20, 30])
    second = asyncio.create_task(turn(order, "0.1", 20))
    await asyncio.sleep(0)
    await turn(order, "0.0", 10)
    await asyncio.sleep(0)
    assert not second.done()
    order.asked("0.0")  # it is back
    async with asyncio.timeout(20):
        await second
    third = asyncio.create_task(turn(order, "0.0", 30))
    await asyncio.sleep(0)
    order.lanes_changed()  # the other one has ended
    async with asyncio.timeout(20):
        await third
