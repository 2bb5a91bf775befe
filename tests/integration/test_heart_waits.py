"""ATOMIC calls that wait until there is something to do: each try is a commit, and between tries they can be ended."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import psycopg
import pytest
from ringfence.kernel.journal import sqlwork
from ringfence.kernel.operations import rights
from ringfence.kernel.revocation import cancel
from ringfence.syscalls.base import Plan, Question, Work
from ringfence.syscalls.errors import Killed, Revoked
from support.heart import heart_on
from support.scenes import short_directory

TAKE = (
    "with found as (delete from notes where nr = (select min(nr) from notes) returning nr) "
    "select coalesce((select jsonb_build_object('version', nr) from found), '{\"again\": true}') where $1::jsonb is not null"
)


class Taker:
    """The body of a row: takes the oldest note, and waits for one."""

    def __init__(self, result) -> None:
        self.result = result
        self.waiting = asyncio.Event()
        self.wake = asyncio.Event()
        self.waits = 0
        self.early = False

    def plan(self, arguments, _env):
        return Plan(resource=arguments.key, questions=(Question(action="state.put", resource=arguments.key),))

    def transaction(self, _arguments):
        return Work(statement="take")

    def finish(self, _arguments, done):
        return self.result(version=done["version"])

    async def wait(self, call, _arguments):
        self.waits += 1
        assert call.age_s >= 0
        if self.waits == 1:
            return None
        self.waiting.set()
        await self.wake.wait()
        self.wake.clear()
        return self.result(version=0) if self.early else None


@pytest.fixture
async def heart(dsn, monkeypatch):
    monkeypatch.setattr(sqlwork, "texts", lambda: {"take": TAKE})
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("create table notes (nr bigserial primary key)")
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            row = heart.core.table["state.put"]
            heart.taker = taker = Taker(row.result)
            heart.core.table["state.put"] = dataclasses.replace(row, body=taker, waits=True)
            heart.thread = await heart.agent(allow=['state.put: "**"'])
            yield heart


async def add_note(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("insert into notes default values")


def begin(heart, lane_step=0):
    return heart.begin(heart.thread, lane_step, "state.put", key="k", value=1)


async def test_what_is_there_is_taken_at_once_and_what_comes_later_when_it_comes(heart, dsn):
    await add_note(dsn)
    first = await begin(heart)
    assert json.loads(first.result) == {"version": 1}
    second = begin(heart, 1)
    await heart.taker.waiting.wait()
    await add_note(dsn)
    heart.taker.wake.set()
    assert json.loads((await second).result) == {"version": 2}
    assert await heart.outcomes(heart.thread) == [(1, "ok"), (2, "ok")]


async def test_a_wait_may_end_the_call_with_a_result_that_is_recorded(heart):
    heart.taker.early = True
    call = begin(heart)
    await heart.taker.waiting.wait()
    heart.taker.wake.set()
    answer = await call
    assert answer.failure is None
    assert await heart.outcomes(heart.thread) == [(1, "ok")]
    again = await heart.adopted_again(heart.thread)
    replayed = await heart.call(again, 0, "state.put", key="k", value=1)
    assert (replayed.result, replayed.step) == (answer.result, 1)


async def test_a_call_that_waits_is_cancelled_by_a_revocation_and_takes_nothing(heart, dsn):
    call = begin(heart)
    await heart.taker.waiting.wait()
    told = await rights.revoke(
        heart.kernel, heart.thread.id, "", everything=True, purge=False, operator="tester"
    )
    assert [(one["step"], one["fate"]) for one in told["affected"]] == [(1, "cancelled")]
    await add_note(dsn)
    assert isinstance((await call).failure, Revoked)
    assert await heart.outcomes(heart.thread) == [(1, "denied")]


async def test_what_is_said_during_a_try_counts_when_it_found_nothing(heart, monkeypatch):
    """A kill that meets a try under way must not leave the call waiting for ever."""
    append = heart.core.journal.append
    trying, go = asyncio.Event(), asyncio.Event()

    async def slow(entry):
        trying.set()
        await go.wait()
        return await append(entry)

    monkeypatch.setattr(heart.core.journal, "append", slow)
    call = begin(heart)
    await trying.wait()
    monkeypatch.setattr(heart.core.journal, "append", append)
    (flight,) = heart.thread.flights.values()
    ending = asyncio.create_task(cancel(flight, Killed("the agent was killed")))
    await asyncio.sleep(0)
    go.set()
    assert await ending in {"cancelled", "finished"}
    assert isinstance((await call).failure, Killed)


async def test_a_try_that_has_to_be_decided_again_is_made_again_without_waiting(heart, dsn):
    await add_note(dsn)
    await heart.core.store.revoke(heart.thread.key, [])  # moves the epoch and takes nothing away
    assert json.loads((await begin(heart)).result) == {"version": 1}
    assert heart.taker.waits == 1
