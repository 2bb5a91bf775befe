"""What people are told about pools: refusals, what an agent waits for, and lines of `budget`, `show` and `status`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from ringfence.kernel.budgets import plain
from ringfence.kernel.journal.store_pools import PoolState
from ringfence.kernel.moments import short_time
from ringfence.kernel.pool_shares import EPS, Share
from ringfence.policy.pools import FLEET, PERIODS, Pool, PoolLimit
from ringfence.syscalls.errors import BudgetExhausted

_WAITS: Final = re.compile(r"budget `([a-z]+)` of `([^`]+)`(?: until \S+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One total of a pool, as `budget`, `show` and `status` have it.

    Attributes:
        pool: its selector.
        period: `hour`, `day`, `week` or `month`; None: it is for ever.
        used: by calls that ended.
        reserved: by calls under way.
        left: what a new call may take.
        agents: that took some in this window.
        origin: who set the limit: `file` or `operator`.
        resets_at: RFC 3339; None: never.
    """

    pool: str
    name: str
    period: str | None
    limit: float
    used: float
    reserved: float
    left: float
    agents: int
    origin: str
    resets_at: str | None


def view_of(pool: Pool, name: str, limit: PoolLimit, state: PoolState, origin: str) -> PoolView:
    """One total of a pool for people."""
    closes = pool.window(name, datetime.now(UTC)).closes
    bound = max(0.0, state.taken - state.idle)
    return PoolView(
        pool=pool.name,
        name=name,
        period=PERIODS.get(limit.period),
        limit=limit.amount,
        used=round(max(0.0, bound - state.busy), 9),
        reserved=round(state.busy, 9),
        left=round(max(0.0, limit.amount - bound), 9),
        agents=state.agents,
        origin=origin,
        resets_at=None if closes is None else short_time(closes),
    )


def option(pool: str) -> str:
    """How a pool is named to `ringfence budget`."""
    return "--fleet" if pool == FLEET else f"--label {pool}"


def members(pool: str) -> str:
    """Who is in a pool."""
    return "all agents together" if pool == FLEET else f"all agents with `{pool}`"


def exhausted(pool: Pool, share: Share, limit: PoolLimit, asked: float, state: PoolState) -> BudgetExhausted:
    """The refusal of a call for which a pool has not enough."""
    name, mine = share.name, share.rest
    # What this agent has taken and not used is there for this very call.
    bound = max(0.0, state.taken - max(0.0, mine))
    left = max(0.0, limit.amount - bound)
    used = max(0.0, bound - state.busy)
    busy = f", reserved by calls under way {plain(state.busy)}" if state.busy > EPS else ""
    resets = "never" if share.closes is None else short_time(share.closes)
    again = (
        "it never refills by itself"
        if share.closes is None
        else f"it begins anew at {resets}, so try again then"
    )
    what = "is too small for this" if left > EPS else "is spent"
    less = "ask for less, or " if left > EPS else ""
    raised = plain(round(bound + asked, 6))
    return BudgetExhausted(
        f"budget `{name}` of {members(pool.name)} {what}: limit {limit.text}, used {plain(round(used, 9))}{busy}, "
        f"asked {plain(asked)}, left {plain(round(left, 9))}; {again}; {less}the operator raises it: "
        f"ringfence budget {option(pool.name)} set {name} {raised}",
        budget=name,
        pool=pool.name,
        limit=plain(limit.amount),
        used=plain(round(used, 9)),
        reserved=plain(round(state.busy, 9)),
        left=plain(round(left, 9)),
        asked=plain(asked),
        reset=resets,
    )


def waiting_text(name: str, pool: str, reset: str) -> str:
    """What an agent waits for that is parked for a pool."""
    until = "" if reset == "never" else f" until {reset}"
    return f"budget `{name}` of `{pool}`{until}"


def waits_for(text: str) -> tuple[str, str] | None:
    """The total and the pool that an agent waits for; None: it waits for something else."""
    found = _WAITS.fullmatch(text)
    return None if found is None else (found[1], found[2])
