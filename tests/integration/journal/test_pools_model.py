"""Pools are never overspent, whatever overlaps: calls of several agents on two kernels, cancelled, settled, or cut off by a crash.

And nobody is refused while anything is left that no call has.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.store_pools import CHANNEL_POOL
from ringfence.kernel.journal.types import KernelKey
from ringfence.kernel.pool_shares import Drawn, Member, release, settle
from ringfence.kernel.pools import Pools
from ringfence.policy.pools import Pool, PoolLimit
from ringfence.syscalls.errors import BudgetExhausted

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(170)]

LIMIT = 40.0
_numbers = itertools.count(1)
INSERT = """
insert into journal select %s, coalesce(max(pos), 0) + 1, %s, %s, 0, 0, 0, %s, '0', %s, '', 'READ', 'allow', %s, '', '', %s, ''
from journal where chain = %s
"""


@pytest.fixture
def dsn(postgres_server: Any, template_database: str) -> Iterator[str]:
    name = postgres_server.create(template_database)
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


@dataclass
class Flying:
    """A call under way, whose intent is in the journal."""

    agent: int
    wanted: dict[str, float]
    drawn: Drawn
    step: int


@dataclass
class House:
    pools: Pools
    key: KernelKey
    listener: Any
    members: dict[int, Member] = field(default_factory=dict[int, Member])
    flying: list[Flying] = field(default_factory=list[Flying])


class Machine(RuleBasedStateMachine):
    """The journal is real, as are both kernels' pools; calls are not made but written down."""

    dsn = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.used: dict[str, float] = {"tokens": 0.0, "calls": 0.0}
        self.lost: dict[str, float] = {"tokens": 0.0, "calls": 0.0}
        self.steps = itertools.count(1)
        self.team = f"t{next(_numbers)}"
        limits = {name: PoolLimit(amount=LIMIT) for name in self.used}
        declared = [Pool(name=f"team={self.team}", labels={"team": self.team}, limits=limits)]
        # Of two pools that hold an agent the smaller one counts.
        declared.append(
            Pool(name=f"all={self.team}", labels={"team": self.team}, limits={"calls": PoolLimit(amount=90)})
        )
        self.declared = {pool.name: pool for pool in declared}
        self.run(self.begin())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def begin(self) -> None:
        self.store = await Store.open(self.dsn)
        self.sql = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        self.houses = [await self.house(), await self.house()]
        for house in self.houses:
            for _ in range(2):
                await self.born(house)

    async def house(self) -> House:
        key, _ = await self.store.register_kernel(host="h", pid=1, boot_id="b", data_dir="/d", lease_s=600)
        pools = Pools(self.store, key)
        await pools.relimit(self.declared)
        listener = self.store.listen([CHANNEL_POOL], lambda _channel, said: pools.others.notice(said))
        await listener.ready()
        return House(pools, key, listener)

    async def born(self, house: House) -> None:
        record = await self.store.create_agent(
            name="bot",
            thread="",
            manifest="m",
            source="s",
            labels={},
            input=b"",
            owner=house.key,
            uid_base=0,
            grants=[],
        )
        await self.take_over(house, record.key)

    async def take_over(self, house: House, agent: Any) -> None:
        member = await house.pools.adopt(agent, [{"team": self.team}])
        assert member is not None
        house.members[agent] = member

    async def record(self, call: Flying, phase: int, outcome: str, head: str, amount: float) -> None:
        model = "tokens" in call.wanted
        action = "llm.complete" if model else "state.put"
        body = json.dumps({head: {"tokens": amount}} if model else {}, separators=(",", ":"))
        values = (
            call.agent,
            call.step,
            time.time_ns() // 1000,
            phase,
            action,
            outcome,
            body.encode(),
            call.agent,
        )
        await self.sql.execute(INSERT, values)

    @property
    def flying(self) -> list[Flying]:
        return [call for house in self.houses for call in house.flying]

    def bound(self, name: str) -> float:
        return self.used[name] + self.lost[name] + sum(c.wanted.get(name, 0.0) for c in self.flying)

    async def call(self, house: House, agent: int, wanted: dict[str, float]) -> Flying | None:
        member = house.members[agent]
        try:
            await house.pools.ensure(member, wanted, deadline_s=5, patient=False)
        except BudgetExhausted:
            return None
        drawn = [part for name, amount in wanted.items() for part in member.draw(name, amount)]
        call = Flying(agent, wanted, drawn, next(self.steps))
        house.flying.append(call)
        await self.record(call, 0, "", "reserved", wanted.get("tokens", 0.0))
        return call

    @rule(data=st.data(), many=st.integers(1, 4), model=st.booleans())
    def calls(self, data: st.DataObject, many: int, model: bool) -> None:
        """Several at once, of any agents; a call of a model takes tokens besides."""
        places = [(house, agent) for house in self.houses for agent in house.members]
        chosen = [places[data.draw(st.integers(0, len(places) - 1))] for _ in range(many)]
        wanted = [
            {"calls": 1.0, **({"tokens": float(data.draw(st.integers(1, 15)))} if model else {})}
            for _ in chosen
        ]
        before = {name: self.bound(name) for name in self.used}

        async def all_of_them() -> list[Flying | None]:
            return await asyncio.gather(*(self.call(*chosen[nr], wanted[nr]) for nr in range(many)))

        made = self.run(all_of_them())
        granted = [one.wanted for one in made if one is not None]
        for asked in (wanted[nr] for nr in range(many) if made[nr] is None):
            # What was refused did not fit beside all that was granted.
            assert any(before[n] + sum(g[n] for g in granted) + amount > LIMIT for n, amount in asked.items())

    @precondition(lambda self: self.bound("calls") < LIMIT)
    @rule(data=st.data())
    def all_that_is_left(self, data: st.DataObject) -> None:
        """Nothing is kept from whoever asks for the whole rest, wherever it lies."""
        house = data.draw(st.sampled_from([house for house in self.houses if house.members]))
        agent, rest = data.draw(st.sampled_from(sorted(house.members))), LIMIT - self.bound("tokens")
        call = self.run(self.call(house, agent, {"calls": 1.0, "tokens": rest}))
        assert call is not None
        house.flying.remove(call)
        settle(call.drawn, {"tokens": 0.0}, None)
        self.used["calls"] += 1
        self.run(self.record(call, 1, "ok", "used", 0.0))

    @rule(data=st.data(), turns=st.integers(1, 12), amount=st.integers(1, 15))
    def cancelled(self, data: st.DataObject, turns: int, amount: int) -> None:
        house = self.houses[data.draw(st.integers(0, 1))]
        member = house.members[data.draw(st.sampled_from(sorted(house.members)))] if house.members else None
        if member is None:
            return

        async def cut() -> None:
            work = house.pools.ensure(member, {"tokens": float(amount)}, deadline_s=1, patient=False)
            task = asyncio.create_task(work)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.run(cut())

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), part=st.floats(0, 1), word=st.sampled_from(["ok", "refused"]))
    def end(self, data: st.DataObject, part: float, word: str) -> None:
        house = next(h for h in data.draw(st.permutations(self.houses)) if h.flying)
        call = house.flying.pop(data.draw(st.integers(0, len(house.flying) - 1)))
        tokens = 0.0 if word == "refused" else float(int(call.wanted.get("tokens", 0.0) * part))
        settle(call.drawn, {"tokens": tokens}, None)
        self.used["tokens"] += tokens
        if word == "refused":
            release(call.drawn)
        else:
            self.used["calls"] += 1
        self.run(self.record(call, 1, word, "used", tokens))

    @rule(nr=st.integers(0, 1))
    def sweep(self, nr: int) -> None:
        self.run(self.houses[nr].pools.upkeep.sweep(0.0))

    @rule(nr=st.integers(0, 1))
    def crash(self, nr: int) -> None:
        """A kernel dies; the other takes its agents over, and a new one comes. Intents without an outcome hold what they have."""

        async def die() -> None:
            dead, heir = self.houses[nr], self.houses[1 - nr]
            await dead.listener.stop()
            for call in dead.flying:
                for name, amount in call.wanted.items():
                    self.lost[name] += amount
            await self.sql.execute(
                "update kernels set fence = -fence, lease_until = now() where key = %s", (dead.key,)
            )
            await self.sql.execute("update agents set owner = %s where owner = %s", (heir.key, dead.key))
            for agent in dead.members:
                await self.take_over(heir, agent)
            self.houses[nr] = await self.house()
            await self.born(self.houses[nr])

        self.run(die())

    @invariant()
    def never_overspent(self) -> None:
        async def taken() -> list[tuple[str, str, float, float]]:
            asked = "select p.pool, p.name, p.taken, sum(s.amount) from pools p join pool_shares s using (pool, name, opens) "
            rows = await self.sql.execute(
                asked + "where p.pool like %s group by 1, 2, 3", (f"%={self.team}",)
            )
            return await rows.fetchall()

        for name in self.used:
            assert self.bound(name) <= LIMIT
        for pool, name, amount, shares in self.run(taken()):
            assert abs(amount - shares) < 1e-6, (pool, name)
            assert self.bound(name) - 1e-6 <= amount <= self.declared[pool].limits[name].amount + 1e-6

    def teardown(self) -> None:
        async def end() -> None:
            for house in self.houses:
                await house.listener.stop()
                await house.pools.upkeep.close()
            # All is given back that no call has.
            for name in self.used:
                pool = self.declared[f"team={self.team}"]
                state = await self.store.pool_state(Pools.place(pool, name))
                assert abs(state.taken - self.bound(name)) < 1e-6
            await self.sql.close()
            await self.store.close()

        self.run(end())
        self.loop.close()


def test_pools_are_never_overspent(dsn: str) -> None:
    Machine.dsn = dsn
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=12, stateful_step_count=15, deadline=None, suppress_health_check=checks
        ),
    )
