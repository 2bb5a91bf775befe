"""What operators do with budgets of many agents together: look, raise, lower; and waking those that waited for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ringfence.kernel.budgets import plain
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.pool_shares import EPS
from ringfence.kernel.pool_words import view_of, waits_for
from ringfence.kernel.problems import Problem, bad_usage
from ringfence.kernel.thread import Thread
from ringfence.policy.pools import PERIODS, Pool, PoolLimit, parse_limit, selector
from ringfence.policy.problems import PatternError
from ringfence.sandbox.types import SandboxError

BACK = "file"
"""Value that goes back to what the kernel file says."""


async def pool(kernel: Kernel, name: str, limit: str, value: str, operator: str) -> dict[str, Any]:
    """Show pools, or set one limit first and wake what waited for it.

    Args:
        kernel: whose.
        name: a selector; empty: all pools.
        limit: a total; empty: only show.
        value: its limit, or `file`.
        operator: who asks.

    Raises:
        Problem: no such pool or limit, or a value that is none.
    """
    if not name:
        if limit or value:
            raise bad_usage("name the agents whose limit it is: `--fleet`, or `--label team=billing`")
        return {"pools": await views(kernel, kernel.core.pools.declared.values(), everywhere=True)}
    found = _pool(kernel, name)
    if limit or value:
        await _set(kernel, found, limit, value, operator)
    return {"pools": await views(kernel, (found,), everywhere=True)}


def _pool(kernel: Kernel, name: str) -> Pool:
    try:
        canonical, _ = selector(name)
    except PatternError as error:
        raise bad_usage(f"{error.message}; {error.fix}") from None
    declared = kernel.core.pools.declared
    if canonical not in declared:
        known = ", ".join(declared) or "none"
        text = f"the kernel file declares no budget of `{canonical}`; it has: {known}; add it under `spec.budgets` and reload"
        raise Problem(text, exit_code=4, reason="NoSuchPool")
    return declared[canonical]


def _parsed(pool: Pool, limit: str, value: str) -> PoolLimit | None:
    """The limit that is to be in force; None: the kernel file's."""
    if limit not in pool.limits:
        known = ", ".join(f"`{name}`" for name in pool.limits)
        raise bad_usage(f"the budget of `{pool.name}` has no limit of `{limit}`; it has: {known}")
    if value == BACK:
        return None
    wanted, period = parse_limit(limit, value), pool.limits[limit].period
    if wanted is None:
        raise bad_usage(f"`{value}` is no limit of `{limit}`; write an amount such as `80`")
    if wanted.period not in ("", period):
        stands = f"for each {PERIODS[period]}" if period else "in all"
        raise bad_usage(
            f"`{limit}` of `{pool.name}` counts {stands}; write the amount alone, or change the kernel file and reload it"
        )
    return PoolLimit(amount=wanted.amount, period=period)


async def _set(kernel: Kernel, pool: Pool, limit: str, value: str, operator: str) -> None:
    wanted, pools, store = _parsed(pool, limit, value), kernel.core.pools, kernel.core.store
    if wanted is None:
        await store.unset_pool_limit(pool.name, limit)
    else:
        await store.set_pool_limit(pool.name, limit, wanted.amount, operator)
    facts = {"limit": limit, "value": BACK if wanted is None else plain(wanted.amount), "operator": operator}
    await kernel.core.operator_event("operator.budget", pool.name, **facts)
    await pools.relimit(pools.declared)
    # INVARIANT: when this returns no kernel takes any more under the limit of before.
    await pools.others.ask(pools.place(pool, limit))
    await pools.others.announce()
    await pools.upkeep.look()


async def views(kernel: Kernel, chosen: Iterable[Pool], *, everywhere: bool = False) -> list[dict[str, Any]]:
    """Pools with what is used and left.

    Args:
        kernel: whose.
        chosen: which.
        everywhere: whether other kernels are asked what of theirs is idle.
    """
    pools = kernel.core.pools
    found: list[dict[str, Any]] = []
    for one in chosen:
        for name in one.limits:
            state = await pools.state(one, name, everywhere=everywhere)
            view = view_of(one, name, pools.limit(one, name), state, pools.origin(one, name))
            found.append(dataclasses.asdict(view))
    return found


def of(thread: Thread) -> tuple[Pool, ...]:
    """The pools that an agent is in."""
    return () if thread.pools is None else thread.pools.pools


async def wake(kernel: Kernel) -> None:
    """Start agents again that were parked for a pool which has room now: it was raised, or another window has begun."""
    room: dict[tuple[str, str], float] = {}
    for thread in list(kernel.core.threads.values()):
        waits = waits_for(thread.waiting_for) if thread.state == "parked" and thread.program is None else None
        if waits is None:
            continue
        if waits not in room:
            room[waits] = await _room(kernel, *waits)
        member = thread.pools
        counted = member is not None and any(p.name == waits[1] for p in member.by_name.get(waits[0], ()))
        asked = member.asked if member is not None and counted else 0.0
        if not counted or room[waits] + EPS >= max(2 * EPS, asked):
            await _start(kernel, thread, waits)
            room.pop(waits, None)


async def _room(kernel: Kernel, name: str, pool_name: str) -> float:
    pools = kernel.core.pools
    pool = pools.declared.get(pool_name)
    if pool is None or name not in pool.limits:
        return float("inf")  # nobody limits it any more
    state = await pools.state(pool, name)
    return pools.limit(pool, name).amount - state.taken + state.idle


async def _start(kernel: Kernel, thread: Thread, waits: tuple[str, str]) -> None:
    async with thread.operation:
        if thread.state != "parked" or thread.program is not None or waits_for(thread.waiting_for) != waits:
            return
        try:
            await kernel.processes.start(thread)
        except SandboxError as error:
            await kernel.processes.not_started(thread, str(error))
