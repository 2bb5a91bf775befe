"""An agent's shares of the pools that hold it: what its kernel may give out to its calls without asking the database.

INVARIANT: a call draws from what was taken of every pool that counts it, so pools are never overspent by what is drawn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ringfence.kernel.journal.store_pools import Move, Place
from ringfence.kernel.journal.types import AgentKey

if TYPE_CHECKING:
    from ringfence.policy.pools import Pool, PoolLimit, Window

EPS: Final = 1e-9
"""Amounts closer than this are the same: dollars are added up in binary."""

KEPT: Final = frozenset({"tokens", "usd", "bytes"})
"""Totals of which a call takes an amount that is known only afterwards."""

CHUNK_MAX: Final = 4096.0
UNKNOWN: Final = (-1.0, -1.0, -1.0)
"""What the database knows of a share while a statement about it is under way, or was cut off."""
QUICK_S: Final = 1.0
"""A share that is used up faster than this takes twice as much the next time."""


class House(Protocol):
    """What a share needs of the kernel's pools."""

    def freed(self) -> None:
        """Something was given back."""
        ...

    def refill(self, member: Member, share: Share) -> None:
        """Take more for a share that will be used up soon."""
        ...

    def limit(self, pool: Pool, name: str) -> PoolLimit:
        """The limit in force."""
        ...


class Share:
    """What one agent has of one total of one pool in one window.

    Attributes:
        amount: what was taken; None: it is not opened, or another kernel's.
        used: what calls used up.
        held: what calls under way hold besides.
        trusted: whether the rest may be given out.
    """

    __slots__ = (
        *("amount", "chunk", "closes", "closes_s", "drawn_at", "held", "house", "lock", "name", "place"),
        *("said", "taken_at", "trusted", "used"),
    )

    def __init__(self, house: House, pool: str, name: str, window: Window) -> None:
        self.house = house
        self.name = name
        self.place = Place(pool=pool, name=name, opens=window.opens)
        self.closes = window.closes
        self.closes_s = float("inf") if window.closes is None else window.closes.timestamp()
        self.amount: float | None = None
        self.used = 0.0
        self.held = 0.0
        self.trusted = False
        self.chunk = 0.0
        self.taken_at = self.drawn_at = 0.0
        self.said = (0.0, 0.0, 0.0)
        self.lock = asyncio.Lock()

    @property
    def bound(self) -> float:
        """What is used or held."""
        return self.used + self.held

    @property
    def rest(self) -> float:
        """What was taken and nobody uses."""
        return 0.0 if self.amount is None else self.amount - self.bound

    def draw(self, amount: float) -> None:
        """A call takes some of the rest."""
        if self.name in KEPT:
            self.held += amount
        else:
            self.used += amount
        self.drawn_at = time.monotonic()

    def attach(self, amount: float) -> None:
        """A call goes on that a dead kernel began: what it holds was counted with what is used."""
        if self.name in KEPT:
            self.used -= amount
            self.held += amount

    def settle(self, held: float, used: float) -> None:
        """A call used so much of what it held; less than nothing: a later word counts."""
        self.held = max(0.0, self.held - held)
        self.used = max(0.0, self.used + used)
        self.house.freed()

    def release(self, amount: float) -> None:
        """A call did not run."""
        self.used = max(0.0, self.used - amount)
        self.house.freed()

    def next_chunk(self, amount: float) -> float:
        """How much more to take than a call needs: twice as much each time that it did not last."""
        now = time.monotonic()
        quick = now - self.taken_at < QUICK_S
        self.taken_at = now
        self.chunk = min(CHUNK_MAX * max(1.0, amount), max(2 * self.chunk, 2 * amount)) if quick else 0.0
        return self.chunk

    @property
    def unsaid(self) -> bool:
        """Whether the database knows something else than what is so."""
        return self.amount is not None and self.said != (self.bound, self.bound, self.held)

    def move(self, agent: AgentKey, limit: float, *, ask: float | None = None, more: float = 0.0) -> Move:
        """Give the rest back, or take more."""
        keep = self.bound if ask is None or not self.trusted else (self.amount or 0.0)
        place, bound = self.place, self.bound
        return Move(
            pool=place.pool,
            name=place.name,
            opens=place.opens,
            agent=agent,
            keep=keep,
            held=bound,
            busy=self.held,
            ask=max(0.0, (ask or 0.0) - (keep - bound)),
            more=more,
            limit=limit,
        )

    def moved(self, move: Move, amount: float | None) -> None:
        """Take over what came of a move."""
        self.amount = amount
        self.trusted = amount is not None
        self.said = UNKNOWN if amount is None else (amount, move.held, move.busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A pool that lacks what a call needs, and the share that could not take it."""

    pool: Pool
    share: Share
    asked: float


class Member:
    """One agent in the pools that hold it. All of it is touched from the kernel's event loop alone."""

    __slots__ = ("asked", "by_name", "house", "key", "labels", "pools", "shares")

    def __init__(self, house: House, key: AgentKey, labels: Sequence[Mapping[str, str]]) -> None:
        self.house = house
        self.key = key
        self.labels = labels
        self.pools: tuple[Pool, ...] = ()
        self.by_name: dict[str, tuple[Pool, ...]] = {}
        self.shares: dict[tuple[str, str], Share] = {}
        self.asked = 0.0  # what the call asked for that it was parked for

    def join(self, declared: Mapping[str, Pool]) -> bool:
        """Be in those pools that hold it. Returns whether there are any."""
        self.pools = tuple(pool for pool in declared.values() if pool.holds(self.labels))
        names = {name for pool in self.pools for name in pool.limits}
        self.by_name = {name: tuple(p for p in self.pools if name in p.limits) for name in names}
        return bool(self.pools)

    @property
    def metered(self) -> bool:
        """Whether a pool limits bytes, so that they are counted."""
        return "bytes" in self.by_name

    def covers(self, wanted: Mapping[str, float]) -> bool:
        """Whether the rest of the shares is enough, so that `draw` can take it."""
        return all(self.has(name, amount) for name, amount in wanted.items())

    def has(self, name: str, amount: float = 1.0) -> bool:
        """Whether every pool that counts a total has so much for this agent."""
        for pool in self.by_name.get(name, ()):
            share = self.shares.get((pool.name, name))
            if (
                share is None
                or not share.trusted
                or share.rest + EPS < amount
                or time.time() >= share.closes_s
            ):
                return False
        return True

    def draw(self, name: str, amount: float = 1.0) -> list[tuple[Share, float]]:
        """Take some for a call, which `covers` has said is there. Returns what it was taken from."""
        drawn: list[tuple[Share, float]] = []
        for pool in self.by_name.get(name, ()):
            share = self.shares[pool.name, name]
            share.draw(amount)
            drawn.append((share, amount))
            if share.chunk >= 8 * amount and share.rest < share.chunk / 4 and not share.lock.locked():
                self.house.refill(self, share)
        return drawn

    def attach(self, reserved: Mapping[str, float]) -> list[tuple[Share, float]]:
        """What a call that a dead kernel began holds of the shares."""
        drawn: list[tuple[Share, float]] = []
        for name, amount in reserved.items():
            for pool in self.by_name.get(name, ()):
                share = self.shares.get((pool.name, name))
                if share is not None and share.amount is not None:
                    share.attach(amount)
                    drawn.append((share, amount))
        return drawn


Drawn = Sequence[tuple[Share, float]]
"""Shares that a call draws from, and how much of each."""


def settle(
    drawn: Drawn,
    used: Mapping[str, float],
    before: Mapping[str, float] | None,
    names: Collection[str] = KEPT,
) -> None:
    """Say what a call took of what it holds.

    Args:
        drawn: what it holds.
        used: by total.
        before: what was said before, which counts no more; None: nothing was.
        names: the totals that are spoken of.
    """
    told: set[int] = set()
    for share, amount in drawn:
        if share.name in names:
            said = before is not None and share.name in before
            took = used.get(share.name, 0.0) - (before or {}).get(share.name, 0.0)
            # A call that drew from a share twice took what it took once.
            share.settle(0.0 if said else amount, 0.0 if id(share) in told else took)
            told.add(id(share))


def release(drawn: Drawn) -> None:
    """The call did not run: calls are given back; amounts were settled."""
    for share, amount in drawn:
        if share.name not in KEPT:
            share.release(amount)
