"""Appending: what is written, in which order, and what one caller's row does to another's."""

from __future__ import annotations

import asyncio
import json

import pytest
from ringfence.kernel.journal import queue as queue_module
from ringfence.kernel.journal.chain import genesis, link, stored_image
from ringfence.kernel.journal.deltas import pack
from ringfence.kernel.journal.types import (
    BadRow,
    Entry,
    EpochMoved,
    OwnerMoved,
    Phase,
    Row,
    StateConflict,
    Unavailable,
)
from ringfence.syscalls.base import CheckpointSave, StateChange, StateDone


async def settled(*futures):
    return await asyncio.gather(*futures, return_exceptions=True)


def assert_chain(rows):
    previous = genesis(rows[0].chain)
    for nr, row in enumerate(rows, 1):
        assert row.pos == nr
        assert row.hash == link(previous, stored_image(row))
        previous = row.hash


@pytest.mark.parametrize("count", [1, 2, 8, 9, 200, 520])
async def test_rows_come_back_as_they_were_handed_in(world, entry, count):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    wanted = [
        entry(
            agent.key,
            step,
            epoch=1,
            phase=Phase.INTENT if step % 2 else Phase.OUTCOME,
            branch=step,
            lane=f"0.{step}",
            resource=f"/workspace/ä {step} \u2028 𝄞",
            effect_id=f"{step:064x}",
            digest=bytes([step % 256]) * 32,
            duration_us=-step,
            body=b'{"n":%d,"raw":"\0\xff"}' % step,
            started_us=1_700_000_000_000_000 + step,
        )
        for step in range(1, count + 1)
    ]
    assert await asyncio.gather(*map(journal.append, wanted)) == [None] * count
    rows = await world.rows(agent.key)
    assert len(rows) == count
    assert_chain(rows)
    for row, asked in zip(rows, wanted, strict=True):
        for name in Row.__slots__:
            assert getattr(row, name) == getattr(asked.row, name), name
    assert journal.head(agent.key) == (count, rows[-1].hash)
    assert journal.rows == count


async def test_many_agents_share_flushes_and_each_keeps_its_order(world, entry):
    kernel = await world.kernel()
    agents = [await world.agent(kernel, f"bot{n}") for n in range(12)]
    journal = await world.journal(kernel, *agents)

    async def work(agent):
        for step in range(1, 41):
            await journal.append(entry(agent.key, step, epoch=1))

    await asyncio.gather(*map(work, agents))
    for agent in agents:
        rows = await world.rows(agent.key)
        assert [row.step for row in rows] == list(range(1, 41))
        assert_chain(rows)
    assert journal.rows == 480
    assert journal.batches < 480


async def test_the_kernels_own_chain_needs_no_agent(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    event = Entry(row=Row(chain=-kernel.key, phase=Phase.EVENT, action="kernel.start"))
    await journal.append(event)
    await settled(*[journal.append(event) for _ in range(3)], journal.append(entry(agent.key, 1)))
    await settled(*[journal.append(event) for _ in range(20)], journal.append(entry(agent.key, 2)))
    rows = await world.rows(-kernel.key)
    assert len(rows) == 24
    assert_chain(rows)
    assert all(row.started_us > 0 for row in rows)
    assert [row.step for row in await world.rows(agent.key)] == [1, 2]


@pytest.mark.parametrize("others", [0, 3, 30])
async def test_a_moved_epoch_refuses_only_the_calls_decided_before(world, entry, others):
    kernel = await world.kernel()
    agent, bystander = await world.agent(kernel), await world.agent(kernel)
    journal = await world.journal(kernel, agent, bystander)
    epoch, _ = await world.store.revoke(agent.key, None)
    old, new, free, *rest = await settled(
        journal.append(entry(agent.key, 1, epoch=1)),
        journal.append(entry(agent.key, 2, epoch=epoch)),
        journal.append(entry(agent.key, 3)),
        *[journal.append(entry(bystander.key, step, epoch=1)) for step in range(1, others + 1)],
    )
    assert isinstance(old, EpochMoved)
    assert old.epoch == epoch == 2
    assert (new, free, rest) == (None, None, [None] * others)
    assert [row.step for row in await world.rows(agent.key)] == [2, 3]
    assert len(await world.rows(bystander.key)) == others


async def test_lone_calls_are_refused_one_by_one(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    await world.store.revoke(agent.key, None)
    with pytest.raises(EpochMoved):
        await journal.append(entry(agent.key, 1, epoch=1))
    await journal.append(entry(agent.key, 2, epoch=2))
    rows = await world.rows(agent.key)
    assert_chain(rows)
    assert [row.step for row in rows] == [2]


@pytest.mark.parametrize("count", [1, 3, 20])
async def test_a_fenced_or_lapsed_owner_commits_nothing(world, entry, count):
    lapsed, fenced, heir = (
        await world.kernel(lease_s=0),
        await world.kernel(data_dir="/a"),
        await world.kernel(data_dir="/a"),
    )
    first, second = await world.agent(lapsed), await world.agent(fenced)
    slow = await world.journal(lapsed, first)
    late = await world.journal(fenced, second)
    results = await settled(*[slow.append(entry(first.key, n + 1)) for n in range(count)])
    assert [type(result) for result in results] == [OwnerMoved] * count
    await late.append(entry(second.key, 1))
    taken = await world.store.claim_agents(heir.key, heir.fence)
    assert {agent.id for agent in taken} == {first.id, second.id}
    results = await settled(*[late.append(entry(second.key, n + 2)) for n in range(count)])
    assert [type(result) for result in results] == [OwnerMoved] * count
    assert not await world.store.heartbeat(fenced.key, fenced.fence, 60)
    now = await world.journal(heir, second)
    await now.append(entry(second.key, 9))
    rows = await world.rows(second.key)
    assert_chain(rows)
    assert [row.step for row in rows] == [1, 9]


async def test_an_agent_that_is_not_adopted_or_is_forgotten_is_refused(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel)
    with pytest.raises(OwnerMoved):
        await journal.append(entry(agent.key))
    await journal.adopt(agent.key)
    await journal.append(entry(agent.key))
    # A lone row is under way as soon as it is handed in; what comes meanwhile queues.
    sent, queued = journal.append(entry(agent.key, 2)), journal.append(entry(agent.key, 3))
    journal.forget(agent.key)
    done = await settled(sent, queued)
    assert done[0] is None
    assert isinstance(done[1], OwnerMoved)
    with pytest.raises(OwnerMoved):
        await journal.append(entry(agent.key, 3))
    with pytest.raises(KeyError):
        journal.head(agent.key)


@pytest.mark.parametrize(
    "wrong",
    [
        {"resource": "a\0b"},
        {"action": "a\0b"},
        {"resource": "\ud800"},
        {"lane": "\udfff"},
        {"effect_id": "\0"},
        {"step": 1 << 63},
        {"branch": 1 << 31},
        {"lane_step": -(1 << 31) - 1},
        {"duration_us": 1 << 70},
        {"body": b"x" * ((16 << 20) + 1)},
        {"atomic": StateChange(puts={"k\0": b"1"})},
        {"atomic": StateChange(reads={"k" * 2000: 0})},
        {"atomic": StateChange(deletes=["\ud800"])},
    ],
)
async def test_a_bad_row_fails_alone(world, entry, wrong):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    before, bad, after = await settled(
        journal.append(entry(agent.key, 1)),
        journal.append(entry(agent.key, **({"step": 2} | wrong))),
        journal.append(entry(agent.key, 3)),
    )
    assert (before, after) == (None, None)
    assert isinstance(bad, BadRow)
    assert "\n" not in str(bad)
    assert [row.step for row in await world.rows(agent.key)] == [1, 3]


@pytest.mark.parametrize("count", [4, 40])
async def test_a_row_that_only_the_database_refuses_is_found_and_fails_alone(world, entry, count):
    """Nothing in the kernel knows this constraint, as it would not know a trigger or a corrupt index."""
    await world.sql("alter table journal add constraint no_thirteen check (step <> 13)")
    kernel = await world.kernel()
    agents = [await world.agent(kernel), await world.agent(kernel)]
    journal = await world.journal(kernel, *agents)
    bad = count // 2
    results = await settled(
        *[journal.append(entry(agents[n % 2].key, 13 if n == bad else 100 + n)) for n in range(count)]
    )
    assert isinstance(results.pop(bad), BadRow)
    assert results == [None] * (count - 1)
    for agent in agents:
        assert_chain(await world.rows(agent.key))
    total = sum([len(await world.rows(agent.key)) for agent in agents])
    assert total == count - 1


async def test_state_changes_of_one_batch_see_each_other_and_conflicts_commit_nothing(world, entry):
    kernel = await world.kernel()
    a, b = await world.agent(kernel, "a"), await world.agent(kernel, "b")
    journal = await world.journal(kernel, a, b)

    def change(agent, step, **what):
        return journal.append(
            entry(
                agent.key,
                step,
                atomic=StateChange(**what),
                finish=lambda done: json.dumps(dict(done.versions)).encode(),
            )
        )

    first, second, stale, both, gone = await settled(
        change(a, 1, puts={"k": b"1"}),
        change(b, 1, reads={"k": 1}, puts={"k": b"2"}),
        change(a, 2, reads={"k": 1, "other": 0}, puts={"k": b"3", "other": b"x"}),
        change(b, 2, reads={"other": 0}, puts={"k": b"4", "l": b"5"}),
        change(a, 3, deletes=["k", "never"]),
    )
    assert first == StateDone(versions={"k": 1}, previous={"k": 0})
    assert second == StateDone(versions={"k": 2}, previous={"k": 1})
    assert isinstance(stale, StateConflict)
    assert stale.keys == {"k": (2, b.id, 1, 1)}
    assert both == StateDone(versions={"k": 3, "l": 1}, previous={"k": 2, "l": 0})
    assert gone == StateDone(versions={"k": 4, "never": 0}, previous={"k": 3, "never": 0})
    assert [row.step for row in await world.rows(a.key)] == [1, 3]
    assert [row.body for row in await world.rows(b.key)] == [b'{"k": 2}', b'{"k": 3, "l": 1}']
    key = await world.store.state_get("k")
    assert (key.version, key.value, key.agent, key.step) == (4, None, a.id, 3)
    assert await world.store.state_get("other") is None
    assert await world.store.state_get("never") is None
    history = [(v.key, v.version, v.value) for v in await world.store.state_versions_after(b.id, 0)]
    assert history == [("k", 2, b"2"), ("k", 3, b"4"), ("l", 1, b"5")]
    reborn = await change(b, 4, reads={"k": 4}, puts={"k": b"again"})
    assert reborn == StateDone(versions={"k": 5}, previous={"k": 0})


async def test_a_refused_entry_leaves_no_trace_of_its_atomic_work(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    await world.store.revoke(agent.key, None)

    def broken(_done):
        raise ZeroDivisionError

    results = await settled(
        journal.append(entry(agent.key, 1, epoch=1, atomic=StateChange(puts={"a": b"1"}))),
        journal.append(entry(agent.key, 2, epoch=2, atomic=StateChange(puts={"a": b"2"}), finish=broken)),
        journal.append(
            entry(agent.key, 3, epoch=1, atomic=CheckpointSave(state=b"{}", schema_version=1, next_child=0))
        ),
        journal.append(entry(agent.key, 4, finish=broken)),
        journal.append(entry(agent.key, 5, epoch=2, atomic=StateChange(reads={"a": 0}, puts={"b": b"1"}))),
    )
    assert [type(result) for result in results] == [
        EpochMoved,
        ZeroDivisionError,
        EpochMoved,
        ZeroDivisionError,
        StateDone,
    ]
    with pytest.raises(ZeroDivisionError):
        await journal.append(entry(agent.key, 6, finish=broken))
    assert await world.store.state_get("a") is None
    assert await world.store.latest_checkpoint(agent.key, [(0, 99)]) is None
    rows = await world.rows(agent.key)
    assert [row.step for row in rows] == [5]
    assert_chain(rows)


@pytest.mark.parametrize("prepared", [False, True])
async def test_a_checkpoint_commits_with_its_row_or_not_at_all(world, entry, prepared):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)

    def save(step, state=b'{"page":1}'):
        work = CheckpointSave(state=state, schema_version=3, next_child=2)
        return journal.append(
            entry(
                agent.key,
                step,
                atomic=pack(work, None) if prepared else work,
                finish=lambda done: b"null" if done is None else b"?",
            )
        )

    assert await save(4) is None
    again, other, plain = await settled(save(4), save(5), journal.append(entry(agent.key, 6)))
    assert isinstance(again, BadRow)
    assert (other, plain) == (None, None)
    rows = await world.rows(agent.key)
    assert [(row.step, row.body) for row in rows] == [(4, b"null"), (5, b"null"), (6, b"{}")]
    assert_chain(rows)
    found = await world.store.latest_checkpoint(agent.key, [(0, 4)])
    assert (found.step, found.lane_step, found.schema_version, found.next_child, found.state) == (
        4,
        4,
        3,
        2,
        b'{"page":1}',
    )


async def test_checkpoints_beside_known_state_obey_epoch_and_lease(world, entry):
    kernel = await world.kernel()
    agent, other = await world.agent(kernel), await world.agent(kernel)
    journal = await world.journal(kernel, agent, other)

    def save(key, step, epoch):
        work = pack(CheckpointSave(state=b'{"at":%d}' % step, schema_version=1, next_child=0), None)
        return journal.append(entry(key, step, epoch=epoch, atomic=work))

    def put(step, epoch):
        return journal.append(entry(agent.key, step, epoch=epoch, atomic=StateChange(puts={"k": b"1"})))

    async def saved(key):
        found = await world.store.latest_checkpoint(key, [(0, 99)])
        return None if found is None else found.step

    assert (await put(1, 1)).versions == {"k": 1}
    # One batch, one round trip: its parts stand or fall together.
    done = await settled(put(2, 1), save(agent.key, 3, 1), save(other.key, 1, 1))
    assert [getattr(one, "versions", one) for one in done] == [{"k": 2}, None, None]
    assert (await saved(agent.key), await saved(other.key)) == (3, 1)
    await world.store.revoke(agent.key, None)
    late, mine, others = await settled(save(agent.key, 4, 1), save(agent.key, 5, 2), save(other.key, 2, 1))
    assert isinstance(late, EpochMoved)
    assert (mine, others) == (None, None)
    with pytest.raises(EpochMoved):
        await save(agent.key, 6, 1)
    await world.sql("update kernels set lease_until = clock_timestamp() where key = %s", [kernel.key])
    with pytest.raises(OwnerMoved):
        await save(agent.key, 7, 2)
    assert (await saved(agent.key), await saved(other.key)) == (5, 2)
    assert [row.step for row in await world.rows(agent.key)] == [1, 2, 3, 5]


async def test_a_caller_that_gave_up_is_not_written_while_it_still_queues(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    kept, gone = journal.append(entry(agent.key, 1)), journal.append(entry(agent.key, 2))
    gone.cancel()
    await kept
    await journal.append(entry(agent.key, 3))
    assert [row.step for row in await world.rows(agent.key)] == [1, 3]


async def test_the_queue_is_bounded_and_says_when_there_is_room(world, entry, monkeypatch):
    monkeypatch.setattr(queue_module, "QUEUE_ROWS_SOFT", 4)
    monkeypatch.setattr(queue_module, "QUEUE_ROWS_MAX", 8)
    monkeypatch.setattr(queue_module, "BATCH_ROWS_MAX", 3)
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    await journal.room()
    futures = [journal.append(entry(agent.key, step)) for step in range(1, 11)]
    room = asyncio.ensure_future(journal.room())
    results = await settled(*futures)
    assert results[:8] == [None] * 8
    assert [type(result) for result in results[8:]] == [Unavailable] * 2
    await room
    assert journal.batches == 3
    assert [row.step for row in await world.rows(agent.key)] == list(range(1, 9))


async def test_stopping_writes_what_is_queued_and_refuses_the_rest(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    queued = [journal.append(entry(agent.key, step)) for step in range(1, 30)]
    await journal.stop()
    assert await settled(*queued) == [None] * 29
    with pytest.raises(Unavailable):
        await journal.append(entry(agent.key, 30))
    with pytest.raises(Unavailable):
        await journal.adopt(agent.key)
    assert len(await world.rows(agent.key)) == 29


async def test_a_large_body_goes_through_and_is_flushed_in_bounded_batches(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    bodies = [bytes([n]) * (3 << 20) for n in range(6)]
    await asyncio.gather(
        *[journal.append(entry(agent.key, n + 1, body=body)) for n, body in enumerate(bodies)]
    )
    rows = await world.rows(agent.key)
    assert [row.body for row in rows] == bodies
    assert_chain(rows)
    assert journal.batches >= 2


async def test_a_version_that_was_reckoned_with_is_never_taken_for_true(world, entry):
    ours, theirs = await world.kernel(data_dir="/a"), await world.kernel(data_dir="/b")
    a, b = await world.agent(ours, "a"), await world.agent(theirs, "b")
    journal, other = await world.journal(ours, a), await world.journal(theirs, b)

    def change(by, agent, step, **what):
        return by.append(entry(agent.key, step, atomic=StateChange(**what)))

    assert (await change(journal, a, 1, puts={"k": b"1", "l": b"1"})).versions == {"k": 1, "l": 1}
    # From here on this kernel reckons with version 1, and another one changes it behind its back.
    assert (await change(other, b, 1, puts={"k": b"2"})).versions == {"k": 2}
    assert await change(journal, a, 2, puts={"k": b"3", "l": b"2"}) == StateDone(
        versions={"k": 3, "l": 2}, previous={"k": 2, "l": 1}
    )
    assert (await change(other, b, 2, deletes=["k"])).versions == {"k": 4}
    with pytest.raises(StateConflict) as raised:
        await change(journal, a, 3, reads={"k": 3}, puts={"l": b"3"})
    assert raised.value.keys == {"k": (4, b.id, 2, 3)}
    assert await change(journal, a, 4, reads={"k": 4}, puts={"k": b"5"}) == StateDone(
        versions={"k": 5}, previous={"k": 0}
    )
    # What it reckons with is what it said itself, twice in one batch and over a conflict.
    first, stale, second = await settled(
        change(journal, a, 5, reads={"k": 5}, puts={"k": b"6"}),
        change(journal, a, 6, reads={"k": 5}, puts={"k": b"7"}),
        change(journal, a, 7, reads={"k": 6}, puts={"k": b"8"}),
    )
    assert (first.versions, second.versions) == ({"k": 6}, {"k": 7})
    assert stale.keys == {"k": (6, a.id, 5, 5)}
    key = await world.store.state_get("k")
    assert (key.version, key.value, key.agent) == (7, b"8", a.id)
    rows = await world.rows(a.key)
    assert [row.step for row in rows] == [1, 2, 4, 5, 7]
    assert_chain(rows)


async def test_a_change_that_was_reckoned_with_obeys_epoch_and_lease(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)

    def put(step, epoch):
        return journal.append(
            entry(agent.key, step, epoch=epoch, atomic=StateChange(puts={"k": b"%d" % step}))
        )

    assert (await put(1, 1)).versions == {"k": 1}
    await world.store.revoke(agent.key, None)
    late, fresh = await settled(put(2, 1), put(3, 2))
    assert isinstance(late, EpochMoved)
    assert fresh.versions == {"k": 2}
    with pytest.raises(EpochMoved):
        await put(4, 1)
    await world.sql("update kernels set lease_until = clock_timestamp() where key = %s", [kernel.key])
    with pytest.raises(OwnerMoved):
        await put(5, 2)
    assert (await world.store.state_get("k")).value == b"3"
    assert [row.step for row in await world.rows(agent.key)] == [1, 3]
