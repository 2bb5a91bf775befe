"""Atomic work that a statement does: it commits with its row or leaves nothing, and harms nobody else's row."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from ringfence.kernel.journal import sqlwork
from ringfence.kernel.journal.types import (
    BadRow,
    Entry,
    EpochMoved,
    NothingYet,
    Phase,
    Row,
    StateConflict,
)
from ringfence.syscalls.base import StateChange, Work
from ringfence.syscalls.errors import NoSuchResource

TEXTS = {
    "note": "insert into notes (agent, step, body) values (($1::jsonb->>'agent')::bigint, ($1->>'step')::bigint, $1) "
    "returning jsonb_build_object('nr', nr, 'said', body->'text', 'caller', body->'agent_id')",
    "take": "with found as (delete from notes where nr = (select min(nr) from notes) returning body) "
    "select coalesce((select jsonb_build_object('took', body->'text') from found), '{\"again\": true}') where $1::jsonb is not null",
    "divide": "with one as (insert into notes (body) values ($1::jsonb)) select to_jsonb(1 / ($1->>'by')::integer)",
    "clash": "select jsonb_build_object('conflict', jsonb_build_object($1::jsonb->>'key', jsonb_build_array(7, 'other', 3, 6)))",
    "nothing": "select null::jsonb where $1::jsonb is not null",
}


@pytest.fixture
async def notes(world, monkeypatch):
    await world.sql("create table notes (nr bigserial primary key, agent bigint, step bigint, body jsonb)")
    monkeypatch.setattr(sqlwork, "texts", lambda: TEXTS)

    async def kept():
        return [text for (text,) in await world.sql("select body->>'text' from notes order by nr")]

    return kept


@pytest.fixture
async def bot(world, notes):
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    return kernel, agent, await world.journal(kernel, agent)


def body_of(done):
    return msgspec.json.encode(done)


def note(text):
    return Work(statement="note", values={"text": text})


async def settled(*futures):
    return await asyncio.gather(*futures, return_exceptions=True)


async def test_work_commits_with_its_row_and_knows_its_caller(world, entry, notes, bot):
    _, agent, journal = bot
    done = await journal.append(entry(agent.key, 3, epoch=1, branch=2, atomic=note("ä 𝄞"), finish=body_of))
    assert done == {"nr": 1, "said": "ä 𝄞", "caller": agent.id}
    assert await world.sql("select agent, step, body->'branch', body->>'agent_id' from notes") == [
        (agent.key, 3, 2, agent.id)
    ]
    assert [msgspec.json.decode(row.body) for row in await world.rows(agent.key)] == [done]
    assert await journal.append(entry(agent.key, 4, atomic=Work(statement="nothing"), finish=body_of)) is None


async def test_the_kernels_own_rows_may_have_work(world, notes, bot):
    kernel, _, journal = bot
    row = Row(chain=-kernel.key, phase=Phase.EVENT, action="messages.send")
    done = await journal.append(Entry(row=row, atomic=note("by hand"), finish=body_of))
    assert done == {"nr": 1, "said": "by hand", "caller": ""}
    assert await world.sql("select agent from notes") == [(None,)]


@pytest.mark.parametrize("others", [0, 3, 200])
async def test_one_that_fails_leaves_nothing_and_harms_nobody(world, entry, notes, bot, others):
    _, agent, journal = bot

    def refuse(_done):
        raise NoSuchResource("no agent `x`; see `ringfence ps`")

    futures = [
        journal.append(entry(agent.key, 1, atomic=note("first"), finish=body_of)),
        journal.append(
            entry(agent.key, 2, atomic=Work(statement="divide", values={"by": 0}), finish=body_of)
        ),
        journal.append(entry(agent.key, 3, atomic=note("refused"), finish=refuse)),
        journal.append(
            entry(agent.key, 4, atomic=Work(statement="clash", values={"key": "k"}), finish=body_of)
        ),
        journal.append(entry(agent.key, 5, atomic=note("nul \0"), finish=body_of)),
        journal.append(entry(agent.key, 6, atomic=Work(statement="unknown"), finish=body_of)),
        journal.append(entry(agent.key, 7, atomic=note(object()), finish=body_of)),
        journal.append(entry(agent.key, 8, atomic=StateChange(puts={"s": b"1"}), finish=lambda _: b"{}")),
        journal.append(entry(agent.key, 9, atomic=note("last"), finish=body_of)),
        *[journal.append(entry(agent.key, 10 + nr)) for nr in range(others)],
    ]
    results = await settled(*futures)
    kinds = [dict, BadRow, NoSuchResource, StateConflict, BadRow, BadRow, BadRow]
    assert [type(result) for result in results[:7]] == kinds
    assert results[3].keys == {"k": (7, "other", 3, 6)}
    assert isinstance(results[8], dict)
    assert await notes() == ["first", "last"]
    steps = [1, 8, 9, *range(10, 10 + others)]
    assert [row.step for row in await world.rows(agent.key)] == steps
    assert (await world.store.state_get("s")).version == 1


async def test_a_finish_that_fails_gives_back_what_a_later_one_then_takes(entry, notes, bot):
    _, agent, journal = bot
    await journal.append(entry(agent.key, 1, atomic=note("only"), finish=body_of))

    def refuse(_done):
        raise NoSuchResource("no")

    bad, good, none = await settled(
        journal.append(entry(agent.key, 2, atomic=Work(statement="take"), finish=refuse)),
        journal.append(entry(agent.key, 3, atomic=Work(statement="take"), finish=body_of)),
        journal.append(entry(agent.key, 4, atomic=Work(statement="take"), finish=body_of)),
    )
    assert isinstance(bad, NoSuchResource)
    assert good == {"took": "only"}
    assert isinstance(none, NothingYet)
    assert await notes() == []


async def test_work_decided_under_an_old_epoch_is_not_done(world, entry, notes, bot):
    _, agent, journal = bot
    epoch, _ = await world.store.revoke(agent.key, None)
    old, new = await settled(
        journal.append(entry(agent.key, 1, epoch=1, atomic=note("old"), finish=body_of)),
        journal.append(entry(agent.key, 2, epoch=epoch, atomic=note("new"), finish=body_of)),
    )
    assert isinstance(old, EpochMoved)
    assert new["said"] == "new"
    assert await notes() == ["new"]


@pytest.mark.parametrize("cut", ["cut_before", "cut_after", "hold_after"])
async def test_a_lost_connection_neither_repeats_nor_loses_work(world, entry, notes, proxy, cut):
    between, dsn = proxy
    kernel = await world.kernel()
    agent = await world.agent(kernel)
    journal = await world.journal(kernel, agent, dsn=dsn)
    setattr(between, cut, b"commit")
    done = await journal.append(entry(agent.key, 1, atomic=note("once"), finish=body_of))
    assert between.cuts == 1
    assert done["said"] == "once"
    assert await notes() == ["once"]
    assert [msgspec.json.decode(row.body) for row in await world.rows(agent.key)] == [done]
