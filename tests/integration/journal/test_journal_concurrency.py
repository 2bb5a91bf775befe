"""Kernels, revocations and takeovers against flushes that are under way."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import psycopg
import pytest
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import EpochMoved, OwnerMoved, StateConflict
from ringfence.syscalls.base import StateChange


async def settled(*futures):
    return await asyncio.gather(*futures, return_exceptions=True)


@asynccontextmanager
async def holding(world, key, how="pg_advisory_xact_lock_shared"):
    """Holds an agent's lock in an open transaction, as a flush or a revocation in another kernel does."""
    connection = await psycopg.AsyncConnection.connect(world.dsn)
    try:
        await connection.execute(f"select {how}(%s)", (key,))
        yield connection
        await connection.commit()
    finally:
        await connection.close()


async def someone_waits(world):
    """Returns once a session waits for an advisory lock."""
    while not (
        await world.sql(
            "select 1 from pg_locks where locktype = 'advisory' and not granted and database = "
            "(select oid from pg_database where datname = current_database())"
        )
    ):
        pass


@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("agents", [1, 2])
async def test_a_flush_that_waited_for_a_revocation_sees_it(world, entry, count, agents):
    """The check must not use what was true before the lock was had."""
    kernel = await world.kernel()
    owned = [await world.agent(kernel) for _ in range(agents)]
    journal = await world.journal(kernel, *owned)
    async with holding(world, owned[0].key, "pg_advisory_xact_lock") as revoker:
        await revoker.execute("update agents set epoch = epoch + 1 where key = %s", (owned[0].key,))
        futures = [journal.append(entry(owned[n % agents].key, n + 1, epoch=1)) for n in range(count)]
        await someone_waits(world)
        assert not any(future.done() for future in futures)
    results = await settled(*futures)
    refused = [n for n in range(count) if n % agents == 0]
    assert [n for n, result in enumerate(results) if isinstance(result, EpochMoved)] == refused
    assert await world.rows(owned[0].key) == []
    assert len(await world.rows(owned[-1].key)) == (count - len(refused))


@pytest.mark.parametrize("what", ["revoke", "add_grant", "claim", "release", "take"])
async def test_whoever_changes_an_agent_waits_for_flushes_under_way(world, what):
    dead, kernel = await world.kernel(lease_s=0), await world.kernel()
    agent = await world.agent(dead if what in {"claim", "take"} else kernel)
    store = world.store
    async with holding(world, agent.key):
        work = asyncio.ensure_future(
            {
                "revoke": lambda: store.revoke(agent.key, None),
                "add_grant": lambda: store.add_grant(agent.key, "now", "allow", "me", None, None),
                "claim": lambda: store.claim_agents(kernel.key, kernel.fence),
                "release": lambda: store.release_agent(agent.key, kernel.key),
                "take": lambda: store.take_agent(agent.key, kernel.key),
            }[what]()
        )
        await someone_waits(world)
        assert not work.done()
    await work


async def test_no_call_decided_before_a_revoke_commits_after_it_returned(world, entry):
    """The writer is told of no new epoch here: only the check at the commit protects."""
    kernel = await world.kernel()
    agents = [await world.agent(kernel) for _ in range(4)]
    journal = await world.journal(kernel, *agents)
    other = await Store.open(world.dsn)
    world.closing.append(other.close)
    for agent in agents:
        over = asyncio.Event()

        async def work(lane, agent=agent, over=over):
            steps = 0
            while not over.is_set():
                steps += 1
                try:
                    await journal.append(entry(agent.key, steps, epoch=1, lane=str(lane)))
                except EpochMoved:
                    return

        workers = [asyncio.create_task(work(lane)) for lane in range(8)]
        while journal.head(agent.key)[0] < 50:
            await journal.append(entry(agents[0].key, 0))
        epoch, _ = await other.revoke(agent.key, None)
        last = (await other.heads())[agent.key][0]
        late = await settled(*[journal.append(entry(agent.key, 0, epoch=1)) for _ in range(5)])
        assert [type(result) for result in late] == [EpochMoved] * 5
        over.set()
        await asyncio.gather(*workers)
        assert epoch == 2
        assert (await other.heads())[agent.key][0] == last
        await journal.append(entry(agent.key, 0, epoch=2))


async def test_two_kernels_count_in_shared_state_without_losing_or_deadlocking(world, entry):
    kernels = [await world.kernel(data_dir=f"/{n}") for n in range(2)]
    agents = [[await world.agent(kernel) for _ in range(3)] for kernel in kernels]
    journals = [await world.journal(kernel, *owned) for kernel, owned in zip(kernels, agents, strict=True)]

    async def count(journal, agent, keys):
        seen = dict.fromkeys(keys, 0)
        wins = step = 0
        while wins < 15:
            step += 1
            # Keys in opposing orders: the flush has to sort its locks.
            change = StateChange(reads=dict(seen), puts={key: str(wins).encode() for key in keys})
            try:
                done = await journal.append(entry(agent.key, step, epoch=1, atomic=change))
            except StateConflict as conflict:
                seen |= {key: version for key, (version, *_) in conflict.keys.items()}
            else:
                wins += 1
                seen = dict(done.versions)

    await asyncio.gather(
        *[
            count(journals[k], agent, ("a", "b", "c") if (k + nr) % 2 else ("c", "a", "b"))
            for k in range(2)
            for nr, agent in enumerate(agents[k])
        ]
    )
    for key in "abc":
        assert (await world.store.state_get(key)).version == 6 * 15
    rows = sum([len(await world.rows(agent.key)) for owned in agents for agent in owned])
    assert rows == 6 * 15


async def test_restoring_state_competes_with_flushes_under_the_same_locks(world, entry):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    keys = ("x", "y")

    async def write():
        for step in range(1, 41):
            await journal.append(
                entry(agent.key, step, atomic=StateChange(puts=dict.fromkeys(reversed(keys), b"w")))
            )

    async def restore():
        left = 0
        # Each a rollback of its own: what the same one had put back before is no conflict, nor put back again.
        for step in range(41, 61):
            now = {key: await world.store.state_get(key) for key in keys}
            items = [(key, 0 if v is None else v.version, b"r") for key, v in now.items()]
            left += len(await world.store.restore_state(agent.id, items, step))
        return left

    _, conflicts = await asyncio.gather(write(), restore())
    for key in keys:
        version = (await world.store.state_get(key)).version
        rows = await world.sql("select count(*), max(version) from state_history where key = %s", (key,))
        assert rows == [(version, version)]
    total = sum([(await world.store.state_get(key)).version for key in keys])
    assert total == 80 + 40 - conflicts


async def test_two_heirs_share_what_a_dead_kernel_left_and_neither_gets_an_agent_twice(world):
    dead = await world.kernel(lease_s=0)
    left = [await world.agent(dead) for _ in range(30)]
    heirs = [await world.kernel(data_dir=f"/{n}") for n in range(2)]
    stores = [world.store, await Store.open(world.dsn)]
    world.closing.append(stores[1].close)
    claims = await asyncio.gather(
        *[store.claim_agents(heir.key, heir.fence) for store, heir in zip(stores, heirs, strict=True)]
    )
    keys = [agent.key for claim in claims for agent in claim]
    assert sorted(keys) == [agent.key for agent in left]
    for heir, claim in zip(heirs, claims, strict=True):
        for agent in claim:
            assert (await world.store.agent_by_key(agent.key)).owner == heir.key


async def test_a_kernel_that_wakes_past_its_lease_is_refused_while_its_heir_goes_on(world, entry):
    first, second = await world.kernel(lease_s=600), await world.kernel()
    agent = await world.agent(first)
    old = await world.journal(first, agent)
    await old.append(entry(agent.key, 1, epoch=1))
    await world.sql("update kernels set lease_until = clock_timestamp() where key = %s", (first.key,))
    with pytest.raises(OwnerMoved):
        await old.append(entry(agent.key, 2, epoch=1))
    # Nobody took over yet: the lease may be had again.
    assert await world.store.heartbeat(first.key, first.fence, 0)
    (taken,) = await world.store.claim_agents(second.key, second.fence)
    new = await world.journal(second, taken)
    results = await settled(
        *[old.append(entry(agent.key, 100 + n)) for n in range(3)],
        *[new.append(entry(agent.key, 2 + n)) for n in range(3)],
    )
    assert [type(result) for result in results[:3]] == [OwnerMoved] * 3
    assert results[3:] == [None] * 3
    assert not await world.store.heartbeat(first.key, first.fence, 60)
    with pytest.raises(OwnerMoved):
        await world.store.claim_agents(first.key, first.fence)
    assert [row.step for row in await world.rows(agent.key)] == [1, 2, 3, 4]
