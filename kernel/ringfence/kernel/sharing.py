"""How much of a budget others have used, for conditions that ask: a family, the children of one parent, or a pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ringfence.kernel.budgets import Budgets, limits_of
from ringfence.policy.conditions import FAMILY, SIBLINGS, Share
from ringfence.policy.manifest import parse_manifest

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.journal.types import AgentKey
    from ringfence.kernel.thread import Thread


async def shared(core: Core, thread: Thread, tests: Iterable[Share]) -> dict[tuple[str, str], float]:
    """The part of a limit that is used or held, by whose and which total it is. What has no limit is left out.

    Raises:
        JournalError: the database is away.
    """
    found: dict[tuple[str, str], float] = {}
    for of, total in dict.fromkeys((test.of, test.total) for test in tests if test.of):
        part = await (
            _of_kin(core, thread, of, total) if of in (FAMILY, SIBLINGS) else _of_pool(core, of, total)
        )
        if part is not None:
            found[of, total] = part
    return found


async def _of_pool(core: Core, name: str, total: str) -> float | None:
    pool = core.pools.declared.get(name)
    if pool is None or total not in pool.limits:
        return None
    limit, state = core.pools.limit(pool, total).amount, await core.pools.state(pool, total)
    return (state.taken - state.idle) / limit if limit else 1.0


async def _of_kin(core: Core, thread: Thread, of: str, total: str) -> float | None:
    """Of what the head of the family may spend, or the parent."""
    above = await core.store.parents(thread.key)
    if of == SIBLINGS and not above:
        return 0.0  # nobody else is its parent's child
    head = above[0] if of == SIBLINGS else above[-1] if above else thread.key
    below = await core.store.descendants(head)
    if of == SIBLINGS:
        keys = [kin.child for kin in below if kin.parent == head]
    else:
        keys = [head, *(kin.child for kin in below)]
    limit = await _limit(core, thread, head, total)
    if limit is None:
        return None
    used = 0.0
    for key in keys:
        used += await _used(core, key, total)
    return used / limit if limit else 1.0


async def _limit(core: Core, asker: Thread, key: AgentKey, total: str) -> float | None:
    live = core.threads.get(key)
    if live is not None:
        return live.budgets.limit(total)
    record = await core.store.agent_by_key(key)
    if record is None:
        return None
    # It has ended, or is another kernel's; what it was given counts all the same.
    manifest = parse_manifest(record.manifest, record.source)
    overrides = limits_of(await core.store.budgets(key))
    ceilings = asker.rights.kernel_file.ceilings.budgets
    return Budgets(record.id, manifest.budgets, ceilings, {}, overrides=overrides).limit(total)


async def _used(core: Core, key: AgentKey, total: str) -> float:
    """What an agent itself used and holds, without what it gave its children."""
    live = core.threads.get(key)
    if live is None:
        counts = await core.store.counts(key)
        used, held = await core.store.amounts(key, every=total == "bytes")
        return float(counts.get(total, 0)) + used.get(total, 0.0) + held.get(total, 0.0)
    given: Mapping[str, float] = await core.store.reserved_by_children(key, 0)
    return max(0.0, live.budgets.bound(total) - given.get(total, 0.0))
