"""The bodies of the shared state, of checkpoints, of the clock and of chance."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from ringfence.syscalls import (
    checkpoint_save,
    now,
    random,
    sleep,
    state_delete,
    state_get,
    state_put,
    state_transaction,
)
from ringfence.syscalls.base import StateDone, StateValue
from ringfence.syscalls.errors import InvalidRequest

ENV: Any = None


@pytest.mark.parametrize("key", ["a", "inventory/dist/é", "a b", "x" * 512, "a.b/..c", "日本"])
def test_a_key_is_asked_about_as_it_is(key: str) -> None:
    for body, action in ((state_get, "state.get"), (state_put, "state.put"), (state_delete, "state.delete")):
        found = body.plan(body.Arguments(key=key), ENV)
        assert [(question.action, question.resource) for question in found.questions] == [(action, key)]
        assert found.resource == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "..",
        "a/../b",
        "./a",
        "a\nb",
        "a\x7f",
        "a\u200bb",
        "x" * 513,
        "é" * 257,
        "e\u0301",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        state_put.plan(state_put.Arguments(key=key), ENV)
    assert "\n" not in str(caught.value)


async def test_get_tells_null_from_nothing() -> None:
    stored = {
        "null": StateValue(value=b"null", version=2),
        "gone": StateValue(value=None, version=3),
        "set": StateValue(value=b'{"a":[1,2.5]}', version=1),
    }

    class State:
        async def get(self, key: str) -> StateValue:
            return stored.get(key, StateValue(value=None, version=0))

    call: Any = SimpleNamespace(env=SimpleNamespace(state=State()))

    async def get(key: str) -> tuple[bool, Any, int]:
        result = await state_get.run(call, state_get.Arguments(key=key))
        return result.found, result.value, result.version

    assert await get("null") == (True, None, 2)
    assert await get("gone") == (False, None, 3)
    assert await get("set") == (True, {"a": [1, 2.5]}, 1)
    assert await get("never") == (False, None, 0)


def test_put_and_delete_say_what_to_commit() -> None:
    put = state_put.Arguments(key="a", value={"z": 1, "b": None}, if_version=0)
    change = state_put.transaction(put)
    assert (change.reads, change.puts, change.deletes) == ({"a": 0}, {"a": b'{"b":null,"z":1}'}, ())
    assert state_put.finish(put, StateDone(versions={"a": 1}, previous={"a": 0})).version == 1
    assert state_put.transaction(state_put.Arguments(key="a")).reads == {}
    delete = state_delete.Arguments(key="a")
    assert (state_delete.transaction(delete).reads, state_delete.transaction(delete).deletes) == ({}, ("a",))
    gone = state_delete.finish(delete, StateDone(versions={"a": 5}, previous={"a": 4}))
    assert (gone.existed, gone.version) == (True, 5)
    assert not state_delete.finish(delete, StateDone(versions={"a": 1}, previous={"a": 0})).existed


def test_a_transaction_asks_about_each_key() -> None:
    arguments = state_transaction.Arguments(reads={"r": 4, "p": 1}, puts={"p": 1, "q": 2}, deletes=["d"])
    found = state_transaction.plan(arguments, ENV)
    assert [(question.action, question.resource) for question in found.questions] == [
        ("state.get", "r"),
        ("state.get", "p"),
        ("state.put", "p"),
        ("state.put", "q"),
        ("state.delete", "d"),
    ]
    assert found.resource == "p, q, d and 1 more"
    change = state_transaction.transaction(arguments)
    assert (change.reads, change.puts, change.deletes) == ({"r": 4, "p": 1}, {"p": b"1", "q": b"2"}, ("d",))
    done = StateDone(versions={"p": 2, "q": 1, "d": 9}, previous={"p": 1, "q": 0, "d": 8})
    assert state_transaction.finish(arguments, done).versions == {"p": 2, "q": 1, "d": 9}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"puts": {"a": 1}, "deletes": ["a"]},
        {"deletes": ["a", "a"]},
        {"reads": {"a": -1}},
        {"puts": {"": 1}},
        {"reads": {"../a": 1}},
        {"puts": {f"k{number}": 1 for number in range(257)}},
        {"puts": {"a": "x" * (257 << 10)}},
    ],
)
def test_a_transaction_that_can_not_be_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        state_transaction.plan(state_transaction.Arguments(**arguments), ENV)


def test_values_and_versions_are_bounded() -> None:
    state_put.plan(state_put.Arguments(key="a", value="x" * ((256 << 10) - 2)), ENV)
    with pytest.raises(InvalidRequest, match="the value of `a`"):
        state_put.plan(state_put.Arguments(key="a", value="x" * ((256 << 10) - 1)), ENV)
    with pytest.raises(InvalidRequest, match="`if_version` is -1"):
        state_put.plan(state_put.Arguments(key="a", if_version=-1), ENV)


def test_a_checkpoint_is_canonical_and_knows_its_step() -> None:
    arguments = checkpoint_save.Arguments(state={"page": 2, "done": []}, schema_version=3, next_child=1)
    assert checkpoint_save.plan(arguments, ENV).questions[0].action == "checkpoint.save"
    saved = checkpoint_save.transaction(arguments)
    assert (saved.state, saved.schema_version, saved.next_child) == (b'{"done":[],"page":2}', 3, 1)
    assert checkpoint_save.finish(arguments, 7).step == 7
    with pytest.raises(InvalidRequest, match="checkpoint holds at most"):
        checkpoint_save.plan(checkpoint_save.Arguments(state="x" * (1 << 20)), ENV)


async def test_now_is_the_clock_in_utc() -> None:
    call: Any = None
    before = datetime.now(UTC)
    told = (await now.run(call, now.Arguments())).time
    assert told.endswith("Z")
    assert len(told) == len("2026-01-02T03:04:05.000006Z")
    assert before <= datetime.fromisoformat(told) <= datetime.now(UTC)


async def test_random_gives_as_many_bytes_as_asked_for() -> None:
    call: Any = None
    for asked, given in ((0, 16), (1, 1), (4096, 4096)):
        arguments = random.Arguments(size_bytes=asked)
        random.plan(arguments, ENV)
        assert len((await random.run(call, arguments)).data) == given
    first, second = [(await random.run(call, random.Arguments())).data for _ in range(2)]
    assert first != second
    for asked in (-1, 4097):
        with pytest.raises(InvalidRequest, match="size_bytes"):
            random.plan(random.Arguments(size_bytes=asked), ENV)


class SleepCall:
    def __init__(self, progress: bytes | None = None) -> None:
        self.progress = progress
        self.recorded: list[bytes] = []
        self.waits: list[tuple[str, int | None]] = []
        self.asleep = asyncio.Event()

    async def record(self, progress: bytes) -> None:
        self.recorded.append(progress)

    @asynccontextmanager
    async def waiting(self, kind: str, _text: str, until_us: int | None) -> AsyncGenerator[None]:
        self.waits.append((kind, until_us))
        self.asleep.set()
        yield


async def test_sleep_records_when_to_wake_before_it_waits() -> None:
    call: Any = SleepCall()
    before_us = time.time_ns() // 1000
    result = await sleep.run(call, sleep.Arguments(duration_ms=20))
    wake_at_us = json.loads(call.recorded[0])["wake_at_us"]
    assert len(call.recorded) == 1
    assert before_us + 20_000 <= wake_at_us
    assert call.waits == [("timer", wake_at_us)]
    assert datetime.fromisoformat(result.time).timestamp() * 1e6 >= wake_at_us - 1


async def test_a_restarted_sleep_waits_only_for_what_is_left() -> None:
    # It was to end a second ago; waiting again for the whole hour would run into the test's time limit.
    call: Any = SleepCall(json.dumps({"wake_at_us": time.time_ns() // 1000 - 1_000_000}).encode())
    await sleep.run(call, sleep.Arguments(duration_ms=3_600_000))
    assert call.recorded == []


async def test_a_clock_set_back_does_not_make_a_sleep_longer() -> None:
    call: Any = SleepCall(json.dumps({"wake_at_us": time.time_ns() // 1000 + 10**12}).encode())
    await sleep.run(call, sleep.Arguments(duration_ms=5))


async def test_a_sleep_can_be_cancelled() -> None:
    call: Any = SleepCall()
    task = asyncio.create_task(sleep.run(call, sleep.Arguments(duration_ms=3_600_000)))
    await call.asleep.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_sleep_has_bounds() -> None:
    for duration_ms in (-1, sleep.DURATION_MAX_MS + 1):
        with pytest.raises(InvalidRequest, match="duration_ms"):
            sleep.plan(sleep.Arguments(duration_ms=duration_ms), ENV)
