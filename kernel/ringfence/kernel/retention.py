"""Removes rollback points that are not kept any longer: what an operator says, or what is old of agents that ended.

Points are removed from the oldest on, over all branches, and the agent's chain says up to which step. So a point that stays
has every point that a rollback to it needs: those are of its own step and later ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import AgentRecord, JournalError
from ringfence.kernel.problems import Problem, conflict
from ringfence.kernel.rollback_plan import PRUNED, pruned_before
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.syscalls.errors import SyscallError

log = logging.getLogger(__name__)

POINTS_KEPT = 1000
"""Rollback points of one agent that stay after it has ended."""

POINTS_DAYS = 30
"""Days that they stay."""

LOOK_EVERY_S = 3600.0
"""How often ended agents are looked at."""


def first_kept(store: SnapshotStore, keep: int | None, older_than_s: float | None) -> int:
    """The step of the oldest point that stays, by number and by age.

    Args:
        store: the agent's points.
        keep: how many of the newest stay; None: any number.
        older_than_s: seconds after which they go; None: never.
    """
    steps = [int(point[1:]) for point in store.points() if point[1:].isdigit()]
    first = 0
    if keep is not None and len(steps) > keep:
        first = steps[-keep] if keep else steps[-1] + 1
    if older_than_s is not None and steps:
        since = time.time() - older_than_s
        young = [step for step in steps if store.taken_at(f"p{step}") >= since]
        first = max(first, min(young, default=steps[-1] + 1))
    return first


class Retention:
    """Pruning of this kernel's agents."""

    def __init__(self, core: Core, points_of: Callable[[str], SnapshotStore]) -> None:
        self._core = core
        self._points_of = points_of

    async def prune(
        self, thread: Thread, *, keep: int | None, older_than_s: float | None, operator: str
    ) -> dict[str, Any]:
        """Remove an agent's oldest points.

        Returns:
            pruned: ids; kept: how many stay; before_step: points of earlier steps are gone; freed_bytes.

        Raises:
            Problem: a point that is to stay is damaged, so nothing was removed.
        """
        store = thread.environment.snapshots
        # INVARIANT: no point is taken while the content that nobody needs is found, and none that a call under way needs goes.
        async with thread.operation, thread.environment.lock():
            before = await asyncio.to_thread(first_kept, store, keep, older_than_s)
            begun = [intent.step for intent, _ in await self._core.store.unfinished(thread.key)]
            before = min([before, *begun])
            known = await pruned_before(self._core.store, thread)
            points = await asyncio.to_thread(store.points)
            gone = [point for point in points if point[1:].isdigit() and int(point[1:]) < max(before, known)]
            freed = 0
            if gone:
                try:
                    kept = [point for point in points if point not in gone]
                    needed = await asyncio.to_thread(store.content_of, kept)
                except SnapshotError as error:
                    text = f"nobody knows what the points that stay need: {error}; nothing was pruned"
                    raise conflict(text) from error
                facts = {"before_step": max(before, known), "points": len(gone), "operator": operator}
                # Recorded first: after a crash in the middle no rollback takes what is left for all there was.
                await self._core.event(thread.key, PRUNED, thread.id, **facts)
                try:
                    freed = await asyncio.to_thread(store.remove, gone, needed)
                except SnapshotError as error:
                    raise conflict(f"not all of the points' files could be removed: {error}") from error
        return {
            "agent": thread.id,
            "pruned": gone,
            "kept": len(points) - len(gone),
            "before_step": max(before, known),
            "freed_bytes": freed,
        }

    async def run(self, thread_of: Callable[[str], Awaitable[Thread]]) -> None:
        """Look at agents that ended, again and again."""
        while True:
            try:
                for record in await self._core.store.agents(True):
                    if record.state in FINAL_STATES:
                        await self._prune_ended(record, thread_of)
            except JournalError as error:
                log.warning("old rollback points can't be looked at now: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _prune_ended(self, record: AgentRecord, thread_of: Callable[[str], Awaitable[Thread]]) -> None:
        store, age = self._points_of(record.id), POINTS_DAYS * 86400.0
        try:
            # Of agents whose files are elsewhere there are none here.
            first = await asyncio.to_thread(first_kept, store, POINTS_KEPT, age)
            points = await asyncio.to_thread(store.points)
            if not points or first <= int(points[0][1:]):
                return
            thread = await thread_of(record.id)
            done = await self.prune(thread, keep=POINTS_KEPT, older_than_s=age, operator="")
            log.info("pruned %d rollback points of %s", len(done["pruned"]), record.id)
        except (Problem, SyscallError, SnapshotError) as error:
            log.warning("the rollback points of %s can't be pruned: %s", record.id, error)
