"""What becomes of rows when the connection, the server or its backend dies under them: each is written once."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from ringfence.kernel.journal.flush import ARRAY_ROWS_MAX, Flush
from ringfence.kernel.journal.migrate import migrate
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import Phase, Unavailable
from ringfence.kernel.journal.writer import Journal
from ringfence.kernel.postgres import EmbeddedPostgres
from ringfence.syscalls.base import StateChange, StateDone

# What a lone row, several of one agent, a batch with atomic work and a large one send to commit: bound statements' names, and the end of COPY.
LONE = b"append_one"
SOME = b"append_some"
PUT = b"append_put"
BATCH = b"\0insert\0"
LARGE = b"c\0\0\0\4"


async def settled(*futures):
    return await asyncio.gather(*futures, return_exceptions=True)


@pytest.mark.parametrize("how", ["cut_before", "cut_after", "hold_before", "hold_after"])
async def test_a_lone_row_whose_answer_is_lost_is_written_once(world, entry, proxy, how):
    cutter, through = proxy
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent, dsn=through)
    await journal.append(entry(agent.key, 1, epoch=1))
    setattr(cutter, how, LONE)
    assert await journal.append(entry(agent.key, 2, epoch=1)) is None
    await journal.append(entry(agent.key, 3, epoch=1))
    assert cutter.cuts == 1
    rows = await world.rows(agent.key)
    assert [(row.pos, row.step) for row in rows] == [(1, 1), (2, 2), (3, 3)]
    assert journal.head(agent.key) == (3, rows[-1].hash)


@pytest.mark.parametrize("how", ["cut_before", "cut_after"])
async def test_a_lone_change_of_one_key_whose_answer_is_lost_happens_once(world, entry, proxy, how):
    cutter, through = proxy
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent, dsn=through)

    async def change(step, **what):
        return await journal.append(entry(agent.key, step, epoch=1, atomic=StateChange(**what)))

    # Of a key that was never seen nothing can be reckoned with.
    assert (await change(1, puts={"k": b"1"})).versions == {"k": 1}
    setattr(cutter, how, PUT)
    assert (await change(2, puts={"k": b"2"})).versions == {"k": 2}
    assert cutter.cuts == 1
    assert (await change(3, deletes=["k"])).previous == {"k": 2}
    assert [(row.pos, row.step) for row in await world.rows(agent.key)] == [(1, 1), (2, 2), (3, 3)]
    assert await world.sql("select version, value from state_history where key = 'k' order by version") == [
        (1, b"1"),
        (2, b"2"),
        (3, None),
    ]


@pytest.mark.parametrize("how", ["cut_before", "cut_after", "hold_before", "hold_after"])
@pytest.mark.parametrize(("count", "commit"), [(12, BATCH), (ARRAY_ROWS_MAX + 2, LARGE)])
async def test_a_batch_with_state_changes_whose_answer_is_lost_happens_once(
    world, entry, proxy, how, count, commit
):
    cutter, through = proxy
    kernel = await world.kernel()
    agents = [await world.agent(kernel) for _ in range(3)]
    journal = await world.journal(kernel, *agents, dsn=through)
    setattr(cutter, how, commit)
    results = await settled(
        *[
            journal.append(
                entry(
                    agents[n % 3].key,
                    n + 1,
                    epoch=1,
                    atomic=StateChange(reads={f"k{n}": 0}, puts={f"k{n}": b"1"}),
                    finish=lambda done: repr(done).encode(),
                )
            )
            for n in range(count)
        ]
    )
    assert cutter.cuts == 1
    assert results == [StateDone(versions={f"k{n}": 1}, previous={f"k{n}": 0}) for n in range(count)]
    for nr, agent in enumerate(agents):
        assert [row.step for row in await world.rows(agent.key)] == list(range(nr + 1, count + 1, 3))
    # A half-open session is ended, so that its locks hold up no revocation.
    epoch, _ = await world.store.revoke(agents[0].key, None)
    assert epoch == 2


@pytest.mark.parametrize("where", ["ready", "inserted"])
async def test_a_bug_on_the_way_without_a_task_neither_repeats_nor_loses_a_row(
    world, entry, monkeypatch, where
):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent)
    await journal.append(entry(agent.key, 1, epoch=1))

    def broken(*_):
        # Before anything is sent, or after it has committed: once.
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(Flush, where, broken)
    assert await journal.append(entry(agent.key, 2, epoch=1)) is None
    await journal.append(entry(agent.key, 3, epoch=1))
    rows = await world.rows(agent.key)
    assert [(row.pos, row.step) for row in rows] == [(1, 1), (2, 2), (3, 3)]
    assert journal.head(agent.key) == (3, rows[-1].hash)


async def test_an_epoch_that_moved_while_the_fate_was_open_is_seen_by_the_second_try(world, entry, proxy):
    cutter, through = proxy
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent, dsn=through)
    cutter.refuse = True
    cutter.cut_before = LONE
    lost = journal.append(entry(agent.key, 1, epoch=1, phase=Phase.INTENT))
    await cutter.refused.wait()
    await world.store.revoke(agent.key, None)
    cutter.refuse = False
    (result,) = await settled(lost)
    assert type(result).__name__ == "EpochMoved"
    assert await world.rows(agent.key) == []


async def test_rows_that_wait_too_long_for_the_database_fail_and_later_ones_succeed(world, entry, proxy):
    cutter, through = proxy
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent, dsn=through, patience_s=0.2)
    cutter.refuse = True
    cutter.cut_before = SOME
    sent, queued = (
        journal.append(entry(agent.key, 1, epoch=1, phase=Phase.INTENT)),
        journal.append(entry(agent.key, 2, epoch=1)),
    )
    results = await settled(sent, queued)
    assert [type(result) for result in results] == [Unavailable] * 2
    with pytest.raises(Unavailable):
        await journal.adopt(agent.key)
    cutter.refuse = False
    await journal.append(entry(agent.key, 3, epoch=1))
    assert [row.step for row in await world.rows(agent.key)] == [3]


@pytest.mark.parametrize("how", ["cut_before", "cut_after"])
async def test_an_outcome_that_was_sent_is_never_reported_as_failed(world, entry, proxy, how):
    """Its caller would write it again, and the step would have two outcomes."""
    cutter, through = proxy
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent, dsn=through, patience_s=0.2)
    cutter.refuse = True
    setattr(cutter, how, LONE)
    sent = journal.append(entry(agent.key, 1))
    await cutter.refused.wait()
    with pytest.raises(Unavailable):
        await journal.append(entry(agent.key, 2))
    assert not sent.done()
    cutter.refuse = False
    assert await sent is None
    await journal.append(entry(agent.key, 3))
    assert [row.step for row in await world.rows(agent.key)] == [1, 3]


@pytest.mark.parametrize("how", ["cut_before", "cut_after"])
async def test_the_last_of_several_tries_is_looked_for_too(world, entry, proxy, monkeypatch, how):
    """A change of the state whose caller was told that it failed would be made again."""
    monkeypatch.setattr("ringfence.kernel.journal.writing.REWRITES_MAX", 1)
    cutter, through = proxy
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent, dsn=through)
    setattr(cutter, how, BATCH)
    work = StateChange(puts={"k": b"1"})
    (result,) = await settled(journal.append(entry(agent.key, 1, epoch=1, atomic=work)))
    assert cutter.cuts == 1
    rows = [row.step for row in await world.rows(agent.key)]
    assert rows == ([] if how == "cut_before" else [1])
    assert isinstance(result, Unavailable if how == "cut_before" else StateDone)
    await journal.append(entry(agent.key, 2, epoch=1))


async def test_stopping_without_a_database_fails_what_waits(world, entry, proxy):
    cutter, through = proxy
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent, dsn=through, patience_s=0.2)
    cutter.refuse = True
    cutter.cut_before = LONE
    sent = journal.append(entry(agent.key, 1))
    await cutter.refused.wait()
    queued = journal.append(entry(agent.key, 2))
    await journal.stop()
    assert [type(result) for result in await settled(sent, queued)] == [Unavailable] * 2


async def test_backends_that_are_terminated_lose_and_repeat_nothing(world, entry):
    kernel = await world.kernel()
    agents = [await world.agent(kernel) for _ in range(8)]
    journal = await world.journal(kernel, *agents)
    reached: asyncio.Queue[int] = asyncio.Queue()

    async def work(agent):
        for step in range(1, 101):
            work = StateChange(puts={f"n{agent.key}": b"1"}) if step % 5 == 0 else None
            await journal.append(entry(agent.key, step, epoch=1, atomic=work))
            if agent is agents[0] and step % 10 == 0:
                reached.put_nowait(step)

    async def terminate():
        killed = 0
        while await reached.get() < 100:
            rows = await world.sql(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'ringfence journal'"
            )
            killed += len(rows)
        return killed

    killer = asyncio.create_task(terminate())
    await asyncio.gather(*map(work, agents))
    assert await killer > 0
    for agent in agents:
        assert [row.step for row in await world.rows(agent.key)] == list(range(1, 101))
        assert (await world.store.state_get(f"n{agent.key}")).version == 20


async def test_the_store_goes_on_after_its_connections_were_terminated(world):
    kernel = await world.kernel()
    for _ in range(3):
        await world.sql(
            # Awaited: one that is told to end still answers until it hears of it.
            "select pg_terminate_backend(pid, 30000) from pg_stat_activity where application_name = 'ringfence store'"
        )
        assert [record.key for record in await world.store.kernels()] == [kernel.key]


@pytest.fixture
async def own_postgres():
    directory = Path(tempfile.mkdtemp(prefix="rf-own-", dir="/tmp"))
    postgres = EmbeddedPostgres(directory)
    try:
        yield postgres, await postgres.start()
    finally:
        await postgres.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.fault
async def test_a_killed_server_has_every_row_that_was_answered(own_postgres, entry):
    postgres, dsn = own_postgres
    await migrate(dsn)
    store = await Store.open(dsn)
    kernel, fence = await store.register_kernel(host="h", pid=1, boot_id="b", data_dir="/d", lease_s=600)
    agents = [
        await store.create_agent(
            name="bot",
            thread="",
            manifest="m",
            source="s",
            labels={},
            input=b"",
            owner=kernel,
            uid_base=None,
            grants=[],
        )
        for _ in range(6)
    ]
    journal = Journal(dsn, kernel, fence)
    await journal.start()
    answered: dict[int, list[int]] = {agent.key: [] for agent in agents}
    enough, over = asyncio.Event(), asyncio.Event()

    async def work(agent):
        await journal.adopt(agent.key)
        step = 0
        while not over.is_set():
            step += 1
            await journal.append(entry(agent.key, step, epoch=1))
            answered[agent.key].append(step)
            if step == 50:
                enough.set()

    tasks = [asyncio.create_task(work(agent)) for agent in agents]
    await enough.wait()
    for _ in range(2):
        pid = postgres.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        before = {key: len(steps) for key, steps in answered.items()}
        # Work goes on by itself once the server is back.
        while any(len(steps) < before[key] + 20 for key, steps in answered.items()):
            await asyncio.wait(tasks, timeout=0.05)
            assert not any(task.done() for task in tasks)
    over.set()
    await asyncio.gather(*tasks)
    for agent in agents:
        stored = [row.step async for row in store.audit(agent.key)]
        assert stored == answered[agent.key]
    await journal.stop()
    await store.close()
