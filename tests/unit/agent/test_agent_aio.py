"""The stream for asyncio against a real server: lanes of tasks, breaks, cancellation, closing."""

from __future__ import annotations

import asyncio
import os
import threading

import grpc
import pytest
from ringfence import agent
from ringfence.v1 import syscalls_pb2 as pb


async def test_tasks_have_lanes_and_the_library_takes_none(kernel):
    async with agent.boot_async() as rf:

        async def child(depth: int) -> None:
            await rf.now()
            if depth:
                await asyncio.gather(child(0), asyncio.create_task(child(0)))

        await rf.now()
        await asyncio.gather(child(1), child(0))
        async with asyncio.TaskGroup() as group:
            group.create_task(child(0))
        await rf.now()
    assert sorted(kernel.places()) == [
        ("0", 0), ("0", 1), ("0.0", 0), ("0.0.0", 0), ("0.0.1", 0), ("0.1", 0), ("0.2", 0),
    ]  # fmt: skip


async def test_a_break_takes_no_creation_index(kernel):
    kernel.intercept = lambda connection, call: (
        call.step == 1 and len(kernel.hellos) == 1 and not connection.abort()
    )
    async with agent.boot_async() as rf:
        await asyncio.create_task(rf.now())
        await rf.now()
        await rf.now()
        await asyncio.create_task(rf.now())
    assert kernel.places() == [("0.0", 0), ("0", 0), ("0", 1), ("0", 1), ("0.1", 0)]


async def test_answers_may_come_in_any_order(kernel):
    held: list[pb.Call] = []

    def intercept(connection, call) -> bool:
        held.append(call)
        if len(held) == 4:
            for one in reversed(held):
                connection.send(kernel.answer(one))
        return True

    kernel.intercept = intercept
    kernel.bodies["echo"] = lambda arguments: arguments
    async with agent.boot_async() as rf:
        made = await asyncio.gather(*(rf.call("echo", {"n": n}) for n in range(4)))
    assert [one["n"] for one in made] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, None]
)
async def test_a_broken_stream_is_opened_again_and_nothing_is_done_twice(kernel, code):
    def intercept(connection, call) -> bool:
        if len(kernel.hellos) > 2 or call.lane != "0.3":
            return False
        kernel.answer(call)
        connection.abort(code) if code else connection.end()
        return True

    kernel.intercept = intercept
    async with agent.boot_async() as rf:
        await asyncio.gather(*(rf.now() for _ in range(6)))
        await rf.now()
    assert set(kernel.done.values()) == {1}
    assert len(kernel.done) == 7
    assert len(kernel.hellos) == 3


async def test_a_kernel_that_restarts_is_found_again(kernel):
    restarted = threading.Event()

    def restart() -> None:
        kernel.stop()
        kernel.start()

    def intercept(_connection, call) -> bool:
        if call.step == 1 and not restarted.is_set():
            restarted.set()
            threading.Thread(target=restart).start()
            return True
        return False

    kernel.intercept = intercept
    async with agent.boot_async() as rf:
        await rf.now()
        await rf.now()
    assert kernel.done[("0", 1)] == 1


async def test_without_a_kernel_it_gives_up_in_time(kernel):
    kernel.stop()
    with pytest.raises(agent.KernelGone, match=r"no kernel answered for 0\.2 s"):
        async with agent.boot_async(patience_s=0.2):
            pass


async def test_a_kernel_that_never_welcomes_is_given_up(kernel):
    kernel.silent = True
    with pytest.raises(agent.KernelGone, match="never answered"):
        async with agent.boot_async(patience_s=0.2):
            pass
    assert len(kernel.hellos) == 1


async def test_an_old_token_is_refused_at_once(kernel, monkeypatch):
    monkeypatch.setenv("RINGFENCE_TOKEN", "old")
    with pytest.raises(agent.BadCredential, match="token"):
        async with agent.boot_async():
            pass
    assert len(kernel.hellos) == 1


async def test_a_cancelled_caller_costs_the_others_nothing(kernel):
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()

    def intercept(_connection, call) -> bool:
        if call.action == "sleep":
            loop.call_soon_threadsafe(arrived.set)
            return True
        return False

    kernel.intercept = intercept
    async with agent.boot_async() as rf:
        task = asyncio.create_task(rf.sleep(3600))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await rf.sleep(3600)
        await rf.now()
    assert len(kernel.hellos) == 1
    assert kernel.places() == [("0.0", 0), ("0", 0), ("0", 1)]


async def test_a_cancelled_call_is_not_sent_again_after_a_break(kernel):
    def intercept(connection, call) -> bool:
        if call.action == "sleep":
            return True
        if len(kernel.hellos) == 1:
            connection.abort()
            return True
        return False

    kernel.intercept = intercept
    async with agent.boot_async() as rf:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await rf.sleep(3600)
        await rf.now()
    assert [call.action for call in kernel.calls] == ["sleep", "now", "now"]


async def test_a_stream_task_that_is_cancelled_from_outside_fails_the_calls(kernel):
    kernel.intercept = lambda _connection, call: call.action == "sleep"
    async with agent.boot_async() as rf:
        task = asyncio.create_task(rf.sleep(3600))
        await rf.now()
        for other in asyncio.all_tasks():
            if other.get_name() == "ringfence-stream":
                other.cancel()
        with pytest.raises(agent.KernelGone):
            await task


async def test_a_call_cancelled_before_it_was_written_leaves_the_stream_whole(kernel):
    async with agent.boot_async() as rf:
        tasks = [asyncio.create_task(rf.now()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await rf.now()
    assert len(kernel.hellos) == 1


async def test_large_payloads_go_both_ways(kernel, files):
    kernel.bodies |= files({}, part=16 << 20)
    data = os.urandom(8 << 20)
    async with agent.boot_async() as rf:
        await rf.fs.write_bytes("big", data)
        assert await rf.fs.read_bytes("big") == data


async def test_what_the_kernel_finds_too_large_fails_alone_and_gives_its_step_back(kernel, files):
    kernel.stop()
    kernel.receive_bytes = 2 << 20
    kernel.start()
    kernel.bodies |= files({})
    async with agent.boot_async() as rf:
        with pytest.raises(agent.InvalidRequest, match="send it in parts"):
            await rf.fs.write_bytes("big", bytes(3 << 20))
        await rf.fs.write_bytes("small", b"x")
    assert kernel.places() == [("0", 0)]


async def test_the_end_of_the_block_waits_for_answers_and_then_refuses(kernel):
    async with agent.boot_async() as rf:
        task = asyncio.create_task(rf.now())
        await asyncio.sleep(0)
    assert (await task).year == 2026
    with pytest.raises(agent.KernelGone, match="after the end"):
        await rf.now()


async def test_a_call_from_another_loop_is_refused(kernel):
    async with agent.boot_async() as rf:

        def elsewhere() -> None:
            with pytest.raises(agent.NoLane):
                asyncio.run(rf.now())

        await asyncio.to_thread(elsewhere)
    assert kernel.calls == []


async def test_another_branch_after_a_break_ends_the_process_part(kernel):
    def intercept(connection, _call) -> bool:
        kernel.welcome = pb.Welcome(agent="a1", thread="t1", branch=2)
        connection.abort()
        return True

    kernel.intercept = intercept
    async with agent.boot_async() as rf:
        with pytest.raises(agent.Diverged, match="branch 2"):
            await rf.now()
