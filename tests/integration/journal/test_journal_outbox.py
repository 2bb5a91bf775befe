"""The outbox: what transactions put there, who takes it out, and what is dropped."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from ringfence.policy.outreach import EVENTS

NOW = datetime.now(UTC)
ASK = """
insert into approvals (agent, step, branch, lane, lane_step, action, resource, effect, arguments, digest, asks, expires_at)
values (%s, %s, 0, '0', 0, %s, %s, 'EXTERNAL', '{"body":"private"}', 'aa', '[]', now() + interval '1 hour')
returning key
"""


async def hooks(world: Any, data_dir: str = "/data", **events: Any) -> None:
    await world.store.declare_webhooks(events, "host", data_dir)


async def taken(world: Any, webhook: str = "chat", limit: int = 100, lease_s: float = 600.0) -> list[Any]:
    return await world.store.claim_outbox(webhook, limit, lease_s)


async def asked(
    world: Any, agent: Any, step: int = 1, action: str = "http.post", on: str = "http://a/b?c=d"
) -> int:
    return (await world.sql(ASK, (agent.key, step, action, on)))[0][0]


def told(events: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    bodies = [json.loads(event.body) for event in events]
    return [(body["type"], body["data"]) for body in bodies]


def vote(by: str, **more: Any) -> dict[str, Any]:
    return {"by": by, "verdict": "approved", "reason": "", "edited": None, **more}


async def test_every_end_of_an_approval_is_told_by_the_transaction_that_makes_it(world):
    agent = await world.agent(None)
    await hooks(world, chat=EVENTS)
    ends = {
        "approved": lambda key: world.store.vote_approval(key, vote("anna")),
        "denied": lambda key: world.store.decide_approval(key, "denied", "anna", "no", vote("anna")),
        "expired": lambda key: world.store.decide_approval(key, "expired", "the kernel", "late"),
        "voided": lambda key: world.store.withdraw_approval(key, "rolled back"),
        "killed": lambda _key: world.store.set_agent(agent.key, state="killed"),
    }
    for step, (state, end) in enumerate(ends.items()):
        key = await asked(world, agent, step)
        await end(key)
        (first, one), (last, two) = told(await taken(world))
        assert (first, last) == ("approval.asked", "approval.decided"), state
        assert (one["state"], two["state"]) == ("pending", "voided" if state == "killed" else state)
        assert (one["agent"], one["approval"], one["resource"]) == (agent.id, f"a{key}", "http://a/b")
        assert "private" not in json.dumps([one, two])
        await world.sql("delete from outbox")


async def test_a_transaction_that_is_undone_has_told_nobody(world):
    agent = await world.agent(None)
    await hooks(world, chat=EVENTS)
    async with await psycopg.AsyncConnection.connect(world.dsn) as connection:
        await connection.execute(ASK, (agent.key, 1, "now", ""))
        await connection.rollback()
    assert await taken(world) == []


async def test_only_what_a_receiver_wants_is_kept_for_it(world):
    agent = await world.agent(None)
    await hooks(world, chat=["approval.asked"], pager=["agent.failed", "agent.unknown", "agent.budget"])
    key = await asked(world, agent)
    await world.store.vote_approval(key, vote("anna"))
    # A copy that is not whole yet has failed for nobody.
    await world.store.set_agent(agent.key, state="failed", error="not whole")
    await world.store.set_agent(agent.key, state="running", started_at=NOW)
    await world.store.set_agent(agent.key, state="failed", error="exit code 1")
    await world.store.set_agent(agent.key, restarts=2)
    await world.store.set_agent(agent.key, state="unknown", waiting_for="the outcome of step 3")
    await world.store.set_agent(agent.key, state="parked", waiting_for="approval a1")
    await world.store.set_agent(agent.key, state="parked", waiting_for="budget `tokens`")
    assert [kind for kind, _ in told(await taken(world))] == ["approval.asked"]
    assert [
        (kind, data.get("error"), data.get("waiting_for")) for kind, data in told(await taken(world, "pager"))
    ] == [
        ("agent.failed", "exit code 1", None),
        ("agent.unknown", None, "the outcome of step 3"),
        ("agent.budget", None, "budget `tokens`"),
    ]


async def test_an_event_is_one_kernels_until_its_lease_is_over(world):
    agent = await world.agent(None)
    await hooks(world, chat=EVENTS, other=EVENTS)
    for step in range(5):
        await asked(world, agent, step)
    first, second = await taken(world, limit=3), await taken(world, limit=3)
    assert [len(first), len(second), len(await taken(world))] == [3, 2, 0]
    assert len({event.message for event in (*first, *second)}) == 5
    assert len(await taken(world, "other")) == 5  # each receiver has its own
    await world.sql("update outbox set next_at = now() where key = %s", (first[0].key,))  # its kernel died
    (again,) = await taken(world)
    assert (again.message, again.body, again.attempts) == (first[0].message, first[0].body, 2)
    await world.store.outbox_sent(again.key)
    await world.store.outbox_failed(first[1].key, 600, "no answer")
    one = {hook.name: hook for hook in await world.store.webhooks(["chat"])}["chat"]
    assert (one.waiting, one.last_error) == (4, "no answer")
    assert one.failing_since is not None
    assert one.delivered_at is not None
    await world.store.hurry_outbox(["chat"])
    assert len(await taken(world)) == 4


async def test_a_claim_does_not_wait_for_one_that_is_under_way(world):
    agent = await world.agent(None)
    await hooks(world, chat=EVENTS)
    for step in range(2):
        await asked(world, agent, step)
    async with await psycopg.AsyncConnection.connect(world.dsn) as connection:
        await connection.execute("select from outbox order by key limit 1 for update")
        (event,) = await taken(world)
        assert told([event])[0][1]["step"] == 1


async def test_what_is_too_old_or_too_much_is_dropped_and_counted(world):
    agent = await world.agent(None)
    await hooks(world, chat=EVENTS, other=EVENTS)
    for step in range(6):
        await asked(world, agent, step)
    await world.sql(
        "update outbox set created_at = now() - interval '1 day' where webhook = 'chat' and key < 4"
    )
    await world.store.sweep_outbox(["chat"], 3600, 4)
    assert [data["step"] for _, data in told(await taken(world))] == [2, 3, 4, 5]
    counts = {
        hook.name: (hook.waiting, hook.dropped) for hook in await world.store.webhooks(["chat", "other"])
    }
    assert counts == {"chat": (4, 2), "other": (6, 0)}


async def test_a_data_directory_takes_back_what_it_declared_and_nothing_else(world):
    agent = await world.agent(None)
    await hooks(world, "/one", chat=EVENTS, pager=EVENTS)
    await hooks(world, "/two", other=EVENTS)
    await asked(world, agent)
    await hooks(world, "/one", pager=["agent.failed"])
    names = [hook.name for hook in await world.store.webhooks(["chat", "pager", "other"])]
    assert names == ["other", "pager"]
    # What waited for the one that is gone is gone; what waits for others still does.
    assert await world.sql("select webhook from outbox order by webhook") == [("other",), ("pager",)]


@pytest.mark.parametrize("edited", [None, '{"a":1}'])
async def test_a_vote_counts_once_and_for_its_arguments(world, edited):
    agent = await world.agent(None)
    key = await asked(world, agent)
    await world.sql("update approvals set people = 3 where key = %s", (key,))
    assert await world.store.vote_approval(key, vote("anna", edited=edited)) is not None
    assert await world.store.vote_approval(key, vote("anna", edited=edited)) is None
    other = vote("bert", edited='{"a":2}', message="m1")
    after = await world.store.vote_approval(key, other)
    assert after is not None
    assert [v["by"] for v in after.living] == ["bert"]
    assert await world.store.vote_approval(key, vote("carl", message="m1")) is None
    await world.sql("update approvals set expires_at = now() where key = %s", (key,))
    assert await world.store.vote_approval(key, vote("carl")) is None
