"""The part of the store that replay, rollback and operators' listings read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from ringfence.kernel.journal.database import borrowed
from ringfence.kernel.journal.store_agents import lineage_values
from ringfence.kernel.journal.store_base import Lineage, StoreBase, statement, stored_row
from ringfence.kernel.journal.types import AgentKey, KernelKey, StateVersion, StoredRow

PAGE_ROWS = 256
REACH_ROWS = 20_000
"""How far back a reply that was lost with its connection is looked for."""


class ReplayStore(StoreBase):
    """Reads what a thread needs to go on, and what people want to see of it."""

    async def effect_outcomes(self, key: AgentKey) -> AsyncIterator[StoredRow]:
        """Walk the outcomes of calls that left the system, over all branches, in the order they were recorded.

        Raises:
            Unavailable: the database is away.
        """
        pos = 0
        while True:
            rows = await self._all(
                "replay.effects", stored_row, {"chain": key, "pos": pos, "limit": PAGE_ROWS}
            )
            for row in rows:
                yield row
            if len(rows) < PAGE_ROWS:
                return
            pos = rows[-1].pos

    async def fact_rows(self, key: AgentKey) -> AsyncIterator[StoredRow]:
        """Walk the outcomes that say something about facts, over all branches, in the order they were recorded.

        Raises:
            Unavailable: the database is away.
        """
        pos = 0
        while True:
            rows = await self._all("replay.facts", stored_row, {"chain": key, "pos": pos, "limit": PAGE_ROWS})
            for row in rows:
                yield row
            if len(rows) < PAGE_ROWS:
                return
            pos = rows[-1].pos

    async def outcomes_from(self, key: AgentKey, lineage: Lineage, step: int, limit: int) -> list[StoredRow]:
        """List the next outcomes of a branch and its ancestors from a step on, by step, without what was archived.

        Raises:
            Unavailable: the database is away.
        """
        place = {"after_step": step, "after_pos": 0, "limit": limit}
        return await self._all(
            "journal.lineage", stored_row, {"chain": key, **lineage_values(lineage), **place}
        )

    async def born_under(self, key: AgentKey) -> bytes | None:
        """The body of the call that spawned an agent; None: it was submitted.

        Raises:
            Unavailable: the database is away.
        """
        found = await self._all("replay.born", bytes_of, {"agent": key})
        return found[0] if found else None

    async def purged_grants(self, key: AgentKey) -> list[str]:
        """List grants that were revoked together with the results recorded under them.

        Raises:
            Unavailable: the database is away.
        """
        bodies = await self._all("replay.purged", bytes_of, {"chain": key})
        return [grant for body in bodies for grant in json.loads(body)["grants"]]

    async def answered(self, key: AgentKey, lane: str, lane_step: int) -> StoredRow | None:
        """Find the newest outcome of one place among the last rows of an agent; None: there is none.

        Raises:
            Unavailable: the database is away.
        """
        values = {"chain": key, "lane": lane, "lane_step": lane_step, "reach": REACH_ROWS}
        rows = await self._all("replay.answered", stored_row, values)
        return rows[0] if rows else None

    async def steps_page(self, key: AgentKey, after_step: int, limit: int) -> list[StoredRow]:
        """List intents and outcomes of the next `limit` steps after `after_step`, by step, then in written order.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all(
            "replay.steps_page", stored_row, {"chain": key, "after": after_step, "limit": limit}
        )

    async def take_agent(self, key: AgentKey, kernel: KernelKey) -> bool:
        """Own an agent that no living kernel owns, whatever its state.

        Returns:
            False: another kernel owns it.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": key, "kernel": kernel}
        async with borrowed(self._pool) as connection, connection.transaction():
            await connection.execute(statement("kernels.lock_agent"), values)
            cursor = await connection.execute(statement("replay.take"), values)
            return await cursor.fetchone() is not None

    async def state_before(self, key: str, version: int) -> StateVersion | None:
        """Find the version of a key that stood before `version`; None: there was none.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("replay.state_before", StateVersion, {"key": key, "version": version})


def bytes_of(body: bytes) -> bytes:
    """Make a row of one column from it."""
    return bytes(body)
