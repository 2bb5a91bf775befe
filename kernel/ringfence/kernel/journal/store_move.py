"""What a copy of an agent takes over beside its journal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb
from ringfence.kernel.journal.database import borrowed
from ringfence.kernel.journal.store_agents import lineage_values
from ringfence.kernel.journal.store_base import Lineage, StoreBase, statement
from ringfence.kernel.journal.types import AgentKey, BranchRecord, GrantRecord

PAGE_ROWS = 64

TABLES: Mapping[str, str] = {
    "checkpoints": "step",
    "memories": "key",
    "artifacts": "",
    "messages": "key",
    "budgets": "",
}
"""What is exported beside the journal, with the column that pages go by; empty: all at once."""


def grant_document(grant: GrantRecord) -> dict[str, Any]:
    """A grant, with the id that it has where it comes from."""
    return {
        "id": grant.id,
        "origin": grant.origin,
        "verdict": grant.verdict,
        "rule": grant.rule,
        "created_by": grant.created_by,
        "created_at": grant.created_at.isoformat(),
        "expires_at": None if grant.expires_at is None else grant.expires_at.isoformat(),
        "uses_left": grant.uses_left,
    }


def branch_document(branch: BranchRecord) -> dict[str, Any]:
    """A branch without its time."""
    return {key: value for key, value in asdict(branch).items() if key != "created_at"}


class MoveStore(StoreBase):
    """The part of the store that copies agents."""

    async def take_branches_and_grants(
        self,
        key: AgentKey,
        branches: Sequence[Mapping[str, Any]],
        branch: int,
        grants: Sequence[Mapping[str, Any]],
    ) -> None:
        """Give a new agent the branches and rights of another, in one transaction.

        Args:
            key: the new agent.
            branches: as `branch_document` makes them.
            branch: the one that it goes on with.
            grants: as `grant_document` makes them.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": key, "branches": Jsonb(list(branches)), "grants": Jsonb(list(grants))}
        async with borrowed(self._pool) as connection, connection.transaction():
            await connection.execute(statement("move.branches"), values)
            await connection.execute(statement("agents.set_branch"), {"agent": key, "branch": branch})
            await connection.execute(statement("move.grants"), values)

    async def removed_at(self, key: AgentKey) -> datetime | None:
        """When an agent was removed; None: it was not.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple("move.removed", {"agent": key})
        return None if row is None else row[0]

    async def fork_kept(self, key: AgentKey, source: AgentKey, lineage: Lineage) -> None:
        """Copy checkpoints, the agent's own memories and its artifacts as they stand on a lineage, and raised limits.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": key, "source": source, **lineage_values(lineage)}
        async with borrowed(self._pool) as connection, connection.transaction():
            for name in ("fork_checkpoints", "fork_memories", "fork_artifacts", "fork_budgets", "fork_kin"):
                await connection.execute(statement(f"move.{name}"), values)

    async def export_rows(self, table: str, key: AgentKey) -> AsyncIterator[dict[str, Any]]:
        """Walk what one of `TABLES` has of an agent, as documents.

        Raises:
            Unavailable: the database is away.
        """
        cursor = TABLES[table]
        after = -1
        while True:
            values = {"agent": key, "after": after, "limit": PAGE_ROWS}
            rows = await self._all(f"move.export_{table}", dict[str, Any], values)
            for row in rows:
                yield row["v"]
            if not cursor or len(rows) < PAGE_ROWS:
                return
            after = rows[-1]["v"][cursor]

    async def layer_rows(self, name: str, agent: str) -> AsyncIterator[dict[str, Any]]:
        """Walk the state keys (`state`) or the claims (`claims`) that are an agent's, as documents.

        Raises:
            Unavailable: the database is away.
        """
        for row in await self._all(f"move.layer_{name}", dict[str, Any], {"agent": agent}):
            yield row["v"]

    async def import_row(self, table: str, key: AgentKey, row: Mapping[str, Any]) -> None:
        """Store one document that `export_rows` gave, for another agent.

        Raises:
            BadRow: it is none.
            Unavailable: the database is away.
        """
        await self._tuple(f"move.import_{table}", {"agent": key, "row": Jsonb(dict(row))})
