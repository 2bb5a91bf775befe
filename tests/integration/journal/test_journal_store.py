"""The store: agents, grants, readings of the journal, notifications."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from ringfence.kernel.facts import Marks, Taint
from ringfence.kernel.journal.deltas import pack
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import (
    Ambiguous,
    BadRow,
    Damaged,
    Entry,
    JournalError,
    Phase,
    Row,
    Unavailable,
)
from ringfence.syscalls.base import CheckpointSave, StateChange


async def test_an_agent_is_found_by_id_and_by_a_name_that_only_it_has(world):
    kernel = await world.kernel()
    one = await world.agent(kernel, "solo", [("allow", 'fs.read: "/workspace/**"'), ("ask", "now")])
    assert one.id.startswith("solo-")
    assert len(one.id) == len("solo-") + 5
    assert one.thread == one.id
    assert (one.uid, one.owner, one.epoch, one.state, one.branch) == (
        100_000 + one.key,
        kernel.key,
        1,
        "pending",
        0,
    )
    assert (one.labels, one.input) == ({"team": "finance"}, b"\0\xff")
    assert await world.store.agent("solo") == await world.store.agent(one.id) == one
    assert await world.store.agent_by_key(one.key) == one
    assert [(g.verdict, g.rule, g.origin) for g in await world.store.grants(one.key)] == [
        ("allow", 'fs.read: "/workspace/**"', "manifest"),
        ("ask", "now", "manifest"),
    ]
    two = await world.agent(None, "solo")
    assert two.owner is None
    with pytest.raises(Ambiguous) as caught:
        await world.store.agent("solo")
    assert caught.value.ids == [two.id, one.id]
    # A name that looks like another agent's id does not hide that agent.
    await world.agent(kernel, one.id)
    assert (await world.store.agent(one.id)).key == one.key
    for word in ("nobody", "", "a\0b", "'; drop table agents"):
        assert await world.store.agent(word) is None


async def test_setting_fields_of_an_agent(world):
    agent = await world.agent(None)
    now = datetime.now(UTC)
    await world.store.set_agent(agent.key, state="failed", error="a\0b\ud800", exit_code=3, ended_at=now)
    changed = await world.store.agent_by_key(agent.key)
    assert (changed.state, changed.error, changed.exit_code) == ("failed", "a\N{REPLACEMENT CHARACTER}b?", 3)
    assert changed.ended_at == now
    # Whoever leaves the time out: an end stays when it was, and what goes on has none.
    await world.store.set_agent(agent.key, state="killed")
    assert (await world.store.agent(agent.id)).ended_at == now
    await world.store.set_agent(agent.key, state="paused")
    assert (await world.store.agent(agent.id)).ended_at is None
    await world.store.set_agent(agent.key, state="failed")
    assert (await world.store.agent(agent.id)).ended_at is not None
    await world.store.set_agent(agent.key, state="running", exit_code=None, ended_at=None, restarts=2)
    changed = await world.store.agent_by_key(agent.key)
    assert (changed.state, changed.exit_code, changed.ended_at, changed.restarts) == (
        "running",
        None,
        None,
        2,
    )
    assert changed.error != ""
    for wrong in ({"epoch": 9}, {"state": None}, {"manifest": "x"}):
        with pytest.raises(TypeError):
            await world.store.set_agent(agent.key, **wrong)
    with pytest.raises(JournalError):
        await world.store.set_agent(agent.key, state="confused")
    assert [a.key for a in await world.store.agents(False)] == [agent.key]
    await world.store.set_agent(agent.key, state="done")
    assert await world.store.agents(False) == []
    assert len(await world.store.agents(True)) == 1


async def test_text_that_cannot_be_stored_is_refused_in_one_line(world):
    with pytest.raises(BadRow) as caught:
        await world.agent(None, "nul\0")
    assert "\n" not in str(caught.value)


async def test_ended_agents_and_living_owners_are_not_taken_over(world):
    dead, alive, heir = (
        await world.kernel(lease_s=0, host="elsewhere"),
        await world.kernel(data_dir="/other"),
        await world.kernel(data_dir="/third"),
    )
    lost, ended, kept, free = (
        await world.agent(dead),
        await world.agent(dead),
        await world.agent(alive),
        await world.agent(None),
    )
    await world.store.set_agent(ended.key, state="done")
    epoch, _ = await world.store.revoke(lost.key, None)
    taken = await world.store.claim_agents(heir.key, heir.fence)
    assert [agent.key for agent in taken] == [lost.key, free.key]
    assert all(agent.owner == heir.key for agent in taken)
    # The old owner is gone with all it had under way, so the revocation it never saw is settled.
    assert taken[0].acked_epoch == epoch
    assert await world.store.wait_acked(lost.key, epoch, 5) == {"owner_lost": True}
    assert (await world.store.agent_by_key(kept.key)).owner == alive.key
    assert await world.store.claim_agents(heir.key, heir.fence) == []
    fences = {record.key: (record.fence, record.alive) for record in await world.store.kernels()}
    assert fences[dead.key][0] < 0
    assert fences[alive.key] == (alive.fence, True)


async def test_a_dead_predecessor_on_this_data_directory_is_taken_over_before_its_lease_ends(world):
    before = await world.kernel(data_dir="/same")
    agent = await world.agent(before)
    after = await world.kernel(data_dir="/same")
    assert after.fence > before.fence
    assert [a.key for a in await world.store.claim_agents(after.key, after.fence)] == [agent.key]
    assert not await world.store.heartbeat(before.key, before.fence, 60)
    await world.store.release_agent(agent.key, after.key)
    third = await world.kernel(data_dir="/else")
    assert [a.key for a in await world.store.claim_agents(third.key, third.fence)] == [agent.key]
    await world.store.release_kernel(third.key, third.fence)
    assert not await world.store.heartbeat(third.key, third.fence, 60)
    assert [a.key for a in await world.store.claim_agents(after.key, after.fence)] == [agent.key]


async def test_more_agents_than_one_claim_takes_at_once(world, monkeypatch):
    monkeypatch.setattr("ringfence.kernel.journal.store_kernels.CLAIM_BATCH", 3)
    left = [await world.agent(None) for _ in range(9)]
    kernel = await world.kernel()
    taken = await world.store.claim_agents(kernel.key, kernel.fence)
    assert [agent.key for agent in taken] == [agent.key for agent in left]


async def test_grants_are_added_used_up_and_revoked(world):
    agent = await world.agent(None, grants=[("allow", "a"), ("allow", "b")])
    first, second = await world.store.grants(agent.key)
    limited, epoch = await world.store.add_grant(agent.key, "c", "allow", "ann", None, 2)
    assert (epoch, limited.origin, limited.created_by, limited.uses_left) == (2, "operator", "ann", 2)
    past, epoch = await world.store.add_grant(
        agent.key, "d", "ask", "ann", datetime.now(UTC) - timedelta(seconds=1), None
    )
    assert epoch == 3
    assert [g.id for g in await world.store.grants(agent.key)] == [first.id, second.id, limited.id]
    assert len(await world.store.grants(agent.key, active=False)) == 4
    assert await world.store.use_grant(first.id) is None
    assert [await world.store.use_grant(limited.id) for _ in range(3)] == [1, 0, -1]
    assert [await world.store.use_grant(word) for word in ("g999999", "x", "g", "g-1", "g²")] == [-1] * 5
    assert limited.id not in [g.id for g in await world.store.grants(agent.key)]
    epoch, revoked = await world.store.revoke(agent.key, [first.id, "g999999", "nonsense"])
    assert (epoch, [g.id for g in revoked]) == (4, [first.id])
    assert revoked[0].revoked_at is not None
    assert await world.store.use_grant(first.id) == -1
    epoch, revoked = await world.store.revoke(agent.key, [first.id])
    assert (epoch, revoked) == (5, [])
    other = await world.agent(None, grants=[("allow", "x")])
    epoch, revoked = await world.store.revoke(agent.key, None)
    assert {g.id for g in revoked} == {second.id, limited.id, past.id}
    assert len(await world.store.grants(other.key)) == 1


async def test_a_limited_grant_is_never_used_more_often_than_it_says(world):
    agent = await world.agent(None)
    grant, _ = await world.store.add_grant(agent.key, "c", "allow", "ann", None, 5)
    used = await asyncio.gather(*[world.store.use_grant(grant.id) for _ in range(12)])
    assert sorted(used) == [-1] * 7 + [0, 1, 2, 3, 4]


async def test_waiting_for_an_acknowledgement(world):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    listener = world.store.listen(["ringfence_epoch"], lambda *what: heard.put_nowait(what))
    world.closing.append(listener.stop)
    assert await heard.get() == ("ringfence_epoch", "")
    epoch, _ = await world.store.revoke(agent.key, None)
    assert await heard.get() == ("ringfence_epoch", f'{{"agent" : {agent.key}, "epoch" : {epoch}}}')
    with pytest.raises(TimeoutError):
        await world.store.wait_acked(agent.key, epoch, 0.05)
    waiting = asyncio.create_task(world.store.wait_acked(agent.key, epoch, 30))
    await world.store.ack_epoch(agent.key, epoch - 1, {"late": True})
    await world.store.ack_epoch(agent.key, epoch, {"affected": [1]})
    assert await waiting == {"affected": [1]}
    assert (await world.store.agent_by_key(agent.key)).acked_epoch == epoch
    later, _ = await world.store.revoke(agent.key, None)
    waiting = asyncio.create_task(world.store.wait_acked(agent.key, later, 30))
    await world.store.release_kernel(kernel.key, kernel.fence)
    assert await waiting is None
    orphan = await world.agent(None)
    assert await world.store.wait_acked(orphan.key, 99, 30) is None


async def test_listening_goes_on_after_its_connection_is_lost(world):
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def callback(channel, payload):
        heard.put_nowait((channel, payload))
        if payload == "bad":
            raise ValueError("a payload nobody can read")

    listener = world.store.listen(["wake"], callback)
    world.closing.append(listener.stop)
    assert await heard.get() == ("wake", "")
    await world.store.notify("wake", "bad")
    await world.store.notify("wake", "good")
    assert [await heard.get(), await heard.get()] == [("wake", "bad"), ("wake", "good")]
    await world.sql(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'ringfence listen'"
    )
    assert await heard.get() == ("wake", "")
    await world.store.notify("wake", "again")
    assert await heard.get() == ("wake", "again")
    with pytest.raises(JournalError):
        await world.store.notify("wake", "x" * 9000)


async def test_branches_lineages_and_what_replay_reads(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    store = world.store

    async def call(step, branch, **more):
        await journal.append(entry(agent.key, step, branch=branch, phase=Phase.INTENT, outcome="", **more))
        await journal.append(entry(agent.key, step, branch=branch, effect_id=f"{step:04x}", **more))

    for step in range(1, 6):
        await call(step, 0)
    first = await store.add_branch(agent.key, 0, 3)
    assert (first.branch, first.parent, first.cut_step) == (1, 0, 3)
    for step in (6, 7):
        await call(step, 1)
    second = await store.add_branch(agent.key, 1, 6)
    assert second.branch == 2
    await call(8, 2)
    assert (await store.agent_by_key(agent.key)).branch == 2
    assert [b.branch for b in await store.branches(agent.key)] == [0, 1, 2]
    lineage = [(0, 3), (1, 6), (2, 1 << 62)]

    async def outcomes(after):
        return [row.step async for row in store.lineage_outcomes(agent.key, lineage, after)]

    assert await outcomes(0) == [1, 2, 3, 6, 8]
    assert await outcomes(2) == [3, 6, 8]
    assert await outcomes(8) == []
    rows = await store.steps(agent.key, after_step=6, limit=3)
    assert [(row.step, row.phase) for row in rows] == [
        (7, Phase.INTENT),
        (7, Phase.OUTCOME),
        (8, Phase.INTENT),
    ]
    assert [row.phase for row in await store.step(agent.key, 4)] == [Phase.INTENT, Phase.OUTCOME]
    effects = [found async for found in store.effect_ids(agent.key)]
    assert effects == [(f"{step:04x}", step, "ok") for step in range(1, 9)]
    assert [found async for found in store.effect_ids(agent.key, "0003")] == [("0003", 3, "ok")]


async def test_long_readings_come_in_pages_and_miss_nothing(world, entry, monkeypatch):
    monkeypatch.setattr("ringfence.kernel.journal.store_journal.PAGE_ROWS", 7)
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    # A step may have several outcomes, as one that was unknown and then settled: pages part them too.
    await asyncio.gather(
        *[journal.append(entry(agent.key, step // 3 + 1, effect_id=f"{step // 3:x}")) for step in range(63)]
    )
    found = [row.pos async for row in world.store.lineage_outcomes(agent.key, [(0, 99)], 0)]
    assert found == list(range(1, 64))
    assert [row.pos for row in await world.rows(agent.key)] == found
    assert [e[1] async for e in world.store.effect_ids(agent.key)] == list(range(1, 22))


async def test_unfinished_calls_with_their_last_progress_and_counts(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)

    async def write(step, phase, **more):
        await journal.append(entry(agent.key, step, phase=phase, **more))

    assert await world.store.unfinished(agent.key) == []
    assert (await world.store.counts(agent.key))["max_step"] == 0
    await write(1, Phase.INTENT, outcome="")
    await write(1, Phase.OUTCOME)
    await write(2, Phase.INTENT, outcome="", effect="DESTROY")
    await write(2, Phase.PROGRESS, outcome="", body=b"1")
    await write(3, Phase.INTENT, outcome="", effect="EXTERNAL")
    await write(2, Phase.PROGRESS, outcome="", body=b"2")
    await write(4, Phase.OUTCOME, verdict="deny", outcome="denied")
    await write(5, Phase.OUTCOME, outcome="refused")
    await write(3, Phase.INTENT, outcome="", effect="EXTERNAL", body=b"again")
    await write(6, Phase.OUTCOME, effect="DESTROY", outcome="error", branch=4)
    await journal.append(Entry(row=Row(chain=agent.key, phase=Phase.EVENT, action="agent.killed")))
    found = await world.store.unfinished(agent.key)
    assert [(intent.step, intent.body) for intent, _ in found] == [(2, b"{}"), (3, b"again")]
    assert found[0][1].body == b"2"
    assert found[1][1] is None
    assert await world.store.counts(agent.key) == {
        "max_step": 6,
        "steps": 6,
        "calls": 4,
        "destructive": 2,
        "external": 1,
        "denied": 1,
        "unfinished": 2,
    }


async def test_the_newest_checkpoint_of_a_lineage_and_a_damaged_one(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    for step, branch in ((2, 0), (5, 0), (7, 1)):
        work = CheckpointSave(state=b'{"at":%d}' % step, schema_version=step, next_child=0)
        await journal.append(entry(agent.key, step, branch=branch, atomic=work))
    latest = world.store.latest_checkpoint
    assert (await latest(agent.key, [(0, 1 << 62)])).step == 5
    assert (await latest(agent.key, [(0, 4), (1, 1 << 62)])).step == 7
    assert (await latest(agent.key, [(0, 4), (1, 6)])).step == 2
    assert await latest(agent.key, [(0, 1)]) is None
    await world.sql("update checkpoints set state = '{\"at\":9}' where step = 7")
    with pytest.raises(Damaged, match=r"`7` \(schema version 7\)"):
        await latest(agent.key, [(0, 4), (1, 1 << 62)])
    assert (await latest(agent.key, [(0, 4), (1, 1 << 62)], before_step=7)).step == 2


async def test_checkpoints_of_earlier_releases_are_read(world):
    """A row of theirs holds the state as it is, and says nothing of packing; so does a line of their exports."""
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    state = b'{"page":7}'
    line = {
        "step": 3,
        "branch": 0,
        "lane_step": 2,
        "schema_version": 1,
        "next_child": 4,
        "state": "\\x" + state.hex(),
        "digest": "\\x" + hashlib.sha256(state).hexdigest(),
        "at": "2026-11-01T00:00:00+00:00",
    }
    await world.store.import_row("checkpoints", agent.key, line)
    found = await world.store.latest_checkpoint(agent.key, [(0, 9)])
    assert (found.step, found.lane_step, found.next_child, found.state) == (3, 2, 4, state)
    # The next one rests on it.
    assert (found.base.step, found.base.links, found.base.delta_bytes) == (3, 0, 0)


async def test_a_damaged_link_is_told_as_the_checkpoint_that_rests_on_it(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    base = None
    for step in range(1, 4):
        save = CheckpointSave(
            state=b'{"text":"%s","at":%d}' % (b"abcdefg" * 99, step), schema_version=1, next_child=0
        )
        packed = pack(save, base)
        await journal.append(entry(agent.key, step, atomic=packed))
        base = packed.as_base(step)
    latest = world.store.latest_checkpoint
    assert (await latest(agent.key, [(0, 9)])).base == base
    await world.sql("update checkpoints set state = overlay(state placing '???' from 9 for 3) where step = 2")
    with pytest.raises(Damaged, match="`3`"):
        await latest(agent.key, [(0, 9)])
    with pytest.raises(Damaged, match="`2`"):
        await latest(agent.key, [(0, 9)], before_step=3)
    assert (await latest(agent.key, [(0, 9)], before_step=2)).step == 1


async def test_restoring_state_lists_what_others_changed(world, entry):
    kernel = await world.kernel()
    a, b = await world.agent(kernel, "a"), await world.agent(kernel, "b")
    journal = await world.journal(kernel, a, b)
    await journal.append(entry(a.key, 1, atomic=StateChange(puts={"x": b"1", "y": b"1", "z": b"1"})))
    await journal.append(entry(a.key, 2, atomic=StateChange(puts={"x": b"2", "y": b"2", "new": b"2"})))
    await journal.append(entry(b.key, 1, atomic=StateChange(puts={"y": b"3"})))
    after = await world.store.state_versions_after(a.id, 1)
    assert [(v.key, v.version) for v in after] == [("new", 1), ("x", 2), ("y", 2)]
    conflicts = await world.store.restore_state(
        a.id, [("x", 2, b"1"), ("y", 2, b"1"), ("new", 1, None), ("gone", 0, None)], 9
    )
    assert conflicts == [("y", 3, b.id)]
    # A kernel that comes after one which died right there finds its own work, and no conflict.
    assert (
        await world.store.restore_state(a.id, [("x", 2, b"1"), ("y", 2, b"1"), ("new", 1, None)], 9)
        == conflicts
    )
    values = {key: await world.store.state_get(key) for key in ("x", "y", "z", "new", "gone")}
    assert (values["x"].version, values["x"].value, values["x"].step) == (3, b"1", 9)
    assert (values["y"].version, values["y"].value) == (3, b"3")
    assert values["z"].version == 1
    assert (values["new"].version, values["new"].value) == (2, None)
    assert values["gone"] is None
    assert (await world.store.state_version("x", 2)).value == b"2"
    assert await world.store.restore_state(a.id, [], 10) == []


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://nobody@127.0.0.1:1/none",
        "host=/nonexistent dbname=x",
        "not a dsn",
        "postgresql://h:port/x",
    ],
)
async def test_a_database_that_is_away_or_a_dsn_that_cannot_be_read_is_one_clear_line(dsn):
    with pytest.raises(Unavailable) as caught:
        await Store.open(dsn)
    assert "\n" not in str(caught.value)


async def test_the_journal_cannot_be_changed_by_accident(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    await journal.append(entry(agent.key))
    for statement in ("delete from journal", "update journal set body = ''", "truncate journal"):
        with pytest.raises(Exception, match="append-only"):
            await world.sql(statement)
    assert (await world.store.ping()).split(".")[0].isdigit()


@pytest.mark.parametrize(
    "source", ["a page", 'a "file" with \\ and {"used":{"tokens":9}}, ünder', "x" * 3000]
)
async def test_what_a_tainted_call_of_a_model_used_counts(world, source):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    marks = Marks(tainted=Taint(step=1, source=source), taints=source).opening()
    body = marks + b'"used":{"tokens":7.0,"usd":0.5},"result":{"used":{"tokens":5}},"rules":[],"grants":[]}'
    row = Row(
        chain=agent.key, phase=Phase.OUTCOME, step=1, action="llm.complete", verdict="allow", outcome="ok"
    )
    row.body = body
    await journal.append(Entry(row=row))
    assert (await world.store.amounts(agent.key))[0] == {"tokens": 7.0, "usd": 0.5}
