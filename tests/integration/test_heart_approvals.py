"""Parked calls: approved, denied, edited, expired, superseded, over the death of a kernel; each runs once or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from ringfence.kernel import revival
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.operations import agents, approvals, deciding, history, rights
from ringfence.kernel.problems import Problem
from ringfence.syscalls.errors import Denied, Killed, Revoked
from support.heart import URL, Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

POST = 'http.post: "http://pay.test/**"'
STATE = 'state.*: "**"'
YES = {"by": "bob", "verdict": "approved", "reason": "", "edited": None}


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def inbox(heart: Heart, count: int) -> list[dict[str, Any]]:
    """The approvals that wait, once there are so many and their calls wait for them."""
    async with asyncio.timeout(20):
        while True:
            found = (await approvals.approvals(heart.kernel, "", everything=False))["approvals"]
            flying = [
                f for t in heart.core.threads.values() for f in t.flights.values() if f.waits_for is not None
            ]
            if len(found) == count and len(flying) >= count:
                return found
            await asyncio.sleep(0)


async def approve(heart: Heart, approval: dict[str, Any], arguments: bytes = b"", reason: str = "") -> None:
    await deciding.approve(heart.kernel, approval["id"], arguments, reason, 0, "alice")


async def test_an_approved_call_runs_once_and_says_who_approved(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST])
    call = heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    assert (waits["action"], waits["resource"], waits["arguments"]["url"]) == ("http.post", URL, URL)
    assert await heart.outcomes(thread) == [(1, "parked")]
    # No program was started, so nothing shows it parked.
    assert (thread.state, heart.post.effects) == ("pending", [])
    await approve(heart, waits)
    assert (await call).failure is None
    assert len(heart.post.effects) == 1
    assert await heart.outcomes(thread) == [(1, "parked"), (1, "ok")]
    steps = [d async for d in agents.steps(heart.kernel, thread.id, follow=False)]
    assert [(s["verdict"], s["outcome"]) for s in steps] == [("ask", "ok")]
    row = (await heart.core.store.steps(thread.key))[-1]
    assert json.loads(row.body)["approval"]["by"] == "alice"
    assert not (await approvals.approvals(heart.kernel, "", everything=False))["approvals"]
    assert (await heart.core.store.counts(thread.key))["calls"] == 1


async def test_a_second_approval_says_who_was_first(heart: Heart) -> None:
    """C28: and an unknown id says that it never was one."""
    thread = await heart.agent(ask=[POST])
    call = heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    await approve(heart, waits)
    await call
    with pytest.raises(Problem, match=r"already approved by alice at 20.*Z") as refused:
        await approve(heart, waits)
    assert refused.value.exit_code == 5
    with pytest.raises(Problem, match="never was one") as unknown:
        await approvals.show(heart.kernel, "a999999")
    assert unknown.value.exit_code == 4


async def test_of_three_parked_calls_only_the_approved_one_runs(heart: Heart) -> None:  # C29
    thread = await heart.agent(ask=[POST])
    calls = [heart.begin(thread, 0, lane=f"0.{n}", url=f"{URL}/{n}") for n in range(3)]
    waits = {w["resource"]: w for w in await inbox(heart, 3)}
    await approve(heart, waits[f"{URL}/1"])
    assert (await calls[1]).failure is None
    assert not calls[0].done()
    assert not calls[2].done()
    assert len(heart.post.effects) == 1
    assert len(await inbox(heart, 2)) == 2


async def test_a_denial_reaches_the_agent_with_its_reason(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST])
    call = heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    with pytest.raises(Problem, match="the reason is empty"):
        await deciding.deny(heart.kernel, waits["id"], " ", "alice")
    await deciding.deny(heart.kernel, waits["id"], "not on\na Friday", "alice")
    failure = (await call).failure
    assert isinstance(failure, Denied)
    assert failure.message.startswith("alice denied approval ")
    assert failure.message.endswith(": not on a Friday")
    assert heart.post.effects == []
    assert (await heart.outcomes(thread))[-1] == (1, "denied")


async def test_a_parked_call_survives_its_kernel_and_runs_once_without_a_program(heart: Heart) -> None:
    """C28: it is listed again, and runs exactly once."""
    thread = await heart.agent(ask=[POST])
    heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    again = await heart.adopted_again(thread)
    assert [w["id"] for w in await inbox(heart, 1)] == [waits["id"]]
    (flight,) = again.flights.values()
    await approve(heart, waits)
    assert flight.answer is not None
    assert (await flight.answer).failure is None
    assert len(heart.post.effects) == 1
    # The program that is started now asks for the same place and gets what was recorded.
    await heart.start(again)
    answer = await heart.call(again, 0)
    assert answer.replayed
    assert answer.failure is None
    assert len(heart.post.effects) == 1


async def test_what_was_approved_while_no_kernel_ran_is_run_by_the_next(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST])
    heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    heart.core.threads.pop(thread.key)
    await heart.core.store.vote_approval(int(waits["id"][1:]), YES)
    record = await heart.core.store.agent_by_key(thread.key)
    assert record is not None
    again = await heart.ownership.adopt(record)
    answers = [f.answer for f in again.flights.values() if f.answer is not None]
    await asyncio.gather(*answers)
    assert len(heart.post.effects) == 1
    assert (await heart.outcomes(again))[-1] == (1, "ok")
    third = await heart.adopted_again(again)
    assert not third.flights
    assert len(heart.post.effects) == 1


async def test_another_call_at_the_same_place_voids_the_approval_and_asks_anew(heart: Heart) -> None:
    """C30: an approval is bound to the arguments that were seen."""
    thread = await heart.agent(ask=[POST])
    heart.begin(thread, 0, url=f"{URL}/a")
    (first,) = await inbox(heart, 1)
    again = await heart.adopted_again(thread)
    call = heart.begin(again, 0, url=f"{URL}/b")
    async with asyncio.timeout(20):
        while (found := await inbox(heart, 1))[0]["id"] == first["id"]:
            await asyncio.sleep(0)
    assert found[0]["resource"] == f"{URL}/b"
    with pytest.raises(Problem, match=r"it was closed at .*another call in its place"):
        await approve(heart, first)
    assert heart.post.effects == []
    await approve(heart, found[0])
    assert (await call).failure is None
    assert len(heart.post.effects) == 1


async def test_an_edited_call_runs_with_what_was_approved(heart: Heart) -> None:
    thread = await heart.agent(ask=[STATE])
    call = heart.begin(thread, 0, "state.put", key="plan", value={"amount": 1000})
    (waits,) = await inbox(heart, 1)
    with pytest.raises(Problem, match="edited arguments are refused"):
        await approve(heart, waits, b'{"key": ""}')
    await approve(heart, waits, b'{"key": "plan", "value": {"amount": 10}}')
    assert (await call).failure is None
    found = await heart.core.store.state_get("plan")
    assert found is not None
    assert json.loads(found.value or b"") == {"amount": 10}
    # The agent's own arguments stay what its place is known by.
    again = await heart.adopted_again(thread)
    answer = await heart.call(again, 0, "state.put", key="plan", value={"amount": 1000})
    assert answer.replayed


async def test_an_edit_never_gets_past_a_deny(heart: Heart) -> None:
    thread = await heart.agent(ask=['state.put: "open/**"'])
    heart.begin(thread, 0, "state.put", key="open/a", value=1)
    (waits,) = await inbox(heart, 1)
    with pytest.raises(Problem, match="the edited call is denied") as refused:
        await approve(heart, waits, b'{"key": "closed/a", "value": 1}')
    assert refused.value.exit_code == 3


async def test_a_target_that_changed_meanwhile_asks_anew(heart: Heart) -> None:  # C30
    thread = await heart.agent(ask=['state.put: "shared"'])
    other = await heart.agent(allow=[STATE])
    call = heart.begin(thread, 0, "state.put", key="shared", value="mine")
    (first,) = await inbox(heart, 1)
    assert (await heart.call(other, 0, "state.put", key="shared", value="theirs")).failure is None
    await approve(heart, first)
    async with asyncio.timeout(20):
        while (found := await inbox(heart, 1))[0]["id"] == first["id"]:
            await asyncio.sleep(0)
    assert not call.done()
    await approve(heart, found[0])
    assert (await call).failure is None
    stored = await heart.core.store.state_get("shared")
    assert stored is not None
    assert json.loads(stored.value or b"") == "mine"


async def test_nobody_answers_in_time(heart: Heart, dsn: str) -> None:
    """C32: a denial reaches the agent, and nothing runs."""
    thread = await heart.agent(ask=[POST], more="approvals: {expire: 1h}")
    call = heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("update approvals set expires_at = clock_timestamp() - interval '1 second'")
    with pytest.raises(Problem, match="ran out at"):
        await approve(heart, waits)
    heart.core.approvals.notice(thread.key)
    failure = (await call).failure
    assert isinstance(failure, Denied)
    assert "nobody answered" in failure.message
    assert heart.post.effects == []
    assert (await approvals.show(heart.kernel, waits["id"]))["state"] == "expired"


async def test_the_end_of_an_agent_closes_what_waits(heart: Heart) -> None:
    """C32: no approval is left behind that blocks anybody."""
    thread = await heart.agent(ask=[POST], started=True)
    call = heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    await agents.kill(heart.kernel, thread.id, "tester", only=False)
    assert isinstance((await call).failure, Killed)
    shown = await approvals.show(heart.kernel, waits["id"])
    assert shown["state"] == "voided"
    assert "killed" in shown["reason"]
    with pytest.raises(Problem, match="it was closed at"):
        await approve(heart, waits)
    assert heart.post.effects == []


async def test_what_waits_ends_in_the_transaction_that_says_killed(heart: Heart) -> None:
    """C32. Also where no kernel has the call any more."""
    thread = await heart.agent(ask=[POST])
    heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    heart.core.threads.pop(thread.key)
    await heart.core.store.set_agent(thread.key, state="paused")
    assert (await approvals.show(heart.kernel, waits["id"]))["state"] == "pending"
    await heart.core.store.set_agent(thread.key, state="killed")
    assert (await approvals.approvals(heart.kernel, "", everything=False))["approvals"] == []
    with pytest.raises(Problem, match="the agent was killed"):
        await approve(heart, waits)


async def test_a_revoked_rule_ends_the_call_that_it_asked_about(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST])
    call = heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    await rights.revoke(heart.kernel, thread.id, POST, everything=False, purge=False, operator="tester")
    failure = (await call).failure
    assert isinstance(failure, Denied | Revoked)
    assert (await approvals.show(heart.kernel, waits["id"]))["state"] == "voided"
    with pytest.raises(Problem):
        await approve(heart, waits)
    assert heart.post.effects == []


async def test_a_person_answers_a_question(heart: Heart) -> None:
    thread = await heart.agent()
    yes = heart.begin(thread, 0, "ask", question="May I book it?", details={"price": 12})
    (waits,) = await inbox(heart, 1)
    assert (waits["detail"]["question"], waits["detail"]["details"]) == ("May I book it?", {"price": 12})
    await approve(heart, waits, reason="the cheap one")
    answer = json.loads((await yes).result or b"")
    assert answer == {"approved": True, "answer": "the cheap one", "by": "alice"}
    no = heart.begin(thread, 1, "ask", question="And a taxi?")
    (waits,) = await inbox(heart, 1)
    await deciding.deny(heart.kernel, waits["id"], "walk", "alice")
    assert json.loads((await no).result or b"") == {"approved": False, "answer": "walk", "by": "alice"}


async def test_a_question_survives_its_kernel(heart: Heart) -> None:
    thread = await heart.agent()
    heart.begin(thread, 0, "ask", question="Still there?")
    (waits,) = await inbox(heart, 1)
    again = await heart.adopted_again(thread)
    await inbox(heart, 1)
    (flight,) = again.flights.values()
    await approve(heart, waits, reason="yes")
    assert flight.answer is not None
    assert json.loads((await flight.answer).result or b"")["answer"] == "yes"


async def test_an_adoption_that_is_broken_off_flies_nothing_twice(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database goes away while a later kernel takes approved calls up, so the agent is adopted once more."""
    thread = await heart.agent(ask=[POST])
    for lane in ("0", "0.1"):
        heart.begin(thread, 0, lane=lane, url=f"{URL}/{lane}")
    waits = await inbox(heart, 2)
    heart.core.threads.pop(thread.key)
    for one in waits:
        await heart.core.store.vote_approval(int(one["id"][1:]), YES)
    real, asked = revival.approved_before, 0

    async def away_once(*arguments: Any) -> frozenset[tuple[Any, ...]]:
        nonlocal asked
        asked += 1
        if asked == 2:
            # Whatever flies already comes as far as it can.
            for _ in range(200):
                await asyncio.sleep(0.001)
            raise Unavailable("the database is away")
        return await real(*arguments)

    monkeypatch.setattr(revival, "approved_before", away_once)
    heart.post.stop("before")
    record = await heart.core.store.agent_by_key(thread.key)
    assert record is not None
    with pytest.raises(Unavailable):
        await heart.ownership.adopt(record)
    again = await heart.ownership.adopt(record)
    answers = [f.answer for f in again.flights.values() if f.answer is not None]
    await heart.post.reached["before"].wait()
    heart.post.go("before")
    await asyncio.gather(*answers)
    assert sorted(step for step, _ in heart.post.effects) == [1, 2]


async def test_an_approval_that_was_superseded_never_counts_again(heart: Heart) -> None:
    """C28, C30. The target changed after the first approval, so it is asked anew; the next kernel must not take the old word for it."""
    thread = await heart.agent(ask=['state.put: "shared"'])
    other = await heart.agent(allow=[STATE])
    heart.begin(thread, 0, "state.put", key="shared", value="mine")
    (first,) = await inbox(heart, 1)
    assert (await heart.call(other, 0, "state.put", key="shared", value="theirs")).failure is None
    await approve(heart, first)
    async with asyncio.timeout(20):
        while (found := await inbox(heart, 1))[0]["id"] == first["id"]:
            await asyncio.sleep(0)
    assert (await approvals.show(heart.kernel, first["id"]))["state"] == "voided"
    again = await heart.adopted_again(thread)
    assert [w["id"] for w in await inbox(heart, 1)] == [found[0]["id"]]
    stored = await heart.core.store.state_get("shared")
    assert stored is not None
    assert json.loads(stored.value or b"") == "theirs"
    (flight,) = again.flights.values()
    assert flight.answer is not None
    await deciding.deny(heart.kernel, found[0]["id"], "no", "alice")
    assert isinstance((await flight.answer).failure, Denied)
    stored = await heart.core.store.state_get("shared")
    assert stored is not None
    assert json.loads(stored.value or b"") == "theirs"


async def test_a_denial_is_an_answer_also_for_the_next_start(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST])
    call = heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    await deciding.deny(heart.kernel, waits["id"], "never", "alice")
    await call
    again = await heart.adopted_again(thread)
    answer = await heart.call(again, 0)
    assert answer.replayed
    assert isinstance(answer.failure, Denied)
    assert "never" in answer.failure.message
    assert not (await approvals.approvals(heart.kernel, "", everything=False))["approvals"]
    assert heart.post.effects == []


async def test_what_the_database_can_not_hold_can_be_asked_about(heart: Heart) -> None:
    thread = await heart.agent(ask=['fs.write: "/workspace/**"'])
    call = heart.begin(thread, 0, "fs.write", path="/workspace/a.txt", data="YQBi")  # a, NUL, b
    (waits,) = await inbox(heart, 1)
    assert "+a\N{SYMBOL FOR NULL}b" in waits["detail"]["diff"]
    await approve(heart, waits)
    assert (await call).failure is None
    assert (heart.kernel.layout.agent(thread.id) / "live" / "a.txt").read_bytes() == b"a\0b"


async def test_an_asked_call_that_became_unknown_keeps_what_decided_it(heart: Heart) -> None:
    heart.post.idempotent = False
    thread = await heart.agent(ask=[POST])
    heart.post.stop("after")
    heart.begin(thread, 0)
    (waits,) = await inbox(heart, 1)
    await approve(heart, waits)
    await heart.post.reached["after"].wait()
    again = await heart.adopted_again(thread)
    steps = [d async for d in agents.steps(heart.kernel, again.id, follow=False)]
    assert [(s["verdict"], s["outcome"], bool(s["rule"])) for s in steps] == [("ask", "unknown", True)]
    await history.resolve(heart.kernel, again.id, 1, "done", "", "alice")
    steps = [d async for d in agents.steps(heart.kernel, again.id, follow=False)]
    assert [(s["verdict"], s["outcome"], bool(s["rule"])) for s in steps] == [("ask", "ok", True)]
