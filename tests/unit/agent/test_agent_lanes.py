"""Lanes follow from the order in which tasks are created, whatever the tasks do meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ringfence.agent.errors import InvalidRequest, NoLane
from ringfence.agent.lanes import Lane, TaskLanes, ThreadLanes, check_quiet
from ringfence.agent.threads import Threads

# A task is a list of what it does: None makes a call, a list starts a child; a number yields that often.
Tree = list

trees = st.recursive(
    st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=4),
    lambda children: st.lists(st.one_of(st.none(), st.integers(0, 3), children), max_size=4),
    max_leaves=12,
)


def expected(tree: Tree, lane: str = "0") -> Counter[tuple[str, int]]:
    places: Counter[tuple[str, int]] = Counter()
    step = child = 0
    for act in tree:
        if act is None:
            places[(lane, step)] += 1
            step += 1
        elif isinstance(act, list):
            places += expected(act, f"{lane}.{child}")
            child += 1
    return places


def take(lane: Lane) -> tuple[str, int]:
    place = (lane.id, lane.next_step)
    lane.next_step += 1
    return place


@given(trees)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_threads_meet_the_same_places_in_any_order(tree: Tree):
    lanes = ThreadLanes(Lane())
    threads = Threads(lanes)
    places: list[tuple[str, int]] = []

    def run(acts: Tree) -> None:
        for act in acts:
            if act is None:
                places.append(take(lanes.current()))
            elif isinstance(act, list):
                threads.thread(lambda act=act: run(act))

    run(tree)
    threads.join()
    assert Counter(places) == expected(tree)
    assert lanes.running.first() is None


async def finish(started: list, how: str) -> None:
    if how == "group":
        async with asyncio.TaskGroup() as group:
            for coroutine in started:
                group.create_task(coroutine)
    else:
        await asyncio.gather(*started)


@given(trees, st.sampled_from(["create_task", "gather", "group"]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_asyncio_tasks_meet_the_same_places_in_any_order(tree: Tree, how: str):
    places: list[tuple[str, int]] = []

    async def run(acts: Tree, lanes: TaskLanes) -> None:
        started = []
        for act in acts:
            if act is None:
                places.append(take(lanes.current()))
            elif isinstance(act, int):
                for _ in range(act):
                    await asyncio.sleep(0)
            else:
                started.append(run(act, lanes))
                if how == "create_task":
                    started[-1] = asyncio.create_task(started[-1])
        await finish(started, how)

    async def main() -> None:
        lanes = TaskLanes(Lane())
        lanes.install()
        try:
            await run(tree, lanes)
        finally:
            lanes.uninstall()
        assert lanes.running.first() is None

    asyncio.run(main())
    assert Counter(places) == expected(tree)


async def test_a_task_factory_of_the_program_stays_in_use():
    made = []

    def factory(loop, coroutine, **options):
        task = asyncio.Task(coroutine, loop=loop, **options)
        made.append(task)
        return task

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    lanes = TaskLanes(Lane())
    lanes.install()

    async def child() -> str:
        return lanes.current().id

    assert await asyncio.create_task(child()) == "0.0"
    assert len(made) == 1
    lanes.uninstall()
    assert loop.get_task_factory() is factory
    loop.set_task_factory(None)


async def test_a_task_from_before_has_no_lane():
    gate = asyncio.Event()
    lanes = TaskLanes(Lane())

    async def early() -> None:
        await gate.wait()
        lanes.current()

    task = asyncio.create_task(early())
    await asyncio.sleep(0)
    lanes.install()
    gate.set()
    with pytest.raises(NoLane, match=r"inside the `agent\.boot_async"):
        await task
    lanes.uninstall()


def test_a_foreign_thread_has_no_lane_and_is_told_how_to_get_one():
    lanes = ThreadLanes(Lane())
    caught: list[NoLane] = []

    def call() -> None:
        try:
            lanes.current()
        except NoLane as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "rf.thread" in str(caught[0])


def test_children_continue_after_those_of_the_checkpoint():
    lane = Lane(next_step=5, next_child=3)
    assert [lane.child().id, lane.child().id] == ["0.3", "0.4"]
    assert lane.next_child == 5


def test_a_checkpoint_needs_the_main_lane_and_no_other():
    lanes = ThreadLanes(Lane())
    child = lanes.root.child()
    with pytest.raises(InvalidRequest, match=r"lane `0\.0` can't save"):
        check_quiet(child, lanes.running)
    lanes.running.add(child)
    with pytest.raises(InvalidRequest, match="still running"):
        check_quiet(lanes.root, lanes.running)
    lanes.running.remove(child)
    check_quiet(lanes.root, lanes.running)
