"""Removes rollback points that are not kept any longer: what an operator or the kernel file says, or what is old of agents that ended.

Points are removed from the oldest on, over all branches, and the agent's chain says up to which step. So a point that stays
has every point that a rollback to it needs: those are of its own step and later ones.

INVARIANT: what the branch of an agent that has not ended needs is never removed: points of calls that have not ended, waiting ones
included, and of the newest rollback on, which can be undone. By the kernel file also none since its program begins again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import AgentRecord, JournalError
from ringfence.kernel.problems import Problem, conflict
from ringfence.kernel.replay import NO_CUT
from ringfence.kernel.rollback_cuts import PRUNED, pruned_before
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.policy.keeping import PointsKept
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.syscalls.errors import SyscallError

log = logging.getLogger(__name__)

POINTS_KEPT = 1000
"""Rollback points of one agent that stay after it has ended."""

POINTS_DAYS = 30
"""Days that they stay."""

LOOK_EVERY_S = 3600.0
"""How often agents are looked at."""


def ended_kept() -> PointsKept:
    """What stays of an agent that ended, where the kernel file doesn't say."""
    return PointsKept(age_s=POINTS_DAYS * 86400.0, count=POINTS_KEPT)


def first_kept(store: SnapshotStore, kept: PointsKept) -> int:
    """The step of the oldest point that stays, by number, age and size.

    Args:
        store: the agent's points.
        kept: the bounds.

    Raises:
        SnapshotError: the size of one that may stay can't be told.
    """
    keep, older_than_s = kept.count, kept.age_s
    steps = [int(point[1:]) for point in store.points() if point[1:].isdigit()]
    first = 0
    if keep is not None and len(steps) > keep:
        first = steps[-keep] if keep else steps[-1] + 1
    if older_than_s is not None and steps:
        since = time.time() - older_than_s
        young = [step for step in steps if store.taken_at(f"p{step}") >= since]
        first = max(first, min(young, default=steps[-1] + 1))
    if kept.size_bytes is not None and steps:
        first = max(first, _first_within(store, [step for step in steps if step >= first], kept.size_bytes))
    return first


def _first_within(store: SnapshotStore, steps: Sequence[int], size_bytes: int) -> int:
    """The step of the oldest point that fits with all newer ones; content that several have counts once."""
    first, left = (steps[-1] + 1 if steps else 0), size_bytes
    seen: set[str] = set()
    for step in reversed(steps):
        left -= _taken_bytes(store, f"p{step}", seen)
        if left < 0:
            return first
        first = step
    return first


def _taken_bytes(store: SnapshotStore, point: str, seen: set[str]) -> int:
    """What a point takes on the disk, without content that was seen before; that is noted."""
    entries = store.require(point).paths
    fresh = {entry.blob: entry.size for entry in entries if entry.blob and entry.inline is None}
    found = sum(size for sha256, size in fresh.items() if sha256 not in seen)
    seen.update(fresh)
    return found + store.size_of(point)


class Retention:
    """Pruning of this kernel's agents."""

    def __init__(
        self,
        core: Core,
        points_of: Callable[[str], SnapshotStore],
        kept_of: Callable[[AgentRecord], PointsKept | None] = lambda _: None,
    ) -> None:
        self._core = core
        self._points_of = points_of
        self._kept_of = kept_of

    async def prune(
        self, thread: Thread, kept: PointsKept, *, operator: str, dry: bool = False
    ) -> dict[str, Any]:
        """Remove an agent's oldest points; `dry` only says which.

        Without an operator it is the kernel file that says so.

        Returns:
            pruned: ids; kept: how many stay; before_step: points of earlier steps are gone; freed_bytes.

        Raises:
            Problem: a point that is to stay is damaged, so nothing was removed.
        """
        store = thread.environment.snapshots
        # INVARIANT: no point is taken while the content that nobody needs is found, and none that a call under way needs goes.
        async with thread.operation, thread.environment.lock():
            try:
                before = await asyncio.to_thread(first_kept, store, kept)
            except SnapshotError as error:
                raise conflict(f"nobody knows what the points take: {error}; nothing was pruned") from error
            # INVARIANT: what is listed has its intent: one of an object's is taken without the lock, by a call that has not ended.
            points = await asyncio.to_thread(store.points)
            before = min(before, await self._needed_from(thread, by_file=not operator))
            known = await pruned_before(self._core.store, thread)
            gone = [point for point in points if point[1:].isdigit() and int(point[1:]) < max(before, known)]
            freed = 0
            if gone and not dry:
                try:
                    stay = [point for point in points if point not in gone]
                    needed = await asyncio.to_thread(store.content_of, stay)
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

    async def _needed_from(self, thread: Thread, *, by_file: bool) -> int:
        """The first step whose point the agent's own branch needs."""
        store = self._core.store
        needed = [intent.step for intent, _ in await store.unfinished(thread.key)]
        if thread.state not in FINAL_STATES:
            branches = await store.branches(thread.key)
            if thread.branch != thread.lineage.root:
                # The rollback that the branch began with has the first step after what it left.
                intent = await store.rollback_intent(thread.key, "")
                needed += [] if intent is None else [intent.step]
            if by_file:
                checkpoint = await store.latest_checkpoint(thread.key, thread.lineage.parts)
                begun = next(one.cut_step for one in branches if one.branch == thread.lineage.root)
                needed.append(1 + (begun if checkpoint is None else checkpoint.step))
        return min(needed, default=NO_CUT)

    async def run(self, thread_of: Callable[[str], Awaitable[Thread]]) -> None:
        """Look at agents that ended, and with a policy at all of this kernel's, again and again."""
        while True:
            try:
                for record in await self._core.store.agents(True):
                    kept = self._kept_of(record)
                    ended = record.state in FINAL_STATES
                    if ended or (kept is not None and record.key in self._core.threads):
                        await self._look_at(record, kept or ended_kept(), thread_of)
            except (JournalError, OSError) as error:
                log.warning("old rollback points can't be looked at now: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look_at(
        self, record: AgentRecord, kept: PointsKept, thread_of: Callable[[str], Awaitable[Thread]]
    ) -> None:
        store = self._points_of(record.id)
        try:
            # Of agents whose files are elsewhere there are none here.
            first = await asyncio.to_thread(first_kept, store, kept)
            points = await asyncio.to_thread(store.points)
            if not points or first <= int(points[0][1:]):
                return
            thread = await thread_of(record.id)
            done = await self.prune(thread, kept, operator="")
            if done["pruned"]:
                log.info("pruned %d rollback points of %s", len(done["pruned"]), record.id)
        except (Problem, SyscallError, SnapshotError, OSError) as error:
            log.warning("the rollback points of %s can't be pruned: %s", record.id, error)
