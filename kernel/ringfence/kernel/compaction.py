"""Moves old steps of agents out of the database, into files of the archive, and gives old files up.

A step leaves when no program, rollback, branch, person or other agent can ask the database for it: it lies behind the
checkpoint that every branch goes on from which anybody can still go back to. It goes in small parts, one transaction each,
and nothing of it stands in the path of a call.

INVARIANT: at every instant a row is in the database, or in a file that is on disk and whose sum the agent's chain holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.journal.chain import genesis
from ringfence.kernel.journal.gaps import PRUNED
from ringfence.kernel.journal.segments import (
    ARCHIVED,
    SEGMENT_BYTES,
    SEGMENT_ROWS,
    Segment,
    kept_of,
    place_of,
    staying,
)
from ringfence.kernel.journal.types import AgentKey
from ringfence.kernel.replay import Lineage
from ringfence.kernel.rollback_cuts import pruned_before
from ringfence.policy.keeping import Keeping

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.journal.types import StoredRow
    from ringfence.kernel.thread import Thread

CHECKPOINTS_PRUNED: Final = "agent.checkpoints_pruned"
"""The event that says before which step checkpoints were removed."""

EVERYTHING: Final = (1 << 62) - 1
"""Behind this all steps lie: of an agent that was removed."""

DAY_S: Final = 86_400.0

PAUSE_S: Final = 0.05
"""Between two parts, so that others get their turn."""

ROWS_LEAST: Final = 64
"""Rows that are worth a file."""


@dataclass(slots=True, kw_only=True)
class Compacted:
    """What was done, or would be, of one agent."""

    agent: str
    parts: int = 0
    rows: int = 0
    stayed: int = 0
    size_bytes: int = 0
    behind: int = 0
    given_up: int = 0
    freed_bytes: int = 0
    checkpoints: int = 0
    files: list[str] = field(default_factory=list[str])

    @property
    def nothing(self) -> bool:
        """Whether nothing was to be done."""
        return not self.parts and not self.given_up and not self.checkpoints

    def document(self) -> dict[str, Any]:
        """As `prune` shows it."""
        return {
            "agent": self.agent,
            "behind_step": self.behind,
            "archived_rows": self.rows,
            "kept_rows": self.stayed,
            "files": self.files,
            "archive_bytes": self.size_bytes,
            "pruned_files": self.given_up,
            "freed_bytes": self.freed_bytes,
            "checkpoints": self.checkpoints,
        }


class Compaction:
    """Archives and prunes journals of this kernel's agents."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.alone = asyncio.Lock()
        """Held by whoever archives a chain that no thread stands for: its files may be swept by nobody meanwhile."""

    async def behind(self, thread: Thread, keeping: Keeping) -> int:
        """The step of the checkpoint behind which nothing is needed any more; 0: nothing may go.

        Nobody goes back to before the oldest rollback point that is there, nor to before the steps that are kept. Of every
        branch that has steps after that, the checkpoint counts that it goes on from there.
        """
        if keeping.journal_s is None:
            return 0
        store = self._core.store
        latest = thread.last_step - keeping.journal_steps
        points = await asyncio.to_thread(thread.environment.snapshots.points)
        gone = await pruned_before(store, thread)
        steps = [int(point[1:]) for point in points if point[1:].isdigit() and int(point[1:]) >= gone]
        latest = min([latest, *(step - 1 for step in steps)])
        if latest <= 0:
            return 0
        every = await store.branches(thread.key)
        found = {thread.branch, *await store.branches_after(thread.key, latest)}
        known = {branch.branch for branch in every}
        # A kernel that starts counts the last period of each rate from the journal, a parent's with its children.
        spans = [span / 1e6 for span in thread.budgets.spans_us]
        spans += [DAY_S] if await store.parents(thread.key) else []
        age = max([keeping.journal_s, *spans])
        cuts = [
            await store.checkpoint_before(thread.key, Lineage.of(branch, every).parts, latest, age)
            for branch in sorted(found & known)
        ]
        return min(cuts, default=0)

    async def compact(self, thread: Thread, keeping: Keeping, *, dry: bool) -> Compacted:
        """Archive what an agent's journal doesn't need any more."""
        done = Compacted(agent=thread.id)
        behind = await self.behind(thread, keeping)
        last = await self._core.store.saved_at(thread.key, behind) if behind else 0
        if last:
            await self._parts(
                thread.key, thread.id, behind, last, done, thread=thread, keeping=keeping, dry=dry
            )
            await self._checkpoints(thread, done, dry=dry)
        return done

    async def _checkpoints(self, thread: Thread, done: Compacted, *, dry: bool) -> None:
        """Remove checkpoints before the one that all archived steps lie behind: nothing goes back beyond that one any more."""
        core = self._core
        async with thread.operation:
            behind, _, _ = await core.store.archived_behind(thread.key)
            done.checkpoints = await core.store.old_checkpoints(thread.key, behind)
            if not done.checkpoints or dry:
                return
            facts = {"before_step": behind, "checkpoints": done.checkpoints}
            await core.event(thread.key, CHECKPOINTS_PRUNED, thread.id, **facts)
            await core.failpoints.reach("prune:checkpoints", thread.id)
            await core.store.prune_checkpoints(core.kernel, core.fence, thread.key, behind)

    async def compact_removed(self, key: AgentKey, agent: str, *, dry: bool) -> Compacted:
        """Archive the journal of an agent that was removed; its chain is this kernel's meanwhile, and `alone` the caller's."""
        done = Compacted(agent=agent)
        last = await self._core.store.last_position(key)
        await self._parts(key, agent, EVERYTHING, last, done, thread=None, keeping=Keeping(), dry=dry)
        return done

    async def compact_kernels(self, age_s: float, *, dry: bool) -> list[Compacted]:
        """Archive what is so old of the chains of this kernel and of those before it on its data directory.

        They are never given up: heads that were signed in them are what agents' chains are held against.
        """
        core, store = self._core, self._core.store
        found: list[Compacted] = []
        async with self.alone:
            for kernel, key, last in await store.kernel_chains(core.kernel, age_s, ROWS_LEAST, SEGMENT_ROWS):
                done = Compacted(agent=kernel)
                # A chain whose number is a kernel's is below zero.
                chain = AgentKey(-key)
                await self._parts(
                    chain, kernel, EVERYTHING, last, done, thread=None, keeping=Keeping(), dry=dry
                )
                found.append(done)
        return found

    async def _parts(
        self,
        key: AgentKey,
        agent: str,
        behind: int,
        last: int,
        done: Compacted,
        *,
        thread: Thread | None,
        keeping: Keeping,
        dry: bool,
    ) -> None:
        store = self._core.store
        done.behind = behind if behind < EVERYTHING else 0
        lock = asyncio.Lock() if thread is None else thread.operation
        # INVARIANT: files are swept where nobody is between one that is written and the row that names it.
        async with lock:
            if not dry:
                await self._sweep(key, agent)
            _, pos, _ = await store.archived_behind(key)
            before = await store.hash_at(key, pos) if pos else genesis(key)
        while pos < last and before is not None:
            rows = await self._page(key, pos, last)
            if len(rows) < ROWS_LEAST and behind < EVERYTHING:
                return
            # INVARIANT: no rollback finds out meanwhile where it can go, and none went further back since.
            async with lock:
                if thread is not None and await self.behind(thread, keeping) < behind:
                    return
                if not dry and (await store.archived_behind(key))[1] != pos:
                    return  # another look is at it
                moved = await self._part(key, agent, behind, before, rows, done, dry=dry)
            if not moved:
                return
            pos, before = rows[-1].pos, rows[-1].hash
            await asyncio.sleep(PAUSE_S)

    async def _page(self, key: AgentKey, pos: int, last: int) -> list[StoredRow]:
        """The rows of the next part."""
        found: list[StoredRow] = []
        size = 0
        while pos < last:
            for row in await self._core.store.rows_between(key, pos + 1):
                size += len(row.body)
                if row.pos > last or len(found) >= SEGMENT_ROWS or (found and size > SEGMENT_BYTES):
                    return found
                found.append(row)
            pos = found[-1].pos if found else last
        return found

    async def _part(
        self,
        key: AgentKey,
        agent: str,
        behind: int,
        before: bytes,
        rows: Sequence[StoredRow],
        done: Compacted,
        *,
        dry: bool,
    ) -> bool:
        core, store = self._core, self._core.store
        first, last = rows[0].pos, rows[-1].pos
        needed = await store.needed_steps(key, {row.step for row in rows if row.step > 0}, first, last)
        stays = staying(rows, behind=behind, needed=needed) if key > 0 else frozenset[int]()
        gone = [row for row in rows if row.pos not in stays]
        if not gone and len(rows) < SEGMENT_ROWS:
            return False
        done.parts += 1
        done.rows += len(gone)
        done.stayed += len(stays)
        if dry:
            return True
        place = place_of(agent, first, last)
        sha256, size = await asyncio.to_thread(store.archive.write, place, rows, before)
        steps = [row.step for row in gone]
        segment = Segment(
            chain=key,
            first_pos=first,
            last_pos=last,
            first_step=min(steps, default=0),
            last_step=max(steps, default=0),
            behind=0 if behind == EVERYTHING else behind,
            rows=len(rows),
            since_us=min(row.started_us for row in rows),
            until_us=max(row.started_us for row in rows),
            size_bytes=size,
            before=before,
            hash=rows[-1].hash,
            sha256=sha256,
            kept=kept_of(rows, before, stays),
            place=place,
        )
        # Read back as whoever will need it reads it: a row that can't be had again does not leave.
        await asyncio.to_thread(store.archive.read, segment)
        await core.failpoints.reach("archive:written", agent)
        # The chain of a kernel that is dead is closed: ours has the word.
        await core.event(key if key > 0 else -core.kernel, ARCHIVED, agent, **segment.facts())
        await core.failpoints.reach("archive:recorded", agent)
        moved = await store.archive_rows(core.kernel, core.fence, segment, [row.pos for row in gone])
        await core.failpoints.reach("archive:moved", agent)
        done.size_bytes += size
        done.files.append(place)
        return moved is not None

    async def _sweep(self, key: AgentKey, agent: str) -> None:
        """Remove what a kernel that died left: drafts, files that nothing names, and those that were given up."""
        store = self._core.store
        known = [one.place for one in await store.segments(key) if one.pruned_at is None]
        await asyncio.to_thread(store.archive.sweep, agent, known)

    async def give_up(self, key: AgentKey, agent: str, age_s: float, done: Compacted, *, dry: bool) -> None:
        """Give the archived parts up that are older; the agent ended, and its chain is this kernel's."""
        core, store = self._core, self._core.store
        if not dry:
            await self._sweep(key, agent)
        for segment in await store.segments(key):
            if segment.pruned_at is not None or segment.at is None:
                continue
            if await store.age_of(key, segment.first_pos) < age_s:
                continue
            done.given_up += 1
            done.freed_bytes += segment.size_bytes
            if dry:
                continue
            facts = segment.facts()
            # Recorded first: what is missing without a word in the chain was taken away by somebody.
            await core.event(key, PRUNED, agent, **facts)
            await core.failpoints.reach("prune:recorded", agent)
            if not await store.give_up(core.kernel, core.fence, segment):
                return
            await core.failpoints.reach("prune:given_up", agent)
            await asyncio.to_thread(store.archive.remove, segment.place)
            await asyncio.sleep(PAUSE_S)
