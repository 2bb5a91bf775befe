"""The part of the store about archived parts of chains: who reads the journal finds them in their places."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb
from ringfence.kernel.journal.gaps import Gap
from ringfence.kernel.journal.segments import Archive, ArchiveError, Segment
from ringfence.kernel.journal.store_agents import lineage_values
from ringfence.kernel.journal.store_base import Lineage, stored_row
from ringfence.kernel.journal.store_journal import PAGE_ROWS, JournalStore
from ringfence.kernel.journal.store_replay import ReplayStore
from ringfence.kernel.journal.types import AgentKey, KernelKey, Phase, StoredRow

_BINARY = ("before", "hash", "sha256", "kept")


class SegmentStore(JournalStore, ReplayStore):
    """Reads the journal together with what was archived of it. Every method may raise Unavailable and ArchiveError."""

    archive: Archive = Archive(lambda: Path("archive"))

    # -- parts ----------------------------------------------------------------------------------------------------

    async def segments(self, chain: int, after_step: int = -1) -> list[Segment]:
        """List the archived parts of a chain that hold later steps than one, in their order."""
        values = {"chain": chain, "after": after_step}
        return await self._all("segments.of_chain", _segment, values)

    async def archived(self, chain: int) -> dict[str, int]:
        """Count what lies in archives of a chain: files, rows, size_bytes, and rows that were pruned."""
        return await self._first("segments.totals", dict[str, int], {"chain": chain}) or {}

    async def archived_behind(self, chain: int) -> tuple[int, int, int]:
        """Where the archive of a chain ends.

        Returns:
            Step of the checkpoint that all of it lies behind, its last position, and the last step that was pruned; 0: none.
        """
        row = await self._tuple("segments.behind", {"chain": chain})
        return (0, 0, 0) if row is None else (int(row[0]), int(row[1]), int(row[2]))

    async def archive_rows(
        self, kernel: KernelKey, fence: int, segment: Segment, gone: Sequence[int]
    ) -> int | None:
        """Note a part whose file is on disk, and remove rows that it holds from the journal, in one transaction.

        Returns:
            How many rows were removed; None: this kernel may not write the chain, and nothing was done.
        """
        part = asdict(segment)
        del part["at"]
        part |= {name: f"\\x{part[name].hex()}" for name in _BINARY}
        values = {"kernel": kernel, "fence": fence, "part": Jsonb(part), "gone": list(gone)}
        row = await self._tuple("segments.archive", values)
        return None if row is None else row[0]

    async def give_up(self, kernel: KernelKey, fence: int, segment: Segment) -> bool:
        """Note that a part's file is to be there no more; False: this kernel may not say so, or it was said before."""
        values = {
            "kernel": kernel,
            "fence": fence,
            "chain": segment.chain,
            "first_pos": segment.first_pos,
        }
        return await self._tuple("segments.prune", values) is not None

    async def age_of(self, chain: int, first_pos: int) -> float:
        """Seconds since a part was archived."""
        row = await self._tuple("segments.age", {"chain": chain, "first_pos": first_pos})
        return 0.0 if row is None else float(row[0])

    async def needed_steps(self, chain: int, steps: Iterable[int], first: int, last: int) -> frozenset[int]:
        """Which of these steps have rows outside of a part, or were put to a person."""
        values = {"chain": chain, "steps": list(steps), "first": first, "last": last}
        return frozenset(row[0] for row in await self._tuples("segments.needed", values))

    async def branches_after(self, chain: int, step: int) -> list[int]:
        """List the branches that have later steps than one."""
        rows = await self._tuples("segments.branches_after", {"chain": chain, "step": step})
        return [row[0] for row in rows]

    async def checkpoint_before(self, chain: int, lineage: Lineage, step: int, age_s: float) -> int:
        """Find the step of a lineage's newest checkpoint up to `step` that is so old; 0: there is none."""
        values = {"chain": chain, "step": step, "age_s": age_s, **lineage_values(lineage)}
        row = await self._tuple("segments.checkpoint_before", values)
        return 0 if row is None else int(row[0])

    async def saved_at(self, chain: int, step: int) -> int:
        """Find the position of a step's outcome; 0: it has none."""
        row = await self._tuple("segments.saved_at", {"chain": chain, "step": step})
        return 0 if row is None else int(row[0])

    async def old_checkpoints(self, chain: int, step: int) -> int:
        """Count checkpoints before a step that no later one rests on."""
        row = await self._tuple("segments.old_checkpoints", {"chain": chain, "step": step})
        return 0 if row is None else int(row[0])

    async def prune_checkpoints(self, kernel: KernelKey, fence: int, chain: int, step: int) -> int:
        """Remove them, if this kernel may write the chain; returns how many."""
        values = {"kernel": kernel, "fence": fence, "chain": chain, "step": step}
        row = await self._tuple("segments.prune_checkpoints", values)
        return 0 if row is None else int(row[0])

    async def kernel_chains(
        self, kernel: KernelKey, age_s: float, least: int, many: int
    ) -> list[tuple[str, KernelKey, int]]:
        """List kernels of this one's data directory whose own chains have rows that are so old and not archived.

        Args:
            kernel: this one.
            age_s: in seconds.
            least: how many such rows the chain of an earlier kernel has to have.
            many: the same of this kernel's chain, which grows.

        Returns:
            Id, key, and the last position that is so old. A chain's last row is never among them.
        """
        values = {"kernel": kernel, "age_s": age_s, "least": least, "many": many}
        rows = await self._tuples("segments.kernel_chains", values)
        return [(str(row[0]), KernelKey(row[1]), int(row[2])) for row in rows]

    async def last_position(self, chain: int) -> int:
        """Find the position of a chain's last row."""
        row = await self._tuple("segments.head", {"chain": chain})
        return 0 if row is None else int(row[0])

    async def removed_before(self, age_s: float) -> list[tuple[AgentKey, str, float]]:
        """List agents that were removed so long ago: key, id and seconds since."""
        rows = await self._tuples("segments.removed_before", {"age_s": age_s})
        return [(AgentKey(row[0]), str(row[1]), float(row[2])) for row in rows]

    async def ended_before(self, age_s: float, limit: int) -> list[str]:
        """List ids of agents that ended so long ago and are there still, the longest ended first."""
        rows = await self._tuples("segments.ended_before", {"age_s": age_s, "limit": limit})
        return [row[0] for row in rows]

    async def prune_messages(self, age_s: float, limit: int, *, dry: bool) -> int:
        """Forget messages that were taken or voided so long ago, where no rollback comes back to it; returns how many."""
        row = await self._tuple("segments.prune_messages", {"age_s": age_s, "limit": limit, "dry": dry})
        return 0 if row is None else int(row[0])

    # -- reading --------------------------------------------------------------------------------------------------

    async def rows_of(self, segment: Segment) -> list[StoredRow]:
        """All rows of a part; those that left the database are marked.

        Raises:
            ArchiveError: its file is missing or was changed.
        """
        return await asyncio.to_thread(self.archive.read, segment)

    async def _gone(self, segment: Segment) -> list[StoredRow]:
        """Rows of a part that the database has no more; none where they were given up."""
        if segment.pruned_at is not None or not segment.first_step:
            return []
        kept = segment.kept_positions()
        return [row for row in await self.rows_of(segment) if row.pos not in kept]

    async def audit(
        self, chain: int | None = None, since: datetime | None = None
    ) -> AsyncIterator[StoredRow]:
        """Walk the audit records of one chain, or of all, with what was archived.

        Of a part that was given up only what stayed is there.
        """
        async for item in self.evidence(chain, since):
            for row in item.rows if isinstance(item, Gap) else (item,):
                yield row

    async def evidence(
        self, chain: int | None = None, since: datetime | None = None, *, check: bool = False
    ) -> AsyncIterator[StoredRow | Gap]:
        """Walk the same, with the parts that were given up as such.

        Args:
            chain: an agent's key, or minus a kernel's; None: all.
            since: of each chain only what was recorded from the first call on that started then or later.
            check: hold what stayed in the database against the files.
        """
        moment = None if since is None else int(since.timestamp() * 1_000_000)
        for one in await self.chains() if chain is None else [chain]:
            pos, begun = 0, moment is None
            for segment in await self.segments(one):
                pos = segment.last_pos
                if not begun and moment is not None and segment.until_us < moment:
                    continue
                if segment.pruned_at is not None:
                    if begun:
                        yield await self._gap(segment)
                    continue
                rows = await self.rows_of(segment)
                if check:
                    await self._check_kept(segment, rows)
                for row in rows:
                    begun = begun or moment is None or row.started_us >= moment
                    if begun:
                        yield row
            async for row in self._after(one, pos, None if begun else since):
                yield row

    async def _gap(self, segment: Segment) -> Gap:
        rows = await self.rows_between(segment.chain, segment.first_pos, segment.last_pos)
        return Gap(
            chain=segment.chain,
            first=segment.first_pos,
            last=segment.last_pos,
            before=segment.before,
            hash=segment.hash,
            kept=segment.kept,
            rows=tuple(rows),
        )

    async def _after(self, chain: int, pos: int, since: datetime | None) -> AsyncIterator[StoredRow]:
        if since is not None:
            async for row in super().audit(chain, since):
                if row.pos > pos:
                    yield row
            return
        while True:
            rows = await self.rows_between(chain, pos + 1)
            for row in rows:
                yield row
            if len(rows) < PAGE_ROWS:
                return
            pos = rows[-1].pos

    async def rows_between(self, chain: int, first: int, last: int | None = None) -> list[StoredRow]:
        """List what the database has between two positions; without `last` one page."""
        found: list[StoredRow] = []
        pos = first - 1
        while True:
            values = {"chain": chain, "pos": pos, "limit": PAGE_ROWS}
            rows = await self._all("journal.audit_chain", stored_row, values)
            if last is None:
                return rows
            found += [row for row in rows if row.pos <= last]
            if len(rows) < PAGE_ROWS or rows[-1].pos >= last:
                return found
            pos = rows[-1].pos

    async def hash_at(self, chain: int, pos: int) -> bytes | None:
        """Read the hash of one row, wherever it is; None: there is no such row."""
        found = await super().hash_at(chain, pos)
        if found is not None:
            return found
        for segment in await self.segments(chain):
            # The last one of a part and the one before it are known without the file.
            if segment.last_pos == pos:
                return segment.hash
            if segment.first_pos - 1 == pos:
                return segment.before
            if segment.first_pos <= pos < segment.last_pos and segment.pruned_at is None:
                return (await self.rows_of(segment))[pos - segment.first_pos].hash
        return None

    async def step(self, key: AgentKey, step: int) -> list[StoredRow]:
        """List all rows of one step in the order they were written."""
        rows = await super().step(key, step)
        if rows:
            return rows
        for segment in await self.segments(key, step):
            if segment.first_step <= step <= segment.last_step:
                rows = [row for row in await self._gone(segment) if row.step == step]
                if rows:
                    return rows
        return []

    async def steps_page(self, key: AgentKey, after_step: int, limit: int) -> list[StoredRow]:
        """List intents and outcomes of the next `limit` steps after `after_step`, by step, then in written order."""
        rows = await super().steps_page(key, after_step, limit)
        segments = await self.segments(key, after_step + 1)
        for nr, segment in enumerate(segments):
            rows += [r for r in await self._gone(segment) if r.step > after_step and _is_step(r)]
            steps = sorted({row.step for row in rows})[:limit]
            later = segments[nr + 1].first_step if nr + 1 < len(segments) else 0
            if len(steps) == limit and steps[-1] < later:
                break
        steps = sorted({row.step for row in rows})[:limit]
        last = steps[-1] if steps else 0
        return sorted((row for row in rows if row.step <= last), key=_place)

    async def lineage_outcomes(
        self, key: AgentKey, lineage: Lineage, after_step: int
    ) -> AsyncIterator[StoredRow]:
        """Walk the outcomes of a branch and its ancestors after `after_step`, by step."""
        segments = await self.segments(key, after_step + 1)
        held: list[tuple[tuple[int, int], StoredRow]] = []
        at = 0
        async for row in super().lineage_outcomes(key, lineage, after_step):
            # A part is opened when its first step comes: no more than a few are held.
            while at < len(segments) and segments[at].first_step <= row.step:
                await self._take(segments[at], lineage, after_step, held)
                at += 1
            while held and held[0][0] < _place(row):
                yield heapq.heappop(held)[1]
            yield row
        while at < len(segments):
            await self._take(segments[at], lineage, after_step, held)
            at += 1
            ahead = segments[at].first_step if at < len(segments) else None
            while held and (ahead is None or held[0][0][0] < ahead):
                yield heapq.heappop(held)[1]
        while held:
            yield heapq.heappop(held)[1]

    async def _take(
        self,
        segment: Segment,
        lineage: Lineage,
        after_step: int,
        held: list[tuple[tuple[int, int], StoredRow]],
    ) -> None:
        for row in await self._gone(segment):
            of_it = any(row.branch == branch and row.step <= up_to for branch, up_to in lineage)
            if row.phase is Phase.OUTCOME and row.step > after_step and of_it:
                heapq.heappush(held, (_place(row), row))

    async def _check_kept(self, segment: Segment, rows: Sequence[StoredRow]) -> None:
        """Hold the rows that stayed in the database against those of the file.

        Raises:
            ArchiveError: one is missing, was changed or added.
        """
        by_pos = {row.pos: row for row in rows}
        there = await self.rows_between(segment.chain, segment.first_pos, segment.last_pos)
        for row in there:
            if by_pos.get(row.pos) != row:
                raise ArchiveError(
                    "the record is not the one that was archived", chain=row.chain, pos=row.pos
                )
        missing = segment.kept_positions() ^ {row.pos for row in there}
        if missing:
            raise ArchiveError("the record is missing", chain=segment.chain, pos=min(missing))


def _segment(**values: Any) -> Segment:
    for name in _BINARY:
        values[name] = bytes(values[name])
    return Segment(**values)


def _is_step(row: StoredRow) -> bool:
    return row.phase in (Phase.INTENT, Phase.OUTCOME)


def _place(row: StoredRow) -> tuple[int, int]:
    return row.step, row.pos
