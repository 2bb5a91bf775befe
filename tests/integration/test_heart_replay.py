"""Calls of an earlier start, waits for an operator and reads of the past that overlap: every effect once, every answer found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from ringfence.kernel.freezing import pause, resume
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.operations import history
from ringfence.kernel.problems import Problem
from ringfence.sandbox.types import ExitReason
from ringfence.syscalls.errors import CallFailed, Diverged, OutcomeUnknown
from ringfence.v1 import syscalls_pb2 as pb
from support.heart import URL, Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

ALL = ['http.*: "http://pay.test/**"', 'fs.*: "/workspace/**"']
UNSURE = OutcomeUnknown("it may have arrived")


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


async def ended(heart: Heart, reason: ExitReason = ExitReason.SIGNAL, code: int = -9) -> None:
    heart.hand.programs[-1].end(reason, code)


# -- an earlier start's calls -------------------------------------------------------------------------------------------


async def test_a_call_of_an_earlier_start_answers_the_next_program_once(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    heart.post.stop("after")
    first = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    await heart.processes.kill(thread)
    await heart.start(thread)
    second = heart.begin(thread, 0)
    heart.post.go("after")
    assert (await first).result == (await second).result
    assert len(heart.post.effects) == 1
    assert (await heart.call(thread, 1, "fs.read")).failure is None
    assert [outcome for _, outcome in await heart.outcomes(thread)] == ["ok", "ok"]


async def test_a_call_of_an_earlier_start_that_ends_first_is_found(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    heart.post.stop("after")
    first = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    await heart.processes.kill(thread)
    await heart.start(thread)
    heart.post.go("after")
    answer = await first
    again = await heart.call(thread, 0)
    assert (again.step, again.result, again.replayed) == (answer.step, answer.result, True)
    assert len(heart.post.effects) == 1


async def test_a_call_that_ends_while_the_past_is_read_is_found(heart: Heart) -> None:
    """Its row may come after the page that was read, and before the program's generation is the new one."""
    thread = await heart.agent(allow=ALL, started=True)
    heart.post.stop("after")
    first = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    await heart.processes.kill(thread)
    store, purged = heart.core.store, heart.core.store.purged_grants

    async def at_the_end(key: Any) -> list[str]:
        # The outcomes are read by now.
        heart.post.go("after")
        await first
        return await purged(key)

    store.purged_grants = at_the_end  # type: ignore[method-assign] - the place where the interleaving happens
    await heart.start(thread)
    store.purged_grants = purged  # type: ignore[method-assign]
    again = await heart.call(thread, 0)
    assert (again.step, again.replayed) == ((await first).step, True)
    assert len(heart.post.effects) == 1
    # And its effect is known as used up: the same call elsewhere is another occurrence.
    await heart.call(thread, 1)
    assert len({effect for _, effect in heart.post.effects}) == 2


async def test_a_late_call_of_an_earlier_start_moves_no_lane(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    assert (await heart.call(thread, 0, "fs.read")).failure is None
    heart.post.stop("after")
    late = heart.begin(thread, 1)
    await heart.post.reached["after"].wait()
    await heart.processes.kill(thread)
    await heart.start(thread)
    heart.post.go("after")
    await late
    assert "0" not in thread.lanes
    assert (await heart.call(thread, 0, "fs.read")).replayed
    assert (await heart.call(thread, 1)).replayed
    assert thread.lanes == {"0": 2}


async def test_a_program_that_asks_for_something_else_than_what_runs_there_has_diverged(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    heart.post.stop("after")
    first = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    await heart.processes.kill(thread)
    await heart.start(thread)
    for other in (
        heart.begin(thread, 0, url=f"{URL}/other"),
        heart.begin(thread, 0, "http.get"),
        heart.begin(thread, 0, url=7),
    ):
        answer = await other
        assert isinstance(answer.failure, Diverged), answer
        assert answer.park
    heart.post.go("after")
    assert (await first).failure is None
    assert len(heart.post.effects) == 1


async def test_an_end_that_is_judged_late_leaves_the_next_program_alone(heart: Heart) -> None:
    """A program's end waits for its calls; an operator may have started the agent again by then."""
    thread = await heart.agent(allow=ALL, started=True)
    heart.post.stop("after")
    call = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    await ended(heart)
    await until(lambda: thread.program is None)
    await heart.start(thread)
    heart.post.go("after")
    await call
    exits = heart.core.store
    await until(lambda: not thread.flights)
    async with asyncio.timeout(30):
        while not [r async for r in exits.audit(thread.key, None) if r.action == "agent.exit"]:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert thread.state == "running"
    assert thread.restarts == 0


async def test_a_frozen_program_that_is_killed_from_outside_stays_paused(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, more="restart: {policy: on-failure, max: 3}", started=True)
    await pause(heart.processes, thread)
    await ended(heart)
    await until(lambda: thread.program is None)
    store = heart.core.store
    async with asyncio.timeout(30):
        while not [r async for r in store.audit(thread.key, None) if r.action == "agent.exit"]:
            await asyncio.sleep(0.01)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (thread.state, len(heart.hand.programs)) == ("paused", 1)
    await resume(heart.processes, thread)
    assert (thread.state, len(heart.hand.programs)) == ("running", 2)


# -- unknown outcomes ---------------------------------------------------------------------------------------------------


async def unknown_call(heart: Heart, thread: Any, lane_step: int = 0, lane: str = "0") -> asyncio.Task[Any]:
    heart.post.raises.append(UNSURE)
    call = heart.begin(thread, lane_step, lane=lane)
    await until(lambda: thread.replay.find(lane, lane_step) is not None)
    await until(lambda: thread.state == "unknown")
    return call


async def resolve(heart: Heart, thread: Any, step: int, outcome: str) -> dict[str, Any]:
    return await history.resolve(heart.kernel, thread.id, step, outcome, "", "tester")


async def test_a_call_that_was_not_done_is_made_again_by_the_next_program_alone(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, more="restart: {policy: never}", started=True)
    old = await unknown_call(heart, thread)
    await ended(heart)
    await until(lambda: thread.program is None)
    await resolve(heart, thread, 1, "not-done")
    assert (await old).step == 0  # nobody waits for it any more
    assert len(heart.post.effects) == 1
    answer = await heart.call(thread, 0)
    assert answer.failure is None
    assert len(heart.post.effects) == 2
    assert len({effect for _, effect in heart.post.effects}) == 1
    assert (await heart.call(thread, 1)).failure is None
    assert len({effect for _, effect in heart.post.effects}) == 2


@pytest.mark.parametrize("outcome", ["done", "not-done"])
async def test_two_connections_that_wait_for_one_outcome_get_the_same(heart: Heart, outcome: str) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    first = await unknown_call(heart, thread)
    second = heart.begin(thread, 0)
    await asyncio.sleep(0)
    await resolve(heart, thread, 1, outcome)
    answers = [await first, await second]
    assert [answer.failure for answer in answers] == [None, None]
    assert answers[0].result == answers[1].result
    assert len(heart.post.effects) == (1 if outcome == "done" else 2)
    assert thread.state == "running"


async def test_who_joined_a_call_waits_for_its_resolution_too(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    heart.post.stop("after")
    heart.post.raises.append(UNSURE)
    first = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    second = heart.begin(thread, 0)
    heart.post.go("after")
    await until(lambda: thread.state == "unknown")
    await asyncio.sleep(0.05)
    assert not first.done()
    assert not second.done()
    await resolve(heart, thread, 1, "done")
    assert (await first).result == (await second).result


async def test_two_operators_settle_one_outcome_once(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    call = await unknown_call(heart, thread)
    first = asyncio.create_task(resolve(heart, thread, 1, "done"))
    await until(thread.operation.locked)
    said = await asyncio.gather(first, resolve(heart, thread, 1, "not-done"), return_exceptions=True)
    assert [isinstance(answer, Problem) for answer in said] == [False, True]
    assert "settled already" in str(said[1])
    assert (await call).failure is None
    assert (await heart.outcomes(thread)) == [(1, "unknown"), (1, "ok")]
    with pytest.raises(Problem, match="settled already"):
        await resolve(heart, thread, 1, "done")
    with pytest.raises(Problem, match="no step 9 that waits"):
        await resolve(heart, thread, 9, "done")


async def test_of_two_unknown_outcomes_each_goes_on_when_it_is_settled(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    first = await unknown_call(heart, thread, lane="0.0")
    second = await unknown_call(heart, thread, lane="0.1")
    assert (await resolve(heart, thread, 1, "done"))["state"] == "unknown"
    assert (await first).failure is None
    assert thread.waiting_for == "the outcome of step 2"
    assert not second.done()
    assert (await resolve(heart, thread, 2, "done"))["state"] == "running"
    assert (await second).failure is None


async def test_a_paused_agent_stays_paused_when_its_outcome_is_settled(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    call = await unknown_call(heart, thread)
    await pause(heart.processes, thread)
    assert (await resolve(heart, thread, 1, "done"))["state"] == "paused"
    assert (await call).failure is None
    await resume(heart.processes, thread)
    assert thread.state == "running"


async def test_a_thawed_agent_shows_what_it_still_waits_for(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    await unknown_call(heart, thread)
    await pause(heart.processes, thread)
    await resume(heart.processes, thread)
    assert (thread.state, thread.waiting_for) == ("unknown", "the outcome of step 1")


async def test_a_killed_agent_that_is_started_again_shows_what_it_waits_for(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    await unknown_call(heart, thread)
    await heart.processes.kill(thread)
    assert thread.state == "killed"
    await heart.start(thread)
    assert thread.state == "running"
    call = heart.begin(thread, 0)
    await until(lambda: thread.state == "unknown")
    await resolve(heart, thread, 1, "done")
    assert (await call).failure is None


# -- callers without lanes ----------------------------------------------------------------------------------------------


async def unary(heart: Heart, thread: Any) -> Any:
    """One call as `rf-call` makes it."""
    path = heart.kernel.layout.socket_dir(thread.key) / "syscall.sock"
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call: Any = channel.unary_unary(
            "/ringfence.v1.SyscallService/HttpPost",
            request_serializer=pb.HttpPostRequest.SerializeToString,
            response_deserializer=pb.HttpPostResponse.FromString,
        )
        metadata = (("authorization", f"Bearer {heart.hand.tokens[-1]}"),)
        return await call(pb.HttpPostRequest(url=URL), metadata=metadata)


async def test_callers_without_lanes_that_ask_the_same_at_once_are_all_served(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    answers = await asyncio.gather(*(unary(heart, thread) for _ in range(4)))
    assert [answer.status for answer in answers] == [200] * 4
    assert len({effect for _, effect in heart.post.effects}) == 4


async def test_a_caller_without_lane_that_was_not_recorded_may_ask_again(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    append, journal = heart.core.journal.append, heart.core.journal

    def away(_: Any) -> Any:
        raise Unavailable("away")

    journal.append = away  # type: ignore[method-assign] - the database is away
    with pytest.raises(grpc.aio.AioRpcError):
        await unary(heart, thread)
    journal.append = append  # type: ignore[method-assign]
    assert (await unary(heart, thread)).status == 200
    # The next start of the program asks once and finds it.
    await heart.processes.kill(thread)
    await heart.start(thread)
    assert (await unary(heart, thread)).status == 200
    assert len(heart.post.effects) == 1


# -- effect ids ---------------------------------------------------------------------------------------------------------


async def test_calls_in_flight_keep_their_ids_when_the_past_is_read_again(heart: Heart) -> None:
    """Settling one lane reads the past while the others go on."""
    thread = await heart.agent(allow=ALL, started=True)
    await unknown_call(heart, thread, lane="0.0")
    heart.post.stop("after")
    flying = heart.begin(thread, 0, lane="0.1")
    await heart.post.reached["after"].wait()
    await resolve(heart, thread, 1, "done")
    heart.post.go("after")
    await heart.call(thread, 0, lane="0.2")
    await flying
    effects = [effect for _, effect in heart.post.effects]
    assert len(effects) == len(set(effects)) == 3


async def test_a_call_while_the_past_is_read_is_not_taken_for_an_earlier_one(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    assert (await heart.call(thread, 0)).failure is None
    reading, on = asyncio.Event(), asyncio.Event()
    store, purged = heart.core.store, heart.core.store.purged_grants

    async def slowly(key: Any) -> list[str]:
        reading.set()
        await on.wait()
        return await purged(key)

    store.purged_grants = slowly  # type: ignore[method-assign] - the place where the interleaving happens
    loading = asyncio.create_task(heart.ownership.load_replay(thread))
    await reading.wait()
    second = await heart.call(thread, 1)
    on.set()
    await loading
    store.purged_grants = purged  # type: ignore[method-assign]
    assert second.failure is None
    await heart.call(thread, 2)
    effects = [effect for _, effect in heart.post.effects]
    assert len(effects) == len(set(effects)) == 3


async def test_a_call_that_was_carried_out_is_not_made_again_for_its_bad_answer(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    for sent, again in (("yes", 0), ("maybe", 1)):
        lane = f"0.{again}"
        heart.post.raises.append(CallFailed("the answer can't be read", sent=sent))
        assert isinstance((await heart.call(thread, 0, lane=lane)).failure, CallFailed)
        await heart.processes.kill(thread)
        await heart.start(thread)
        before = len(heart.post.effects)
        answer = await heart.call(thread, 0, lane=lane)
        assert (answer.failure is not None) == (sent == "yes")
        assert len(heart.post.effects) == before + again


async def test_a_failed_call_is_the_same_occurrence_when_it_is_made_again(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, started=True)
    heart.post.raises.append(CallFailed("no answer", sent="maybe"))
    assert isinstance((await heart.call(thread, 0)).failure, CallFailed)
    assert (await heart.call(thread, 1)).failure is None
    assert len({effect for _, effect in heart.post.effects}) == 1
