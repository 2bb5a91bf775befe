"""Budgets of many agents together: shares that kernels take from pools, and limits that operators set for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from ringfence.kernel.journal.store_base import StoreBase
from ringfence.kernel.journal.types import AgentKey, KernelKey, OwnerMoved

CHANNEL_POOL = "ringfence_pool"
"""Kernels ask each other here for what they have not given out, and say that limits were set."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One total of one pool in one window."""

    pool: str
    name: str
    opens: datetime


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """What is to become of an agent's share.

    Attributes:
        keep: what it has in any case.
        held: what of that is used or held by calls.
        busy: what of that calls hold.
        ask: what it needs besides; nothing is added where that does not fit.
        more: what it would take on top where there is plenty.
        limit: of the pool.
    """

    pool: str
    name: str
    opens: datetime
    agent: AgentKey
    keep: float
    held: float
    busy: float
    ask: float
    more: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What came of a move.

    Attributes:
        nr: its place among the moves.
        amount: what the share has; None: it is not this kernel's.
        taken: what all shares of the pool have.
    """

    nr: int
    amount: float | None
    taken: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """How a window of a pool stands.

    Attributes:
        taken: what all shares have.
        busy: what of that calls under way hold, as far as it was said.
        idle: what of that nobody uses, likewise.
        agents: that took some.
    """

    taken: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    agents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimitRecord:
    """A limit that an operator set."""

    pool: str
    name: str
    amount: float
    set_by: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftShare:
    """A share that an agent's earlier kernel held, in a window that is open."""

    pool: str
    name: str
    opens: datetime
    closes: datetime | None


class PoolStore(StoreBase):
    """The part of the store about pools. Every method raises Unavailable where the database is away."""

    async def open_share(
        self, kernel: KernelKey, agent: AgentKey, place: Place, closes: datetime | None, now_us: int
    ) -> float:
        """Hold an agent's share from here on; the kernel owns the agent, or the agent has ended.

        Returns:
            What it has: what the journal says of it where it was held before.

        Raises:
            OwnerMoved: another kernel owns the agent.
        """
        values = {"kernel": kernel, "agent": agent, **_of(place), "closes": closes, "now_us": now_us}
        row = await self._tuple("pools.open", values)
        if row is None or row[0] is None:
            raise OwnerMoved("another kernel owns this agent now")
        return float(row[0])

    async def move_shares(self, kernel: KernelKey, moves: Sequence[Move]) -> list[Moved]:
        """Take and give back, all in one transaction; answers in the order of the moves."""
        values = {"kernel": kernel, "moves": msgspec.json.encode(moves).decode()}
        moved = await self._all("pools.move", Moved, values)
        return sorted(moved, key=lambda item: item.nr)

    async def left_shares(self, agent: AgentKey, kernel: KernelKey) -> list[LeftShare]:
        """List what an earlier kernel of an agent left."""
        return await self._all("pools.of_agent", LeftShare, {"agent": agent, "kernel": kernel})

    async def pool_holders(self, kernel: KernelKey, place: Place) -> list[KernelKey]:
        """List other living kernels that hold something of a pool."""
        values = {"kernel": kernel, **_of(place)}
        return await self._all("pools.holders", _kernel, values)

    async def left_behind(self, place: Place) -> list[AgentKey]:
        """List agents that ended and whose dead kernel left something of a pool with them."""
        return await self._all("pools.left_behind", _agent, _of(place))

    async def pool_state(self, place: Place) -> PoolState:
        """Say how a window stands."""
        found = await self._first("pools.state", PoolState, _of(place))
        return PoolState() if found is None else found

    async def pool_limits(self) -> list[PoolLimitRecord]:
        """List the limits that stand in place of kernel files'."""
        return await self._all("pools.limits", PoolLimitRecord, {})

    async def set_pool_limit(self, pool: str, name: str, amount: float, by: str) -> None:
        """Set a limit, in place of an earlier one."""
        await self._tuple("pools.set", {"pool": pool, "name": name, "amount": amount, "by": by})

    async def unset_pool_limit(self, pool: str, name: str) -> None:
        """Go back to the kernel file's limit."""
        await self._tuple("pools.unset", {"pool": pool, "name": name})

    async def forget_pools(self) -> None:
        """Remove windows that closed long ago."""
        await self._tuple("pools.forget", {})


def _kernel(kernel: int) -> KernelKey:
    return KernelKey(kernel)


def _agent(agent: int) -> AgentKey:
    return AgentKey(agent)


def _of(place: Place) -> dict[str, object]:
    return {"pool": place.pool, "name": place.name, "opens": place.opens}
