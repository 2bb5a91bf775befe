"""What many ask at once is answered as if each had asked alone."""

from __future__ import annotations

import asyncio
import re

import pytest
from ringfence.kernel.journal import database, together
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import Entry, JournalError, Phase, Row

MANY = 8


def named() -> list[str]:
    files = sorted((database.SQL_DIRECTORY / "queries").glob("*.sql"))
    names = [f"{file.stem}.{name}" for file in files for name in database.statements(file.stem)]
    return [name for name in names if together.kind_of(name) is not None]


@pytest.fixture
async def asked(world, monkeypatch):
    """A world with agents of different pasts, and the statements that are asked together in it."""
    kernel = await world.kernel()
    agents = [await world.agent(kernel, f"a{n}", [("allow", "now")] * n) for n in range(MANY)]
    journal = await world.journal(kernel, *agents)
    for number, agent in enumerate(agents):
        for step in range(1, number + 1):
            row = Row(
                chain=agent.key, phase=Phase.OUTCOME, step=step, branch=0, lane="0", lane_step=step, action="now",
                effect="READ", verdict="allow", outcome="ok", body=b'{"facts":{},"n":%d}' % step,
                effect_id=f"e{step}",
            )  # fmt: skip
            await journal.append(Entry(row=row))
    world.agents, world.kinds = agents, set()
    real = Store._together

    def told(self, kind, make, some, shared):
        world.kinds.add(kind.text)
        return real(self, kind, make, some, shared)

    monkeypatch.setattr(Store, "_together", told)
    return world


async def walked(rows):
    return [row async for row in rows]


async def test_answers_are_those_of_each_alone(asked):
    store = asked.store
    lineage = [(0, 1 << 40)]
    kinds = {
        "journal.unfinished": store.unfinished,
        "journal.lineage": lambda key: walked(store.lineage_outcomes(key, lineage, 1)),
        "journal.counts": store.counts,
        "journal.amounts": lambda key: store.amounts(key, every=True),
        "kin.parents": store.parents,
        "kin.reserved": lambda key: store.reserved_by_children(key, 0),
        "agents.branches": store.branches,
        "agents.by_key": store.agent_by_key,
        "agents.checkpoint": lambda key: store.latest_checkpoint(key, lineage),
        "approvals.unfinished": store.unfinished_approvals,
        "grants.list": lambda key: store.grants(key, active=False),
        "budgets.list": store.budgets,
        "pools.of_agent": lambda key: store.left_shares(key, 0),
        "segments.of_chain": store.segments,
        "replay.effects": lambda key: walked(store.effect_outcomes(key)),
        "replay.facts": lambda key: walked(store.fact_rows(key)),
        "replay.purged": store.purged_grants,
        "replay.born": store.born_under,
    }
    assert sorted(kinds) == sorted(named())
    for name, ask in kinds.items():
        alone = [await ask(agent.key) for agent in asked.agents]
        asked.kinds.clear()
        assert await asyncio.gather(*(ask(agent.key) for agent in asked.agents)) == alone, name
        assert together.kind_of(name).text in asked.kinds, name
    assert len(await store.grants(asked.agents[5].key)) == 5


async def test_states_set_at_once_are_all_set_and_the_last_one_stays(asked):
    store, (one, *others) = asked.store, asked.agents
    first = [store.set_agent(agent.key, state="running", waiting_for=agent.id) for agent in others]
    twice = [store.set_agent(one.key, state="running", error=f"{n}") for n in range(5)]
    await asyncio.gather(*first, *twice, store.set_agent(one.key, state="paused"))
    assert [(await store.agent_by_key(a.key)).waiting_for for a in others] == [a.id for a in others]
    stands = await store.agent_by_key(one.key)
    assert (stands.state, stands.error) == ("paused", "4")


async def test_one_that_is_refused_is_refused_alone(asked):
    store = asked.store
    sets = [
        store.set_agent(a.key, state="no state" if a is asked.agents[7] else "paused") for a in asked.agents
    ]
    told = await asyncio.gather(*sets, return_exceptions=True)
    assert [n for n, error in enumerate(told) if error is not None] == [7]
    assert isinstance(told[7], JournalError)
    assert {(await store.agent_by_key(a.key)).state for a in asked.agents[:7] + asked.agents[8:]} == {
        "paused"
    }


async def test_who_gives_up_holds_up_nobody(asked):
    store = asked.store
    asks = [asyncio.create_task(store.branches(agent.key)) for agent in asked.agents]
    await asyncio.sleep(0)
    for task in asks[::2]:
        task.cancel()
    told = await asyncio.gather(*asks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in told[::2])
    assert all(len(one) == 1 for one in told[1::2])
    assert len(await store.branches(asked.agents[0].key)) == 1


def test_each_value_that_differs_is_named():
    for name in named():
        kind = together.kind_of(name)
        left = set(re.findall(r"%\((\w+)\)s", kind.text)) - {"asked"}
        assert left <= {"limit", "kernel"}, name
        assert kind.most > 1
