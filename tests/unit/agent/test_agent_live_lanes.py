"""The kernel is told how many lanes go on: it ends a process only where every one of them waits."""

from __future__ import annotations

import asyncio
import threading

from ringfence import agent


def held(kernel, action="hold"):
    """Calls of `action` get no answer until the test lets them go."""
    calls, arrived = [], threading.Semaphore(0)

    def intercept(connection, call):
        if call.action != action:
            return False
        calls.append((connection, call))
        arrived.release()
        return True

    def release():
        while calls:
            connection, call = calls.pop(0)
            connection.send(kernel.answer(call))

    kernel.intercept = intercept
    kernel.bodies[action] = lambda arguments: arguments
    return arrived, release


def test_a_program_without_threads_has_one_lane(kernel):
    with agent.boot() as rf:
        rf.now()
    assert [call.lanes for call in kernel.calls] == [1]
    assert kernel.lanes == []


def test_who_joins_others_does_not_count_and_ended_lanes_are_gone(kernel):
    arrived, release = held(kernel)
    entered, go = threading.Event(), threading.Event()
    with agent.boot() as rf:
        works = rf.thread(lambda: (entered.set(), go.wait()))
        assert entered.wait(30)
        waits = rf.thread(lambda: rf.call("hold"))
        assert arrived.acquire(timeout=30)
        assert kernel.calls[0].lanes == 3
        joiner = rf.thread(works.join)
        del joiner
        kernel.wait_for_lanes(3)  # four, of which one waits for another
        go.set()
        works.join()
        kernel.wait_for_lanes(2)  # the one that calls, and this one
        ending = threading.Timer(0.0, lambda: (kernel.wait_for_lanes(1), release()))
        ending.start()
        waits.join()  # this one waits for it now
        ending.join()


def test_parallel_counts_those_that_run(kernel):
    arrived, release = held(kernel)
    with agent.boot() as rf:

        def look():
            for _ in range(2):
                assert arrived.acquire(timeout=30)
            kernel.wait_for_lanes(2)
            # Answered one after the other: the last to run are fewer than the limit.
            release()
            assert arrived.acquire(timeout=30)
            kernel.wait_for_lanes(1)
            release()

        watcher = threading.Thread(target=look)
        watcher.start()
        rf.parallel([lambda n=n: rf.call("hold", {"n": n}) for n in range(3)], limit=2)
        watcher.join()


async def test_tasks_that_wait_inside_the_program_do_not_count(kernel):
    arrived, release = held(kernel)

    async def call(rf):
        await rf.call("hold")

    async with agent.boot_async() as rf, asyncio.TaskGroup() as group:
        group.create_task(call(rf))
        group.create_task(call(rf))
        for _ in range(2):
            assert await asyncio.to_thread(arrived.acquire, timeout=30)
        await asyncio.to_thread(kernel.wait_for_lanes, 2)
        release()
    assert [call.lanes for call in kernel.calls] == [0, 0]


async def test_a_task_that_ended_is_gone_without_a_further_call(kernel):
    arrived, release = held(kernel)

    async def short(rf):
        await rf.now()

    async with agent.boot_async() as rf:
        task = asyncio.create_task(rf.call("hold"))
        assert await asyncio.to_thread(arrived.acquire, timeout=30)
        await short(rf)
        await asyncio.to_thread(kernel.wait_for_lanes, 1)
        release()
        await task
