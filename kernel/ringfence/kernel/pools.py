"""Budgets of many agents together, over all kernels of one database: shares are taken before calls draw from them.

A share is an agent's part of a pool's window, in a row that only the kernel which owns the agent may change. It takes what
a call needs, and some more where there is plenty; what is not given out goes back when the agent is idle, when anybody lacks
it, and when the kernel ends. After a crash whoever owns the agent next counts its share again from the journal.

INVARIANT: nobody is refused before every living kernel has given back what it had not given out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.store_pools import Move, Place, PoolState
from ringfence.kernel.journal.types import AgentKey, JournalError, KernelKey
from ringfence.kernel.pool_others import Others
from ringfence.kernel.pool_shares import EPS, UNKNOWN, Member, Share, Short
from ringfence.kernel.pool_upkeep import Upkeep
from ringfence.kernel.pool_words import exhausted
from ringfence.kernel.rate_shares import RateShares
from ringfence.policy.pools import Pool, PoolLimit
from ringfence.syscalls.errors import JournalUnavailable

log = logging.getLogger(__name__)

AGAIN_S: Final = 0.5
"""How often one looks again whether calls under way gave something back."""


class Pools:
    """The pools of one kernel."""

    def __init__(self, store: Store, kernel: KernelKey) -> None:
        self._store = store
        self._kernel = kernel
        self.declared: Mapping[str, Pool] = {}
        self.members: dict[AgentKey, Member] = {}
        self._labels: dict[AgentKey, Sequence[Mapping[str, str]]] = {}
        self._set: dict[tuple[str, str], float] = {}
        self._collecting: dict[Place, asyncio.Lock] = {}
        self._freed = asyncio.Event()
        self._waiting = 0
        self.others = Others(self, store, kernel)
        self.upkeep = Upkeep(self, store)
        self.tasks: set[asyncio.Task[None]] = set()
        self.rates = RateShares(store, kernel, self.spawn)

    # -- limits ---------------------------------------------------------------------------------------------------

    def limit(self, pool: Pool, name: str) -> PoolLimit:
        """The limit in force: an operator's, or the kernel file's."""
        declared = pool.limits[name]
        amount = self._set.get((pool.name, name))
        return declared if amount is None else PoolLimit(amount=amount, period=declared.period)

    @property
    def meters(self) -> bool:
        """Whether a pool limits bytes."""
        return any("bytes" in pool.limits for pool in self.declared.values())

    def origin(self, pool: Pool, name: str) -> str:
        """Who set the limit in force."""
        return "operator" if (pool.name, name) in self._set else "file"

    async def relimit(self, declared: Mapping[str, Pool]) -> None:
        """Put a kernel file's pools in force, with what operators set; what was not given out is taken anew.

        Raises:
            Unavailable: the database is away; the pools of before stay in force.
        """
        found = await self._store.pool_limits() if declared or self.declared else []
        self.declared, self._set = declared, {(r.pool, r.name): r.amount for r in found}
        for member in self.members.values():
            member.join(declared)
            for share in member.shares.values():
                share.trusted = False
        self.freed(always=True)
        with suppress(JournalError):  # they are not trusted, so nothing of them is given out before that
            await self.give_back(s for m in self.members.values() for s in m.shares.values())

    async def limits_again(self) -> None:
        """Read what operators set, so that nothing more is taken under what it was before.

        Raises:
            Unavailable: the database is away.
        """
        self._set = {(r.pool, r.name): r.amount for r in await self._store.pool_limits()}

    def distrust(self) -> None:
        """After a lapsed lease: look at each share again before anything of it is given out."""
        self.rates.distrust()
        for member in self.members.values():
            for share in member.shares.values():
                share.trusted = False

    # -- members --------------------------------------------------------------------------------------------------

    def member(self, key: AgentKey) -> Member | None:
        """An agent that was adopted, as its pools know it; None: no pool holds it."""
        if not self.declared:
            return None
        member = self.members.get(key)
        if member is None:
            member = Member(self, key, self._labels[key])
        if not member.join(self.declared):
            return None
        self.members[key] = member
        return member

    def labels_of(self, key: AgentKey) -> Sequence[Mapping[str, str]]:
        """Labels of an agent that was adopted, and of each agent above it: what its parents count for, it counts for."""
        return self._labels.get(key, ())

    async def adopt(self, key: AgentKey, labels: Sequence[Mapping[str, str]]) -> Member | None:
        """Take over an agent with the shares that its earlier kernel left.

        Args:
            key: the agent.
            labels: its own, and those of each agent above it.

        Raises:
            Unavailable: the database is away.
        """
        self._labels[key] = labels
        member = self.member(key)
        for left in await self._store.left_shares(key, self._kernel):
            pool = self.declared.get(left.pool)
            place = Place(pool=left.pool, name=left.name, opens=left.opens)
            if member is not None and pool is not None and pool in member.by_name.get(left.name, ()):
                share = self._share(member, pool, left.name)
                if share.place == place:
                    await self._open(member, share)
                    continue
            await self._store.open_share(self._kernel, key, place, left.closes, _now_us())
        return member

    def _share(self, member: Member, pool: Pool, name: str) -> Share:
        """The share of the window that is open now."""
        share = member.shares.get((pool.name, name))
        window = pool.window(name, datetime.now(UTC))
        if share is None or share.place.opens != window.opens:
            if share is not None and share.unsaid:
                member.shares[f"{pool.name} {share.place.opens}", name] = share  # until it is settled
            share = member.shares[pool.name, name] = Share(self, pool.name, name, window)
        return share

    async def _open(self, member: Member, share: Share) -> None:
        amount = await self._store.open_share(self._kernel, member.key, share.place, share.closes, _now_us())
        # What calls of this kernel hold that are not in the journal yet is taken again by the move that follows.
        share.used = max(share.used, amount - share.held)
        share.amount, share.trusted = amount, False
        share.said = (amount, amount, 0.0)

    # -- taking ---------------------------------------------------------------------------------------------------

    async def ensure(
        self, member: Member, wanted: Mapping[str, float], *, deadline_s: float, patient: bool
    ) -> bool:
        """Take what a call needs of every pool that counts it. When this returns `member.covers` it, until somebody draws.

        Args:
            member: whose call it is.
            wanted: by total.
            deadline_s: how long to wait for calls under way.
            patient: whether to wait for them at all.

        Returns:
            Whether anything had to be waited for.

        Raises:
            BudgetExhausted: a pool has not so much left.
            JournalUnavailable: the database is away.
        """
        until, waited = time.monotonic() + deadline_s, False
        while not member.covers(wanted):
            waited = True
            try:
                short = await self._take(member, wanted)
                if short:
                    short = await self._collect(member, wanted, short)
                if not short:
                    continue
                states = {one.share.place: await self._store.pool_state(one.share.place) for one in short}
            except JournalError as error:
                raise JournalUnavailable(
                    f"the pools can't be read: {error}; nothing was done, the call may be made again"
                ) from error
            left = until - time.monotonic()
            if patient and left > 0 and all(self._fits(one, states[one.share.place]) for one in short):
                await self._wait_for_calls(min(left, AGAIN_S))
                continue
            first = short[0]
            limit = self.limit(first.pool, first.share.name)
            raise exhausted(first.pool, first.share, limit, first.asked, states[first.share.place])
        return waited

    def _fits(self, short: Short, state: PoolState) -> bool:
        """Whether it would, if calls under way took nothing."""
        limit = self.limit(short.pool, short.share.name).amount
        return state.busy > 0 and state.taken - state.busy + short.asked <= limit + EPS

    async def _wait_for_calls(self, seconds: float) -> None:
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await self._freed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    def freed(self, *, always: bool = False) -> None:
        """Something was given back."""
        if self._waiting or always:
            self._freed.set()
            self._freed = asyncio.Event()

    async def _take(self, member: Member, wanted: Mapping[str, float], *, spare: bool = False) -> list[Short]:
        """One round trip for all shares that lack something. Returns those that still do."""
        shares = {
            (pool.name, name): (pool, self._share(member, pool, name), amount)
            for name, amount in wanted.items()
            for pool in member.by_name.get(name, ())
        }
        parts = [shares[key] for key in sorted(shares)]
        held: list[asyncio.Lock] = []
        try:
            for _, share, _ in parts:
                await share.lock.acquire()
                held.append(share.lock)
            moves: list[tuple[Pool, Share, float, Move]] = []
            for pool, share, amount in parts:
                if share.amount is None:
                    await self._open(member, share)
                if not share.trusted or share.rest + EPS < amount or spare:
                    limit = self.limit(pool, share.name).amount
                    move = share.move(member.key, limit, ask=amount, more=share.next_chunk(amount))
                    moves.append((pool, share, amount, move))
            if not moves:
                return []
            for _, share, _, _ in moves:
                share.said = UNKNOWN
            moved = await self._store.move_shares(self._kernel, [move for *_, move in moves])
            short: list[Short] = []
            for (pool, share, amount, move), done in zip(moves, moved, strict=True):
                share.moved(move, done.amount)
                if done.amount is not None and share.rest + EPS < amount:
                    short.append(Short(pool=pool, share=share, asked=amount))
            return short
        finally:
            for lock in held:
                lock.release()

    def refill(self, member: Member, share: Share) -> None:
        """Take more for a share that will be used up soon."""

        async def more() -> None:
            try:
                await self._take(member, {share.name: share.chunk / 2})
            except JournalError as error:
                log.debug("a share can't be filled now: %s", error)

        self.spawn(more())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside; it ends with the kernel."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # -- giving back ----------------------------------------------------------------------------------------------

    async def give_back(self, shares: Iterable[Share]) -> None:
        """Give the rest of shares back, and say what their calls hold.

        Raises:
            JournalError: the database is away; they keep it.
        """
        owners = {id(s): m.key for m in self.members.values() for s in m.shares.values()}
        known = [share for share in shares if share.amount is not None or share.lock.locked()]
        # One that takes more just now is waited for: it may do so under a limit of before.
        chosen = [share for share in known if share.unsaid or not share.trusted or share.lock.locked()]
        free = [share for share in chosen if not share.lock.locked()]
        for share in free:
            await share.lock.acquire()  # at once: nobody has it
        try:
            await self._move_back(free, owners)
        finally:
            for share in free:
                share.lock.release()
        for share in chosen:
            if share not in free:
                # INVARIANT: one lock at a time where one has to be waited for.
                async with share.lock:
                    await self._move_back([share], owners)

    async def _move_back(self, shares: Sequence[Share], owners: Mapping[int, AgentKey]) -> None:
        shares = [share for share in shares if share.amount is not None]
        moves = [share.move(owners[id(share)], 0.0) for share in shares]
        if not moves:
            return
        for share in shares:
            share.trusted, share.said = False, UNKNOWN  # what is going back is not given out
        moved = await self._store.move_shares(self._kernel, moves)
        for share, move, done in zip(shares, moves, moved, strict=True):
            share.moved(move, done.amount)
            share.chunk = 0.0
        self.freed()

    def at(self, place: Place) -> list[Share]:
        """Shares of a window that this kernel holds."""
        return [s for m in self.members.values() for s in m.shares.values() if s.place == place]

    async def _collect(
        self, member: Member, wanted: Mapping[str, float], short: Sequence[Short]
    ) -> list[Short]:
        """Have everybody give back what is not given out, and try again. Returns what is short all the same."""
        for one in short:
            place = one.share.place
            async with self._collecting.setdefault(place, asyncio.Lock()):
                if not await self._take(member, wanted):
                    return []
                await self.give_back(s for s in self.at(place) if s is not one.share)
                for agent in await self._store.left_behind(place):
                    await self._store.open_share(self._kernel, agent, place, one.share.closes, _now_us())
                if not await self._take(member, wanted):
                    return []
                await self.others.ask(place)
        return await self._take(member, wanted)

    # -- what people see ------------------------------------------------------------------------------------------

    @staticmethod
    def place(pool: Pool, name: str) -> Place:
        """The window of a total that is open now."""
        return Place(pool=pool.name, name=name, opens=pool.window(name, datetime.now(UTC)).opens)

    async def state(self, pool: Pool, name: str, *, everywhere: bool = False) -> PoolState:
        """How a pool stands now.

        Raises:
            JournalError: the database is away.
        """
        place = self.place(pool, name)
        await self.give_back(self.at(place))
        if everywhere:
            await self.others.ask(place)
        return await self._store.pool_state(place)


def _now_us() -> int:
    return time.time_ns() // 1000
