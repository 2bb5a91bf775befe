"""Cancelling a call never keeps its reply from the program that waits for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ringfence.kernel.flight import Flight
from ringfence.kernel.revocation import cancel
from ringfence.kernel.settled import Answer
from ringfence.syscalls.base import Effect
from ringfence.syscalls.errors import Revoked

REVOKED = Revoked("the permission was revoked")


class Call:
    """A call whose task goes through the same stations as a flight: work, record the end, answer, reply."""

    def __init__(self) -> None:
        self.flight: Any = SimpleNamespace(
            answer=None,
            effect_started=False,
            ending=False,
            fate=None,
            task=None,
            row=SimpleNamespace(waits=False),
        )
        self.go = {name: asyncio.Event() for name in ("work", "record", "reply")}
        self.at = ""
        self.replied: Answer | None = None

    async def run(self, *, failure: Revoked | None) -> None:
        flight = self.flight
        flight.task = asyncio.current_task()
        flight.answer = asyncio.get_running_loop().create_future()
        answer = Answer(step=1, result=b"{}") if failure is None else Answer(step=1, failure=failure)
        try:
            await self.reach("work")
        except asyncio.CancelledError:
            assert flight.fate is not None
            answer = Answer(step=1, failure=flight.fate)
        if answer.failure is not None:
            flight.ending = True
        await self.reach("record")
        flight.answer.set_result(answer)
        await self.reach("reply")
        self.replied = answer

    async def reach(self, name: str) -> None:
        self.at = name
        await self.go[name].wait()

    async def until(self, name: str) -> None:
        while self.at != name:
            await asyncio.sleep(0)


async def start(station: str, *, failure: Revoked | None = None) -> tuple[Call, asyncio.Task[None]]:
    call = Call()
    task = asyncio.create_task(call.run(failure=failure))
    for name in ("work", "record", "reply"):
        await call.until(name)
        if name == station:
            break
        call.go[name].set()
    return call, task


async def finish(call: Call, task: asyncio.Task[None]) -> Answer:
    for event in call.go.values():
        event.set()
    await task
    assert call.replied is not None
    return call.replied


async def cancelled(call: Call, settle_s: float = 30) -> tuple[asyncio.Task[str], Any]:
    work = asyncio.create_task(cancel(call.flight, REVOKED, settle_s))
    await asyncio.sleep(0)
    return work, call.flight


async def test_a_call_that_has_done_nothing_yet_is_cancelled() -> None:
    call, task = await start("work")
    work, _ = await cancelled(call)
    reply = await finish(call, task)
    assert await work == "cancelled"
    assert reply.failure is REVOKED


async def test_a_call_that_records_its_refusal_goes_on_to_its_reply() -> None:
    refusal = Revoked("refused by itself")
    call, task = await start("record", failure=refusal)
    work, _ = await cancelled(call)
    reply = await finish(call, task)
    assert await work == "cancelled"
    assert reply.failure is refusal


async def test_a_call_that_writes_its_reply_goes_on_to_its_end() -> None:
    for failure, fate in ((Revoked("refused by itself"), "cancelled"), (None, "finished")):
        call, task = await start("reply", failure=failure)
        work, _ = await cancelled(call)
        assert await work == fate
        assert (await finish(call, task)).failure is failure


async def test_a_call_that_has_begun_its_effect_is_waited_for() -> None:
    call, task = await start("work")
    call.flight.effect_started = True
    work, flight = await cancelled(call)
    reply = await finish(call, task)
    assert await work == "finished"
    assert flight.fate is None
    assert reply.failure is None


async def test_a_call_that_takes_longer_than_patience_is_reported_as_under_way() -> None:
    call, task = await start("work")
    call.flight.effect_started = True
    work, _ = await cancelled(call, 0)
    assert await work == "under way"
    await finish(call, task)


def flight() -> Flight:
    thread: Any = SimpleNamespace(generation=1)
    row: Any = SimpleNamespace(effect=Effect.READ, action="fs.read", waits=False)
    core: Any = None
    return Flight(
        core=core,
        thread=thread,
        row=row,
        arguments=None,
        canonical=b"{}",
        digest=b"",
        lane="0",
        lane_step=0,
        step=1,
        span_s=1,
    )


async def test_who_asks_for_an_answer_before_and_after_it_is_there_gets_it() -> None:
    call, answer = flight(), Answer(step=1, result=b"{}")
    early = asyncio.ensure_future(asyncio.shield(call.answer))
    call.give(answer)
    assert await early is answer
    untold = flight()
    untold.give(answer)
    assert await asyncio.wait_for(untold.answer, 10) is answer


async def test_a_call_that_ended_before_anybody_asked_is_finished_at_once() -> None:
    call = flight()
    call.give(Answer(step=1, result=b"{}"))
    assert await cancel(call, REVOKED, settle_s=600) == "finished"
    assert call.fate is None
