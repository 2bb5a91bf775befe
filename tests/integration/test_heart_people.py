"""Calls that several people have to approve: who counts, for what, and what takes their approval away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ringfence.kernel.journal.types import AgentKey
from ringfence.kernel.operations import approvals, deciding, house
from ringfence.kernel.problems import Problem
from ringfence.kernel.rights import Rights
from ringfence.syscalls.errors import Denied
from support.heart import URL, Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

POST = 'http.post: "http://pay.test/**"'
TWO = "approvals: {people: 2}"
CONFIG = """\
apiVersion: ringfence/v1
kind: Kernel
spec:
  callback: {listen: "127.0.0.1:8766", people: {anna: {key: {secret: anna}, account: root}, bert: {key: {secret: bert}}}}
"""
STRICT = CONFIG + '  ceilings: {approvals: {people: 2, for: [{http.post: "http://pay.test/big"}]}}\n'
FOREIGN = CONFIG + "  ceilings: {approvals: {not_submitter: true}}\n"


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory, CONFIG) as heart:
            yield heart


async def asked(heart: Heart, besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """The one approval that waits besides those known, once its call waits for it."""
    async with asyncio.timeout(20):
        while True:
            found = (await approvals.approvals(heart.kernel, "", everything=False))["approvals"]
            flying = {
                f.waits_for.id
                for t in heart.core.threads.values()
                for f in t.flights.values()
                if f.waits_for is not None
            }
            fresh = [a for a in found if a["id"] in flying and a["id"] not in besides]
            if fresh:
                return fresh[0]
            await asyncio.sleep(0)


async def yes(heart: Heart, waits: dict[str, Any], who: str, **more: Any) -> dict[str, Any]:
    values = {"arguments": b"", "reason": "", "for_ms": 0, **more}
    return await deciding.approve(heart.kernel, waits["id"], operator=who, **values)


async def reconfigured(heart: Heart, text: str) -> None:
    path = heart.kernel.ownership.resources.path
    assert path is not None
    path.write_text(text)
    await house.reload(heart.kernel, "root")


async def test_two_people_approve_it_and_one_of_them_twice_is_one(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST], more=TWO)
    call = heart.begin(thread, 0)
    waits = await asked(heart)
    assert (waits["people"], waits["approved_by"]) == (2, [])
    first = await yes(heart, waits, "anna", reason="fine")
    assert (first["state"], first["approved_by"], first["people"]) == ("pending", ["anna"], 2)
    # By her account she is the same person.
    for again in ("anna", "root"):
        with pytest.raises(Problem, match=r"anna approved a[0-9]+ already .* counts once; one more person"):
            await yes(heart, waits, again)
    assert heart.post.effects == []
    assert not call.done()
    second = await yes(heart, waits, "bert", reason="mine too")
    assert (second["state"], second["approved_by"]) == ("approved", ["anna", "bert"])
    assert (await call).failure is None
    assert len(heart.post.effects) == 1
    shown = await approvals.show(heart.kernel, waits["id"])
    assert (shown["decided_by"], shown["reason"]) == ("anna, bert", "fine; mine too")
    assert [(v["by"], v["verdict"]) for v in shown["votes"]] == [("anna", "approved"), ("bert", "approved")]
    (row,) = [r for r in await heart.core.store.steps(thread.key) if r.outcome == "ok"]
    assert json.loads(row.body)["approval"]["people"] == ["anna", "bert"]
    said = [r async for r in heart.core.store.audit(AgentKey(-heart.core.kernel))]
    told = [json.loads(r.body) for r in said if r.action == "operator.approve"]
    assert [(t["operator"], t["people"]) for t in told] == [("anna", 2), ("bert", 2)]


async def test_one_denial_denies_whoever_approved_before(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST], more=TWO)
    call = heart.begin(thread, 0)
    waits = await asked(heart)
    await yes(heart, waits, "anna")
    await deciding.deny(heart.kernel, waits["id"], "not that one", "bert")
    failure = (await call).failure
    assert isinstance(failure, Denied)
    assert "bert denied" in failure.message
    with pytest.raises(Problem, match="already denied by bert"):
        await yes(heart, waits, "carl")
    assert heart.post.effects == []


async def test_who_approves_other_arguments_takes_the_force_from_what_was_approved(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST], more=TWO)
    call = heart.begin(thread, 0)
    waits = await asked(heart)
    await yes(heart, waits, "anna")
    edited = json.dumps({"url": f"{URL}/less"}).encode()
    second = await yes(heart, waits, "bert", arguments=edited)
    assert (second["state"], second["approved_by"], second["voided"]) == ("pending", ["bert"], ["anna"])
    shown = await approvals.show(heart.kernel, waits["id"])
    assert shown["proposed"]["url"] == f"{URL}/less"
    assert shown["votes"][0]["voided_by"] == "bert"
    # Whoever approves the agent's own arguments again is for something else than bert is.
    third = await yes(heart, waits, "carl")
    assert (third["state"], third["approved_by"]) == ("pending", ["carl"])
    # A digest stands for what was seen: the one of what bert proposed is no longer about anything that waits.
    with pytest.raises(Problem, match="other arguments"):
        await yes(heart, waits, "anna", digest=shown["digest"])
    await yes(heart, waits, "bert", arguments=edited)
    last = await yes(heart, waits, "anna", digest=shown["digest"])
    assert (last["state"], last["approved_by"]) == ("approved", ["bert", "anna"])
    assert (await call).failure is None
    bodies = [json.loads(r.body) async for r in heart.core.store.audit(thread.key)]
    assert [b["arguments"]["url"] for b in bodies if "arguments" in b][-1] == f"{URL}/less"
    assert bodies[-1]["approval"] | {"at": ""} == {
        "id": waits["id"],
        "by": "bert, anna",
        "at": "",
        "edited": True,
        "people": ["bert", "anna"],
    }


async def test_votes_at_the_same_time_are_all_counted(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST], more="approvals: {people: 4}")
    call = heart.begin(thread, 0)
    waits = await asked(heart)
    done = await asyncio.gather(*(yes(heart, waits, who) for who in ("a", "b", "c", "d")))
    assert sorted(len(one["approved_by"]) for one in done) == [1, 2, 3, 4]
    assert [one["state"] for one in done].count("approved") == 1
    assert (await call).failure is None
    assert len(heart.post.effects) == 1


async def test_what_holds_for_longer_needs_as_many_and_the_shortest_time_counts(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST], more=TWO)
    for step, times in enumerate(((3_600_000, 0), (3_600_000, 7_200_000))):
        call = heart.begin(thread, step)
        waits = await asked(heart)
        await yes(heart, waits, "anna", for_ms=times[0])
        last = await yes(heart, waits, "bert", for_ms=times[1])
        assert (last["good_until"] is not None) is all(times)
        assert (await call).failure is None
    record = await heart.core.store.approval(int(waits["id"][1:]))
    assert record is not None
    assert record.good_until is not None
    assert record.decided_at is not None
    assert (record.good_until - record.decided_at).total_seconds() == pytest.approx(3600, abs=1)
    assert (await heart.call(thread, 2)).failure is None  # nobody is asked
    # An agent alike has none of it.
    other = await heart.agent(ask=[POST], more=TWO, name="other")
    heart.begin(other, 0)
    assert (await asked(heart))["agent"] == other.id


async def test_the_operators_number_holds_whatever_a_manifest_says(heart: Heart) -> None:
    await reconfigured(heart, STRICT)
    thread = await heart.agent(ask=[POST], more="approvals: {people: 1}")
    call = heart.begin(thread, 0, url="http://pay.test/small")
    small = await asked(heart)
    assert small["people"] == 1
    # Edited into one that needs two, it is asked anew, of two.
    await yes(heart, small, "anna", arguments=b'{"url":"http://pay.test/big"}')
    big = await asked(heart, (small["id"],))
    assert (big["people"], big["state"], heart.post.effects) == (2, "pending", [])
    await yes(heart, big, "anna")
    await yes(heart, big, "bert")
    assert (await call).failure is None


async def test_a_number_that_was_raised_meanwhile_counts(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST])
    url = "http://pay.test/big"
    call = heart.begin(thread, 0, url=url)
    one = await asked(heart)
    assert one["people"] == 1
    await reconfigured(heart, STRICT)
    two = await asked(heart, (one["id"],))
    assert two["people"] == 2
    with pytest.raises(Problem, match="closed at"):
        await yes(heart, one, "anna")
    # And so where one person approved it while no kernel ran.
    call.cancel()
    await reconfigured(heart, CONFIG)
    thread = await heart.agent(ask=[POST])
    heart.begin(thread, 0, url=url)
    one = await asked(heart, (two["id"],))
    heart.core.threads.pop(thread.key)
    assert (await yes(heart, one, "anna"))["state"] == "approved"
    await reconfigured(heart, STRICT)
    record = await heart.core.store.agent_by_key(thread.key)
    assert record is not None
    await heart.ownership.adopt(record)
    three = await asked(heart, (two["id"],))
    assert (three["agent"], three["people"], heart.post.effects) == (thread.id, 2, [])


async def test_votes_outlive_their_kernel(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST], more=TWO)
    heart.begin(thread, 0)
    waits = await asked(heart)
    await yes(heart, waits, "anna")
    again = await heart.adopted_again(thread)
    (flight,) = again.flights.values()
    with pytest.raises(Problem, match="counts once"):
        await yes(heart, waits, "anna")
    await yes(heart, waits, "bert")
    assert flight.answer is not None
    assert (await flight.answer).failure is None
    assert len(heart.post.effects) == 1


async def test_a_child_needs_as_many_as_its_parent(heart: Heart) -> None:
    parent = await heart.agent(ask=[POST], more=TWO)
    child = await heart.agent(ask=[POST], name="child")
    child.rights = Rights(
        agent=child.id,
        manifest=child.manifest,
        kernel_file=child.rights.kernel_file,
        grants=list(child.rights.grants.values()),
        epoch=child.rights.epoch,
        parent=parent.rights,
    )
    heart.begin(child, 0)
    waits = await asked(heart)
    assert (waits["agent"], waits["people"]) == (child.id, 2)


async def test_who_submitted_it_can_be_kept_from_approving(heart: Heart) -> None:
    await reconfigured(heart, FOREIGN)
    thread = await heart.agent(ask=[POST], submitted_by="root")
    call = heart.begin(thread, 0)
    waits = await asked(heart)
    assert waits["not_by"] == "root"
    for self in ("root", "anna"):  # anna works with this account
        with pytest.raises(Problem, match="`anna`, as `root`, submitted the agent") as caught:
            await yes(heart, waits, self)
        assert caught.value.exit_code == 3
    await yes(heart, waits, "bert")
    assert (await call).failure is None


async def test_a_message_counts_once_also_when_its_vote_was_voided(heart: Heart) -> None:
    thread = await heart.agent(ask=[POST], more=TWO)
    heart.begin(thread, 0)
    waits = await asked(heart)
    await yes(heart, waits, "anna", message="msg_1")
    await yes(heart, waits, "bert", arguments=json.dumps({"url": f"{URL}/less"}).encode())
    with pytest.raises(Problem, match="had before") as caught:
        await yes(heart, waits, "anna", message="msg_1")
    assert caught.value.reason == "Replayed"
    shown = await approvals.show(heart.kernel, waits["id"])
    assert shown["approved_by"] == ["bert"]
