"""The rate of an upstream over several kernels: what they hold together is never more than the rate, whoever comes, goes or dies."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
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
from ringfence.kernel.journal.store_rates import RatePart
from ringfence.kernel.journal.types import KernelKey
from ringfence.kernel.rate_shares import RateShares
from ringfence.policy.units import Rate
from ringfence.syscalls.declared import HttpResource
from ringfence.syscalls.upstream import upstream_of

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(170)]

SPAN_S = 1e9
"""So long that nothing refills meanwhile."""
EPS = 1e-6
_numbers = itertools.count(1)


@pytest.fixture
def dsn(postgres_server: Any, template_database: str) -> Iterator[str]:
    name = postgres_server.create(template_database)
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


@dataclass
class Peer:
    key: KernelKey
    part: float = 0.0
    tokens: float = 0.0
    used: bool = False


class Machine(RuleBasedStateMachine):
    """Kernels that want a part, make calls, want none any more, or die."""

    dsn = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.name = f"web{next(_numbers)}"
        self.count = 4
        self.made = 0
        self.peers: list[Peer] = []
        self.run(self.begin())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def begin(self) -> None:
        self.store = await Store.open(self.dsn)
        self.sql = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)

    def ask(self, peer: Peer, *, want: bool) -> RatePart:
        found: RatePart = self.run(
            self.store.share_rate(
                peer.key,
                self.name,
                count=self.count,
                span_s=SPAN_S,
                tokens=peer.tokens,
                want=want,
                used=peer.used,
            )
        )
        peer.part, peer.tokens, peer.used = found.part, found.tokens, False
        return found

    @precondition(lambda self: len(self.peers) < 7)
    @rule()
    def comes(self) -> None:
        work = self.store.register_kernel(host="h", pid=1, boot_id="b", data_dir="/d", lease_s=600)
        self.peers.append(Peer(self.run(work)[0]))

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def wants(self, data: st.DataObject) -> None:
        self.ask(data.draw(st.sampled_from(self.peers)), want=True)

    @precondition(lambda self: any(peer.tokens >= 1 - EPS for peer in self.peers))
    @rule(data=st.data())
    def calls(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from([one for one in self.peers if one.tokens >= 1 - EPS]))
        peer.tokens -= 1
        peer.used = True
        self.made += 1

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def wants_none(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        assert (self.ask(peer, want=False).part, peer.tokens) == (0, 0)

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        self.peers.remove(peer)
        self.run(self.sql.execute("update kernels set lease_until = '-infinity' where key = %s", (peer.key,)))

    @precondition(lambda self: self.peers)
    @rule()
    def all_settle(self) -> None:
        """Whoever gives up first, then the others: each has its part, and nobody more than another."""
        found = [self.ask(peer, want=True) for _ in range(3) for peer in self.peers]
        assert not found[-1].short
        parts = sorted(peer.part for peer in self.peers)
        if len(self.peers) <= self.count:
            assert parts == pytest.approx([1 / len(self.peers)] * len(self.peers))
        else:
            assert parts[-self.count :] == pytest.approx([1 / self.count] * self.count)
            assert sum(parts) == pytest.approx(1)

    @invariant()
    def together_they_are_one(self) -> None:
        if not hasattr(self, "sql"):
            return
        assert sum(peer.part for peer in self.peers) <= 1 + EPS
        for peer in self.peers:
            assert peer.part == 0 or peer.part * self.count >= 1 - EPS
            assert -EPS <= peer.tokens <= peer.part * self.count + EPS
        rows = self.run(self.rows())
        spare = rows[0][0] if rows else self.count
        assert self.made + sum(peer.tokens for peer in self.peers) + spare <= self.count + EPS

    async def rows(self) -> list[tuple[float]]:
        cursor = await self.sql.execute("select spare from rate_lines where name = %s", (self.name,))
        return await cursor.fetchall()

    def teardown(self) -> None:
        self.run(self.sql.close())
        self.run(self.store.close())
        self.loop.close()


def test_parts_of_a_rate(dsn: str) -> None:
    class Here(Machine):
        pass

    Here.dsn = dsn
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


async def test_who_is_told_to_wait_tells_the_other_kernels(dsn: str) -> None:
    store = await Store.open(dsn)
    resource = HttpResource(
        name="busy",
        base="http://busy.example",
        headers={},
        effects=(),
        idempotency_header=None,
        rate=Rate(count=5, per_s=1.0),
    )
    upstream = upstream_of(resource)
    heard = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Any) -> None:
        tasks.add(asyncio.create_task(work))

    told, other = (RateShares(store, KernelKey(key), spawn) for key in (1, 2))

    def notice(_channel: str, said: str) -> None:
        if said:
            told.notice(json.loads(said))  # its own word: nothing happens
            assert upstream.line.held_s == 0
            other.notice(json.loads(said))
            heard.set()

    listener = store.listen([CHANNEL_POOL], notice)
    await listener.ready()
    told.told(upstream, 30.0)
    async with asyncio.timeout(60):
        await heard.wait()
    assert 0 < upstream.line.held_s <= 30
    await listener.stop()
    await store.close()
