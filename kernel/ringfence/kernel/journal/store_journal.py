"""Reading the journal, and the shared state off the hot path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from ringfence.kernel.journal.database import borrowed
from ringfence.kernel.journal.statework import Held, StateWork
from ringfence.kernel.journal.store_agents import lineage_values
from ringfence.kernel.journal.store_base import Lineage, StoreBase, statement, stored_row
from ringfence.kernel.journal.types import AgentKey, StateVersion, StoredRow

PAGE_ROWS = 256
FIRST_POS = 0


class JournalStore(StoreBase):
    """The part of the store that reads the journal: in pages, with no connection held in between."""

    async def steps(self, key: AgentKey, *, after_step: int = 0, limit: int = 1000) -> list[StoredRow]:
        """List intents and outcomes of the steps after `after_step`, in the order they were written.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all(
            "journal.steps", stored_row, {"chain": key, "after": after_step, "limit": limit}
        )

    async def step(self, key: AgentKey, step: int) -> list[StoredRow]:
        """List all rows of one step in the order they were written.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("journal.step", stored_row, {"chain": key, "step": step})

    async def lineage_outcomes(
        self, key: AgentKey, lineage: Lineage, after_step: int
    ) -> AsyncIterator[StoredRow]:
        """Walk the outcomes of a branch and its ancestors after `after_step`, by step.

        Args:
            key: the agent.
            lineage: (branch, last step that counts) of the branch and its ancestors.
            after_step: outcomes up to and with this step are left out.

        Raises:
            Unavailable: the database is away.
        """
        values = {"chain": key, "limit": PAGE_ROWS, **lineage_values(lineage)}
        # Positions start at 1, so this pair comes before every row of the next step.
        place = (after_step + 1, FIRST_POS)
        while True:
            rows = await self._all(
                "journal.lineage", stored_row, {**values, "after_step": place[0], "after_pos": place[1]}
            )
            for row in rows:
                yield row
            if len(rows) < PAGE_ROWS:
                return
            place = (rows[-1].step, rows[-1].pos)

    async def done_by(self, key: AgentKey, at_us: int) -> tuple[int, int] | None:
        """The last step that had ended at a time, over all branches, and its branch; None: none had.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple("journal.done_by", {"chain": key, "at_us": at_us})
        return None if row is None else (int(row[0]), int(row[1]))

    async def active_since(self, at_us: int) -> list[AgentKey]:
        """Agents with calls that ended after a time, or have not ended and began after it.

        Raises:
            Unavailable: the database is away.
        """
        return [AgentKey(int(row[0])) for row in await self._tuples("journal.active_since", {"at_us": at_us})]

    async def rollback_intent(self, key: AgentKey, group: str) -> StoredRow | None:
        """The intent of an agent's part in a rollback of several, or of its newest one where none is named; None: it has none.

        Raises:
            Unavailable: the database is away.
        """
        values = {"chain": key, "group": f'"group": {{"id": "{group}"' if group else ""}
        return await self._first("journal.rollback_intent", stored_row, values)

    async def reads_since(
        self, keys: Sequence[str], without: Sequence[AgentKey], since_us: int, limit: int
    ) -> list[StoredRow]:
        """List reads of shared things that agents made since a time, and that were answered.

        Args:
            keys: of state; reads of others are left out.
            without: agents that don't count.
            since_us: microseconds since the epoch.
            limit: the most.

        Raises:
            Unavailable: the database is away.
        """
        values = {"keys": list(keys), "without": list(without), "since_us": since_us, "limit": limit}
        return await self._all("journal.reads_since", stored_row, values)

    async def unfinished(self, key: AgentKey) -> list[tuple[StoredRow, StoredRow | None]]:
        """List the intents that have no outcome, each with the last progress recorded for it, by step.

        Raises:
            Unavailable: the database is away.
        """
        intents = await self._all("journal.unfinished", stored_row, {"chain": key})
        if not intents:
            return []
        progress = await self._all(
            "journal.progress", stored_row, {"chain": key, "steps": [row.step for row in intents]}
        )
        last = {row.step: row for row in progress}
        return [(row, last.get(row.step)) for row in intents]

    async def last_event(self, key: AgentKey, action: str) -> StoredRow | None:
        """Find the newest event of this kind on an agent's chain.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("journal.last_event", stored_row, {"chain": key, "action": action})

    async def counts(self, key: AgentKey, after: int = 0) -> dict[str, int]:
        """Count what an agent has spent over all its branches.

        Args:
            key: the agent.
            after: allowed and destructive calls are those of later steps than this: of one run.

        Returns:
            max_step; steps, with refused ones; calls that were allowed; destructive and external ones among
            these; denied; unfinished (intents without outcome, which count as calls).

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("journal.counts", dict[str, int], {"chain": key, "after": after}) or {}

    async def amounts(
        self, key: AgentKey, after: int = 0, *, every: bool = False
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sum the tokens and dollars of an agent over all its branches, and the bytes that were counted.

        Args:
            key: the agent.
            after: only those of later steps than this: of one run.
            every: of all calls, for their bytes; else of those of models, which alone take anything else.

        Returns:
            What its calls used, and what intents without an outcome still hold.

        Raises:
            Unavailable: the database is away.
        """
        values = {"chain": key, "after": after, "every": every}
        found = await self._first("journal.amounts", dict[str, float], values) or {}
        names = ("tokens", "usd", "bytes") if every else ("tokens", "usd")
        used = {name: found.get(name, 0.0) for name in names}
        return used, {name: found.get(f"held_{name}", 0.0) for name in names}

    async def effect_ids(self, key: AgentKey, prefix: str = "") -> AsyncIterator[tuple[str, int, str]]:
        """Walk the effect ids of an agent over all branches, by step, with what became of each.

        Yields:
            (effect id, step, outcome); the outcome is empty where only the intent is known.

        Raises:
            Unavailable: the database is away.
        """
        after = 0
        while True:
            values = {"chain": key, "after": after, "prefix": prefix, "limit": PAGE_ROWS}
            rows = await self._all("journal.effect_ids", _effect, values)
            for row in rows:
                yield row
            if len(rows) < PAGE_ROWS:
                return
            after = rows[-1][1]

    async def audit(
        self, chain: int | None = None, since: datetime | None = None
    ) -> AsyncIterator[StoredRow]:
        """Walk the audit records of one chain, or of all: kernels' chains first, each in its order.

        Args:
            chain: an agent's key, or minus a kernel's; None: all.
            since: of each chain only what was recorded from the first call on that started then or later.

        Raises:
            Unavailable: the database is away.
        """
        for one in await self.chains() if chain is None else [chain]:
            pos = FIRST_POS
            if since is not None:
                moment = {"chain": one, "since_us": int(since.timestamp() * 1_000_000)}
                row = await self._tuple("journal.first_since", moment)
                if row is None or row[0] is None:
                    continue
                pos = row[0] - 1
            while True:
                values = {"chain": one, "pos": pos, "limit": PAGE_ROWS}
                rows = await self._all("journal.audit_chain", stored_row, values)
                for row in rows:
                    yield row
                if len(rows) < PAGE_ROWS:
                    break
                pos = rows[-1].pos

    async def chains(self) -> list[int]:
        """List the chains that have rows, kernels' own (negative) first.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("journal.chains", _chain, {})

    async def heads(self) -> dict[int, tuple[int, bytes]]:
        """Read position and hash of the last row of every chain.

        Raises:
            Unavailable: the database is away.
        """
        heads = await self._all("journal.heads", _head, {})
        return {chain: (pos, digest) for chain, pos, digest in heads}

    async def hash_at(self, chain: int, pos: int) -> bytes | None:
        """Read the hash of one row; None: there is no such row.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple("journal.hash_at", {"chain": chain, "pos": pos})
        return None if row is None else bytes(row[0])

    async def add_anchor(
        self, kernel: int, pos: int, digest: bytes, heads_digest: bytes, signature: bytes
    ) -> None:
        """Keep a copy of a signed anchor for people to look at; what counts is the file.

        Raises:
            Unavailable: the database is away.
        """
        values = {
            "kernel": kernel,
            "pos": pos,
            "hash": digest,
            "heads_digest": heads_digest,
            "signature": signature,
        }
        await self._tuple("journal.anchor", values)

    async def state_get(self, key: str) -> StateVersion | None:
        """Read the current version of a key; a deleted key has a version and no value.

        Returns:
            None: it never existed.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("state.get", StateVersion, {"key": key})

    async def state_read(self, key: str) -> StateVersion | None:
        """Read the current version of a key for an agent: with whether what wrote it was tainted.

        Returns:
            None: it never existed.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("state.read", StateVersion, {"key": key})

    async def state_version(self, key: str, version: int) -> StateVersion | None:
        """Read one version of a key, current or not.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("state.version", StateVersion, {"key": key, "version": version})

    async def state_versions_after(self, agent: str, step: int) -> list[StateVersion]:
        """List what an agent wrote after a step, by key and version.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("state.versions_after", StateVersion, {"agent": agent, "step": step})

    async def restore_state(
        self, agent: str, items: Sequence[tuple[str, int, bytes | None]], step: int
    ) -> list[tuple[str, int, str]]:
        """Put keys back, each as a new version, in one transaction.

        Args:
            agent: id of the agent whose rollback it is.
            items: (key, version it is expected to have now, value to restore; None: deleted).
            step: step the new versions are recorded under.

        Returns:
            (key, version now, who wrote it) of each key that someone changed meanwhile: left as it is.

        Raises:
            Unavailable: the database is away; nothing is changed.
        """
        if not items:
            return []
        work = StateWork()
        conflicts: list[tuple[str, int, str]] = []
        async with borrowed(self._pool) as connection, connection.transaction():
            keys = {"keys": sorted({key for key, _, _ in items})}
            await connection.execute(statement("state.hold"), keys)
            cursor = await connection.execute(statement("state.lock"), keys)
            work.load([Held(*row) for row in await cursor.fetchall()])
            for key, expected, value in items:
                now = work.current(key)
                if (now.agent, now.step) == (agent, step):
                    continue  # a kernel that died was here: it is this very rollback's
                if now.version != expected:
                    conflicts.append((key, now.version, now.agent))
                else:
                    work.put(key, value, agent, step)
            if work.changed:
                await connection.execute(statement("state.record"), work.history())
                await connection.execute(statement("state.advance"), work.latest())
        return conflicts


def _effect(effect_id: str, step: int, outcome: str) -> tuple[str, int, str]:
    return effect_id, step, outcome


def _head(chain: int, pos: int, hash: bytes) -> tuple[int, int, bytes]:  # noqa: A002 - the column's name
    return chain, pos, bytes(hash)


def _chain(chain: int) -> int:
    return chain
