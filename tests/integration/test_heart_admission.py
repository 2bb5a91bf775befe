"""Epochs, limited grants, totals, rates and a lost database at every turn of a call's path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ringfence.kernel.freezing import pause, resume
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.operations import agents, history, rights
from ringfence.kernel.problems import Problem
from ringfence.kernel.replay import Unfinished
from ringfence.kernel.revocation import apply_epoch
from ringfence.kernel.rollback_plan import Cut
from ringfence.kernel.thread import Thread
from ringfence.syscalls.base import Question
from ringfence.syscalls.errors import (
    BudgetExhausted,
    CallFailed,
    Denied,
    JournalUnavailable,
    Killed,
    OutcomeUnknown,
    QuotaExceeded,
    Revoked,
    SnapshotFailed,
)
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

HTTP = 'http.*: "http://pay.test/**"'
FILES = 'fs.*: "/workspace/**"'


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def grant(heart: Heart, thread: Thread, rule: str, uses: int = 0, expires_ms: int = 0) -> str:
    given = await rights.grant(
        heart.kernel, thread.id, rule, expires_ms=expires_ms, uses=uses, operator="tester"
    )
    return given["id"]


async def revoke(heart: Heart, thread: Thread, what: str) -> dict[str, Any]:
    return await rights.revoke(
        heart.kernel, thread.id, what, everything=False, purge=False, operator="tester"
    )


async def uses_left(heart: Heart, thread: Thread, grant_id: str) -> int | None:
    grants = await heart.core.store.grants(thread.key, active=False)
    return next(g.uses_left for g in grants if g.id == grant_id)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


# -- epochs -------------------------------------------------------------------------------------------------------------


async def test_a_grant_of_something_else_does_not_stop_a_call_that_records_progress(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP])
    heart.post.progress = True
    heart.post.stop("before")
    call = heart.begin(thread, 0)
    await heart.post.reached["before"].wait()
    await grant(heart, thread, FILES)
    heart.post.go("before")
    assert (await call).failure is None


async def test_a_revoked_right_stops_a_call_that_records_progress(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP])
    heart.post.stop("before")
    call = heart.begin(thread, 0)
    await heart.post.reached["before"].wait()
    told = await revoke(heart, thread, "http.*")
    assert [(call["step"], call["fate"]) for call in told["affected"]] == [(1, "cancelled")]
    assert isinstance((await call).failure, Revoked)
    assert heart.post.effects == []


async def test_a_grant_that_ends_while_a_call_waits_is_not_used(heart: Heart) -> None:
    """No epoch moves when a grant's life ends."""
    thread = await heart.agent(allow=[])
    await grant(heart, thread, HTTP, expires_ms=400)
    heart.post.stop("before")
    call = heart.begin(thread, 0)
    await heart.post.reached["before"].wait()
    await until(lambda: thread.rights.expired)
    heart.post.go("before")
    assert isinstance((await call).failure, Revoked)
    assert heart.post.effects == []


async def test_an_epoch_that_could_not_be_followed_is_followed_when_asked_again(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP])
    store, acked = heart.core.store, heart.core.store.ack_epoch

    async def away(*_: Any) -> None:
        raise Unavailable("away")

    store.ack_epoch = away  # type: ignore[method-assign] - the database goes at this very moment
    with pytest.raises(Unavailable):
        await revoke(heart, thread, "http.*")
    store.ack_epoch = acked  # type: ignore[method-assign]
    epoch = thread.rights.epoch
    assert await apply_epoch(heart.core, thread, epoch) == []
    record = await store.agent_by_key(thread.key)
    assert record is not None
    assert record.acked_epoch == epoch


# -- limited grants -----------------------------------------------------------------------------------------------------


async def test_a_call_uses_a_limited_grant_once_though_the_epoch_moves(heart: Heart) -> None:
    thread = await heart.agent(allow=[])
    given = await grant(heart, thread, HTTP, uses=1)
    heart.post.stop("before")
    call = heart.begin(thread, 0)
    await heart.post.reached["before"].wait()
    assert await uses_left(heart, thread, given) == 0
    # Its own use was the last one, which must not count against it when it is looked at again.
    await grant(heart, thread, FILES)
    heart.post.go("before")
    assert (await call).failure is None
    assert isinstance((await heart.call(thread, 1)).failure, Denied)
    assert len(heart.post.effects) == 1


async def test_two_calls_at_once_share_no_use(heart: Heart) -> None:
    thread = await heart.agent(allow=[])
    given = await grant(heart, thread, HTTP, uses=2)
    calls = [heart.begin(thread, 0, lane=f"0.{n}") for n in range(5)]
    failures = [(await call).failure for call in calls]
    assert sum(failure is None for failure in failures) == 2
    assert sum(isinstance(failure, Denied) for failure in failures) == 3
    assert len(heart.post.effects) == 2
    assert await uses_left(heart, thread, given) == 0


async def test_what_a_call_asks_while_it_runs_uses_grants_too(heart: Heart) -> None:
    """As a command that writes a file which only a limited grant allows."""
    thread = await heart.agent(allow=[HTTP])
    given = await grant(heart, thread, 'fs.write: "/workspace/**"', uses=1)
    heart.post.more = [Question(action="fs.write", resource="/workspace/a")]
    assert (await heart.call(thread, 0)).failure is None
    assert await uses_left(heart, thread, given) == 0
    assert isinstance((await heart.call(thread, 1)).failure, Denied)
    assert len(heart.post.effects) == 1


async def test_a_call_that_is_not_admitted_uses_nothing(heart: Heart) -> None:
    thread = await heart.agent(allow=[], more="budgets: {total: {calls: 0}}")
    given = await grant(heart, thread, HTTP, uses=1)
    assert isinstance((await heart.call(thread, 0)).failure, BudgetExhausted)
    assert await uses_left(heart, thread, given) == 1


async def test_an_expired_last_use_and_a_plain_grant_leave_the_plain_one(heart: Heart) -> None:
    thread = await heart.agent(allow=[])
    limited = await grant(heart, thread, HTTP, uses=1)
    assert (await heart.call(thread, 0)).failure is None
    await grant(heart, thread, HTTP)
    assert (await heart.call(thread, 1)).failure is None
    assert await uses_left(heart, thread, limited) == 0


# -- totals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SnapshotFailed("no point"), Denied("found while running")])
async def test_a_call_that_was_refused_while_running_gives_its_totals_back(
    heart: Heart, error: Exception
) -> None:
    thread = await heart.agent(allow=[HTTP], more="budgets: {total: {calls: 1}}")
    heart.post.raises.append(error)
    assert (await heart.call(thread, 0)).failure is error
    assert thread.budgets.spent["calls"] == 0
    assert (await heart.call(thread, 1)).failure is None
    assert isinstance((await heart.call(thread, 2)).failure, BudgetExhausted)
    # The next kernel counts from the journal, and comes to the same.
    again = await heart.adopted_again(thread)
    assert again.budgets.spent["calls"] == thread.budgets.spent["calls"] == 1


async def test_a_call_that_is_made_again_after_a_crash_is_charged_once(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP], more="budgets: {total: {calls: 1}}")
    heart.post.stop("after")
    heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    again = await heart.adopted_again(thread)
    assert again.budgets.spent["calls"] == 1
    heart.post.go("after")
    answer = await heart.call(again, 0)
    assert answer.failure is None
    assert again.budgets.spent["calls"] == 1
    assert len({effect for _, effect in heart.post.effects}) == 1


# -- a crash between intent and outcome -----------------------------------------------------------------------------------


async def half_done(heart: Heart, thread: Thread) -> Thread:
    """A post that a crash caught after it was sent, as the next kernel finds it."""
    heart.post.stop("after")
    heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    heart.post.stops.clear()
    return await heart.adopted_again(thread)


async def test_what_may_have_been_sent_is_unknown_when_policy_now_denies_it(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP])
    heart.post.stop("after")
    heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    heart.post.stops.clear()
    heart.core.threads.pop(thread.key)
    await heart.core.store.revoke(thread.key, None)
    record = await heart.core.store.agent_by_key(thread.key)
    assert record is not None
    again = await heart.ownership.adopt(record)
    call = heart.begin(again, 0)
    await until(lambda: again.replay.waits() == [1])
    assert len(heart.post.effects) == 1
    told = await history.resolve(heart.kernel, again.id, 1, "done", "", "tester")
    # Its program was gone, so it was started again and asks for itself.
    assert told["state"] == "running"
    assert (await call).step == 0
    assert (await heart.call(again, 0)).failure is None
    assert len(heart.post.effects) == 1


async def test_a_half_done_call_keeps_the_use_it_had_taken(heart: Heart) -> None:
    thread = await heart.agent(allow=[])
    given = await grant(heart, thread, HTTP, uses=1)
    again = await half_done(heart, thread)
    assert (await heart.call(again, 0)).failure is None
    assert await uses_left(heart, thread, given) == 0
    assert isinstance((await heart.call(again, 1)).failure, Denied)


async def test_a_half_done_call_holds_its_id_against_others_like_it(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP])
    again = await half_done(heart, thread)
    assert isinstance(again.replay.unfinished["0", 0], Unfinished)
    assert (await heart.call(again, 0, lane="0.0")).failure is None
    assert (await heart.call(again, 0)).failure is None
    first, other, redone = [effect for _, effect in heart.post.effects]
    assert first == redone != other


async def test_a_call_without_key_that_a_crash_made_unknown_holds_its_id(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP])
    heart.post.idempotent = False
    again = await half_done(heart, thread)
    assert (again.state, again.waiting_for) == ("unknown", "the outcome of step 1")
    assert (await heart.call(again, 0, lane="0.0")).failure is None
    first, other = [effect for _, effect in heart.post.effects]
    assert first != other


# -- the database goes away -----------------------------------------------------------------------------------------------


class Away:
    """The journal refuses rows for a while; what it refused as an intent may still be written later."""

    def __init__(self, heart: Heart, *, phases: frozenset[int]) -> None:
        self._journal, self._append, self.phases = heart.core.journal, heart.core.journal.append, phases
        heart.core.journal.append = self._refuse  # type: ignore[method-assign] - the database as seen from here

    def _refuse(self, entry: Any) -> asyncio.Future[Any]:
        if int(entry.row.phase) not in self.phases:
            return self._append(entry)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_exception(Unavailable("away"))
        return future

    def back(self) -> None:
        self._journal.append = self._append  # type: ignore[method-assign]


async def test_a_call_that_could_not_be_recorded_is_the_same_occurrence_when_made_again(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP], more="budgets: {total: {calls: 1}}")
    away = Away(heart, phases=frozenset({0, 1}))
    answer = await heart.call(thread, 0)
    assert isinstance(answer.failure, JournalUnavailable)
    assert (answer.step, heart.post.effects) == (0, [])
    assert thread.budgets.spent["calls"] == 0
    away.phases = frozenset()
    made = await heart.call(thread, 0)
    assert made.failure is None
    first = heart.post.effects[0][1]
    # The refusal of the first try is recorded after the second was made: it must not free the id.
    async with asyncio.timeout(30):
        while len(await heart.outcomes(thread)) < 2:
            await asyncio.sleep(0.01)
    assert await heart.outcomes(thread) == [(2, "ok"), (1, "refused")]
    away.back()
    again = await heart.adopted_again(thread)
    assert first in again.effects
    assert first in again.consumed_effects
    found = await heart.call(again, 0)
    assert (found.step, found.replayed, found.result) == (made.step, True, made.result)
    assert len(heart.post.effects) == 1


async def test_a_database_lost_while_deciding_is_no_bug(heart: Heart) -> None:
    thread = await heart.agent(allow=[])
    await grant(heart, thread, HTTP, uses=5)
    store, use = heart.core.store, heart.core.store.use_grant

    async def away(_: str) -> int | None:
        raise Unavailable("away")

    store.use_grant = away  # type: ignore[method-assign] - the database goes at this very moment
    answer = await heart.call(thread, 0)
    assert isinstance(answer.failure, JournalUnavailable)
    assert answer.step == 0
    store.use_grant = use  # type: ignore[method-assign]
    assert (await heart.call(thread, 0)).failure is None


async def test_an_unknown_outcome_waits_though_the_database_went_right_after_it(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP], started=True)
    store, store_it = heart.core.store, heart.core.store.set_agent

    async def away(*_: Any, **__: Any) -> None:
        raise Unavailable("away")

    store.set_agent = away  # type: ignore[method-assign] - the database goes at this very moment
    heart.post.raises.append(OutcomeUnknown("it may have arrived"))
    call = heart.begin(thread, 0)
    await until(lambda: thread.state == "unknown")
    store.set_agent = store_it  # type: ignore[method-assign]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not call.done()
    await history.resolve(heart.kernel, thread.id, 1, "done", "", "tester")
    assert (await call).failure is None


async def test_a_killed_agent_stays_killed_in_the_database(heart: Heart) -> None:
    """Two states are stored at once: the newer one has to be there in the end."""
    thread = await heart.agent(allow=[HTTP], started=True)
    store, store_it = heart.core.store, heart.core.store.set_agent
    slow = asyncio.Event()

    async def slowly(key: Any, **fields: Any) -> None:
        if fields["state"] == "pending":
            await slow.wait()
        await store_it(key, **fields)

    store.set_agent = slowly  # type: ignore[method-assign] - the first statement is slower than the second
    first = asyncio.create_task(heart.processes.set_state(thread, "pending"))
    await asyncio.sleep(0)
    second = asyncio.create_task(heart.processes.kill(thread))
    await until(lambda: thread.state == "killed")
    slow.set()
    await asyncio.gather(first, second)
    record = await store.agent_by_key(thread.key)
    assert record is not None
    assert record.state == thread.state == "killed"


# -- rates --------------------------------------------------------------------------------------------------------------


async def test_an_agent_whose_rate_is_full_shows_that_it_waits(heart: Heart) -> None:
    thread = await heart.agent(
        allow=[HTTP], more="budgets: {rate: {http.*: 1/h, http.post: 30/m}}", started=True
    )
    listed = (await agents.list_agents(heart.kernel, everything=False))["agents"][0]
    assert (listed["state"], listed["waiting_for"]) == ("running", None)
    thread.budgets._buckets[0]._tokens = 1.02  # type: ignore[attr-defined] - an hour is too long for a test
    assert thread.state == "running"
    thread.budgets._buckets[0].per_s = 1.0  # type: ignore[attr-defined]
    assert (await heart.call(thread, 0)).failure is None
    assert thread.state == "running"
    waiting = [heart.begin(thread, 1), heart.begin(thread, 0, lane="0.0")]
    await until(lambda: len(thread.waits) == 2)
    listed = (await agents.list_agents(heart.kernel, everything=False))["agents"][0]
    assert (listed["state"], listed["waiting_for"]) == ("waiting", "rate http.*")
    assert [(await call).failure for call in waiting] == [None, None]
    listed = (await agents.list_agents(heart.kernel, everything=False))["agents"][0]
    assert (listed["state"], listed["waiting_for"]) == ("running", None)


async def test_what_an_operator_says_of_a_waiting_agent_stays(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP], more="budgets: {rate: {http.post: 1/s}}", started=True)
    assert (await heart.call(thread, 0)).failure is None
    call = heart.begin(thread, 1)
    await until(lambda: thread.state == "waiting")
    await pause(heart.processes, thread)
    assert (await call).failure is None
    assert thread.state == "paused"


async def test_a_wait_shows_again_when_an_agent_that_was_paused_in_it_goes_on(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP], more="budgets: {rate: {http.post: 1/m}}", started=True)
    assert (await heart.call(thread, 0)).failure is None
    call = heart.begin(thread, 1)
    await until(lambda: thread.state == "waiting")
    await pause(heart.processes, thread)
    assert thread.state == "paused"
    await resume(heart.processes, thread)
    assert (thread.state, thread.waiting_for) == ("waiting", "rate http.post")
    await heart.processes.kill(thread)
    assert isinstance((await call).failure, Killed)
    assert (thread.state, thread.waits) == ("killed", {})


async def test_a_wait_that_is_cut_short_is_over(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP], more="budgets: {rate: {http.post: 1/m}}", started=True)
    assert (await heart.call(thread, 0)).failure is None
    call = heart.begin(thread, 1)
    async with asyncio.timeout(30):
        while thread.state != "waiting" and not call.done():
            await asyncio.sleep(0.001)
    if call.done():
        # A minute is the longest a call of this test may wait.
        assert isinstance(call.result().failure, QuotaExceeded)
        return
    await revoke(heart, thread, "http.*")
    assert isinstance((await call).failure, Revoked)
    assert thread.state == "running"


# -- rollbacks ----------------------------------------------------------------------------------------------------------


async def test_of_two_rollbacks_at_once_the_later_one_is_told_to_look_again(heart: Heart) -> None:
    thread = await heart.agent(allow=[HTTP])
    for step in range(3):
        assert (await heart.call(thread, step)).failure is None
    cuts = [await heart.kernel.rollback.plans.cut_for(thread, to) for to in ("1", "2")]
    done = await asyncio.gather(
        *(heart.kernel.rollback.execute(thread, cut, None, "tester") for cut in cuts), return_exceptions=True
    )
    assert isinstance(done[1], Problem)
    assert "rolled back meanwhile" in str(done[1])
    assert (thread.branch, thread.lineage.parts[1]) == (1, (0, 1))
    assert [row for row in await heart.outcomes(thread) if row[0] > 4] == []


async def test_nothing_is_rolled_back_while_a_call_is_under_way(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.kernel.rollback_begin.SETTLE_S", 0.01)
    thread = await heart.agent(allow=[HTTP], started=True)
    heart.post.stop("after")
    call = heart.begin(thread, 0)
    await heart.post.reached["after"].wait()
    with pytest.raises(Problem, match=r"step 1 of .*http\.post, is still under way"):
        await heart.kernel.rollback.execute(thread, Cut(step=0, parent=0, seen=0), None, "tester")
    assert (thread.state, thread.branch) == ("paused", 0)
    heart.post.go("after")
    assert (await call).failure is None
    await heart.kernel.rollback.execute(thread, Cut(step=0, parent=0, seen=0), None, "tester")
    # What was sent is known on the new branch.
    assert (await heart.call(thread, 0)).failure is None
    assert len(heart.post.effects) == 1


@pytest.mark.parametrize("together", [False, True])
async def test_a_rollback_that_a_target_refuses_leaves_the_agent_paused(
    heart: Heart, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    thread = await heart.agent(started=True)
    away = CallFailed("database `crm` can't be reached")

    async def planned(*_: object) -> None:
        raise away

    monkeypatch.setattr("ringfence.kernel.rollback_plan.Plans.plan_all", planned)
    cut = Cut(step=0, parent=0, seen=0)
    rollback = heart.kernel.rollback
    work = (
        rollback.execute_all([(thread, cut)], "tester")
        if together
        else rollback.execute(thread, cut, None, "tester")
    )
    with pytest.raises(CallFailed):
        await work
    assert (thread.state, thread.waiting_for) == ("paused", "an operator, after a refused rollback")


async def test_a_rollback_of_several_that_is_refused_at_once_leaves_their_programs_running(
    heart: Heart,
) -> None:
    threads = [await heart.agent(started=True, name=name) for name in ("one", "two")]
    cuts = [Cut(step=0, parent=0, seen=7), Cut(step=0, parent=0, seen=0)]
    with pytest.raises(Problem, match="rolled back meanwhile"):
        await heart.kernel.rollback.execute_all(list(zip(threads, cuts, strict=True)), "tester")
    assert [(thread.state, thread.program is None) for thread in threads] == [("running", False)] * 2


async def test_a_rollback_whose_past_could_not_be_read_is_read_by_the_next_start(heart: Heart) -> None:
    thread = await heart.agent(allow=[FILES])
    assert (await heart.call(thread, 0, "fs.read")).failure is None
    thread = await heart.adopted_again(thread)
    store, purged = heart.core.store, heart.core.store.purged_grants

    async def away(_: Any) -> list[str]:
        raise Unavailable("away")

    store.purged_grants = away  # type: ignore[method-assign] - the database goes at this very moment
    with pytest.raises(Unavailable):
        await heart.kernel.rollback.execute(thread, Cut(step=0, parent=0, seen=0), None, "tester")
    store.purged_grants = purged  # type: ignore[method-assign]
    await agents.start(heart.kernel, thread.id, "tester")
    assert thread.branch == 1
    answer = await heart.call(thread, 0, "fs.read")
    assert not answer.replayed
    assert len(heart.read.effects) == 2


async def test_a_divergence_that_comes_after_a_rollback_parks_nobody(heart: Heart) -> None:
    thread = await heart.agent(allow=[FILES, HTTP], started=True)
    assert (await heart.call(thread, 0, "fs.read")).failure is None
    parks = heart.parker(thread)
    diverged = await heart.call(thread, 0, "http.get")
    assert diverged.park
    await heart.kernel.rollback.execute(thread, Cut(step=0, parent=0, seen=0), None, "tester")
    await parks(thread, diverged)
    async with thread.operation:
        pass
    assert (thread.state, thread.waiting_for) == ("paused", "an operator, after a rollback")
