"""The refusing branches of a call's path: what is out of order, unreadable, broken, or decided under an epoch that moved."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ringfence.kernel.config import ARGUMENT_BYTES_MAX
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.thread import Thread
from ringfence.policy.manifest_types import Budgets as Limits
from ringfence.syscalls.errors import (
    BudgetExhausted,
    Conflict,
    Denied,
    Diverged,
    Internal,
    InvalidRequest,
    JournalUnavailable,
    NoSuchSyscall,
    Revoked,
)
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

ALL = ['http.*: "http://pay.test/**"', 'fs.*: "/workspace/**"', 'state.*: "**"']


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


class Moves:
    """Moves the policy epoch in the database between a call's decision and its next row."""

    def __init__(self, heart: Heart, thread: Thread, *, revoke: bool) -> None:
        self._heart, self._thread, self._revoke = heart, thread, revoke
        self._hand_in = heart.core.journal.hand_in
        heart.core.journal.hand_in = self._moved_first  # type: ignore[method-assign] - between two steps of a call

    def _moved_first(self, entry: Any, waiter: Any) -> None:
        self._heart.core.journal.hand_in = self._hand_in  # type: ignore[method-assign]
        self._moving = asyncio.create_task(self._move(entry, waiter))

    async def _move(self, entry: Any, waiter: Any) -> None:
        store, key = self._heart.core.store, self._thread.key
        if self._revoke:
            await store.revoke(key, None)
        else:
            await store.add_grant(key, 'fs.read: "/workspace/**"', "allow", "tester", None, None)
        self._hand_in(entry, waiter)


async def test_steps_that_come_out_of_order_are_refused_and_take_no_number(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    for lane in ("0", "0.3"):
        answer = await heart.call(thread, 1, lane=lane)
        assert isinstance(answer.failure, InvalidRequest)
        assert "came before step 0" in answer.failure.message
        assert answer.step == 0
    assert (await heart.call(thread, 0)).step == 1


async def test_what_is_no_call_is_recorded_and_refused(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    answer = await heart.call(thread, 0, "fs.\u202eread")
    assert isinstance(answer.failure, NoSuchSyscall)
    assert "\u202e" not in answer.failure.message
    assert isinstance((await heart.call(thread, 1, nothing=1)).failure, InvalidRequest)
    large = await heart.call(thread, 2, url="x" * (ARGUMENT_BYTES_MAX + 1))
    assert isinstance(large.failure, InvalidRequest)
    assert [outcome for _, outcome in await heart.outcomes(thread)] == ["refused"] * 3
    # The next program comes past them to the same answers; only the last one is tried afresh.
    again = await heart.adopted_again(thread)
    assert [again.replay.find("0", step) is not None for step in range(4)] == [True, True, False, False]


async def test_a_place_of_another_branch_is_not_answered(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    assert (await heart.call(thread, 0)).failure is None
    thread.lanes["0.1"] = 1
    answer = await heart.call(thread, 0, lane="0.1")
    assert isinstance(answer.failure, InvalidRequest)
    assert "was answered before" in answer.failure.message


async def test_a_lost_reply_that_can_not_be_looked_up_may_be_asked_again(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    made = await heart.call(thread, 0)
    store, answered = heart.core.store, heart.core.store.answered

    async def away(*_: Any) -> Any:
        raise Unavailable("away")

    store.answered = away  # type: ignore[method-assign] - the database is away
    answer = await heart.call(thread, 0)
    assert isinstance(answer.failure, JournalUnavailable)
    assert answer.step == 0
    store.answered = answered  # type: ignore[method-assign]
    again = await heart.call(thread, 0)
    assert (again.step, again.result, again.replayed) == (made.step, made.result, True)


async def test_a_divergence_that_can_not_be_recorded_parks_nobody(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    assert (await heart.call(thread, 0)).failure is None
    append, journal = heart.core.journal.append, heart.core.journal

    def away(_: Any) -> Any:
        raise Unavailable("away")

    journal.append = away  # type: ignore[method-assign] - the database is away
    answer = await heart.call(thread, 0, "http.get")
    assert isinstance(answer.failure, JournalUnavailable)
    assert (answer.step, answer.park) == (0, "")
    journal.append = append  # type: ignore[method-assign]
    answer = await heart.call(thread, 0, "http.get")
    assert isinstance(answer.failure, Diverged)
    assert answer.park


async def test_a_half_done_call_that_is_another_one_now_has_diverged(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    heart.post.stop("after")
    heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    heart.post.stops.clear()
    again = await heart.adopted_again(thread)
    assert isinstance((await heart.call(again, 0, "http.get")).failure, Diverged)
    assert heart.get.effects == []
    assert (await heart.call(again, 0)).failure is None


@pytest.mark.parametrize("broken", [RuntimeError("bug"), Unavailable("away")])
async def test_what_breaks_after_an_effect_is_unknown_unless_it_only_read(
    heart: Heart, broken: Exception
) -> None:
    thread = await heart.agent(allow=ALL)
    heart.get.raises.append(broken)
    answer = await heart.call(thread, 0, "http.get")
    assert isinstance(answer.failure, Internal if isinstance(broken, RuntimeError) else JournalUnavailable)
    heart.post.raises.append(broken)
    lane = thread.next_of("0")
    call = heart.begin(thread, lane)
    async with asyncio.timeout(30):
        while not thread.replay.waits():
            await asyncio.sleep(0.001)
    assert not call.done()
    assert len(heart.post.effects) == 1


async def test_what_breaks_before_an_effect_did_nothing(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    plan = heart.post.plan

    def broken(*_: Any) -> Any:
        raise RuntimeError("bug")

    heart.core.table["http.post"].body.plan = broken
    answer = await heart.call(thread, 0)
    assert isinstance(answer.failure, Internal)
    assert "http.post" in answer.failure.message
    heart.core.table["http.post"].body.plan = plan
    assert (await heart.call(thread, 1)).failure is None


# -- an epoch that moves ------------------------------------------------------------------------------------------------

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("http.post", {}),
    ("http.get", {}),
    ("fs.read", {}),
    ("state.put", {"key": "k", "value": 1}),
]


@pytest.mark.parametrize(("action", "arguments"), CALLS)
async def test_an_epoch_that_moves_before_the_commit_has_the_call_decided_again(
    heart: Heart, action: str, arguments: dict[str, Any]
) -> None:
    thread = await heart.agent(allow=ALL)
    before = thread.rights.epoch
    Moves(heart, thread, revoke=False)
    assert (await heart.call(thread, 0, action, **arguments)).failure is None
    assert thread.rights.epoch == before + 1


@pytest.mark.parametrize(("action", "arguments"), CALLS)
async def test_a_right_that_is_taken_before_the_commit_is_not_used(
    heart: Heart, action: str, arguments: dict[str, Any]
) -> None:
    thread = await heart.agent(allow=ALL, more="budgets: {total: {calls: 1}}")
    Moves(heart, thread, revoke=True)
    answer = await heart.call(thread, 0, action, **arguments)
    assert isinstance(answer.failure, Revoked), answer
    assert await heart.outcomes(thread) == [(1, "denied")]
    assert thread.budgets.spent["calls"] == 0
    assert heart.post.effects == heart.get.effects == []
    assert await heart.core.store.state_get("k") is None
    assert isinstance((await heart.call(thread, 1, action, **arguments)).failure, Denied)


async def test_a_right_that_is_taken_between_an_effect_and_its_outcome_hides_no_effect(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    heart.post.stop("after")
    call = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    await heart.core.store.revoke(thread.key, None)
    heart.post.go("after")
    assert (await call).failure is None
    assert await heart.outcomes(thread) == [(1, "ok")]


async def test_a_read_whose_right_is_taken_before_its_outcome_is_withheld(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL)
    heart.get.stop("after")
    call = heart.begin(thread, 0, "http.get")
    await heart.get.reached["after"].wait()
    await heart.core.store.revoke(thread.key, None)
    heart.get.go("after")
    answer = await call
    assert isinstance(answer.failure, Revoked)
    assert answer.result is None


async def test_a_change_of_what_is_no_longer_current_names_who_changed_it(heart: Heart) -> None:
    first = await heart.agent(allow=ALL)
    second = await heart.agent(allow=ALL)
    put = {"key": "shared", "value": 1}
    assert (await heart.call(first, 0, "state.put", **put)).failure is None
    stale = {"reads": {"shared": 0}, "puts": {"shared": 2}}
    answer = await heart.call(second, 0, "state.transaction", **stale)
    assert isinstance(answer.failure, Conflict), answer
    assert f"`shared` is at version 1 by {first.id} at step 1, it was read at 0" in answer.failure.message
    assert json.loads(answer.failure.metadata["conflicts"]) == [
        {"key": "shared", "version": 1, "agent": first.id, "step": 1, "read": 0}
    ]
    assert await heart.outcomes(second) == [(1, "error")]


# -- parking for a spent total ----------------------------------------------------------------------------------------------


async def test_calls_are_held_while_it_is_decided_whether_the_agent_is_parked(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, more="budgets: {total: {calls: 1}}")
    assert (await heart.call(thread, 0)).failure is None
    append, journal = heart.core.journal.append, heart.core.journal
    reached, go = asyncio.Event(), asyncio.Event()

    async def slow(entry: Any) -> Any:
        reached.set()
        await go.wait()
        return await append(entry)

    journal.append = slow  # type: ignore[method-assign] - the refusal takes its time
    refused = heart.begin(thread, 1)
    await reached.wait()
    # There is room again, but the refusal was first.
    thread.budgets.relimit(None, Limits(rate={}, total={"calls": 9}))
    other = heart.begin(thread, 0, lane="0.0")
    await asyncio.sleep(0)
    assert not other.done()
    go.set()
    answer, held = await refused, await other
    assert isinstance(answer.failure, BudgetExhausted)
    assert (answer.withheld, answer.park) == (True, "budget `calls`")
    assert (held.withheld, held.park, held.step) == (True, "", 0)
    assert len(heart.post.effects) == 1
    assert await heart.outcomes(thread) == [(1, "ok"), (2, "refused")]
    journal.append = append  # type: ignore[method-assign]
    await heart.start(thread)
    assert (await heart.call(thread, 0, lane="0.0")).failure is None


async def test_a_refusal_that_can_not_be_recorded_parks_and_holds_nobody(heart: Heart) -> None:
    thread = await heart.agent(allow=ALL, more="budgets: {total: {calls: 1}}")
    assert (await heart.call(thread, 0)).failure is None
    append, journal = heart.core.journal.append, heart.core.journal
    reached, go = asyncio.Event(), asyncio.Event()

    async def away(_: Any) -> Any:
        reached.set()
        await go.wait()
        raise Unavailable("away")

    journal.append = away  # type: ignore[method-assign] - the database is away
    refused = heart.begin(thread, 1)
    await reached.wait()
    other = heart.begin(thread, 0, lane="0.0")
    await asyncio.sleep(0)
    journal.append = append  # type: ignore[method-assign]
    thread.budgets.relimit(None, Limits(rate={}, total={"calls": 9}))
    go.set()
    answer = await refused
    assert isinstance(answer.failure, JournalUnavailable)
    assert (answer.withheld, answer.park) == (False, "")
    assert (await other).failure is None
    assert (await heart.call(thread, 1)).failure is None
