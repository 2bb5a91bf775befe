"""Messages, memories and artifacts, as far as they are read or kept outside a call's own transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from psycopg.errors import DeadlockDetected
from psycopg.rows import tuple_row
from ringfence.kernel.journal.database import borrowed
from ringfence.kernel.journal.store_agents import lineage_values
from ringfence.kernel.journal.store_base import Lineage, StoreBase, made_by, statement
from ringfence.kernel.journal.types import AgentKey, Rewound, Unavailable
from ringfence.syscalls.lent import ArtifactFound, MemoryFound
from ringfence.syscalls.now import rfc3339

REWIND_TRIES = 5


def _memory(values: Sequence[Any]) -> MemoryFound:
    key, text, tags, metadata, score, created_at, agent, tainted = values
    moment: datetime = created_at
    return MemoryFound(
        id=f"e{key}",
        text=text,
        tags=tags,
        metadata=metadata,
        score=score,
        created_at=rfc3339(moment.astimezone(UTC)),
        agent=agent,
        tainted=tainted,
    )


class AtomStore(StoreBase):
    """The part of the store about messages, memories and artifacts."""

    async def _rows(self, name: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        async with borrowed(self._pool) as connection, connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(statement(name), values)
            return await cursor.fetchall()

    async def messages_waiting(self, keys: Sequence[AgentKey]) -> dict[AgentKey, tuple[int, int]]:
        """Newest message and how many wait, for each of these agents that has some.

        Raises:
            Unavailable: the database is away.
        """
        found = await self._rows("atoms.waiting", {"keys": list(keys)})
        return {AgentKey(key): (newest, count) for key, newest, count in found}

    async def agent_name(self, agent: str) -> str | None:
        """Name of the agent with this id.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple("atoms.agent_name", {"id": agent})
        return None if row is None else str(row[0])

    async def memory_search(
        self,
        agent: AgentKey,
        space: str,
        query: str,
        tags: Sequence[str],
        language: str,
        limit: int,
        offset: int,
    ) -> list[MemoryFound]:
        """Find entries, best first. An empty space is the agent's own.

        Raises:
            Unavailable: the database is away.
        """
        values = {
            "agent": agent,
            "space": space,
            "query": query,
            "tags": list(tags),
            "language": language,
            "limit": limit,
            "offset": offset,
        }
        return [_memory(row) for row in await self._rows("atoms.search", values)]

    async def artifact(self, agent: AgentKey, name: str, ref: str, version: int) -> ArtifactFound | None:
        """Find an artifact by name, or by reference where one is given. Version 0: the newest.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple(
            "atoms.artifact", {"agent": agent, "name": name, "ref": ref, "version": version}
        )
        if row is None:
            return None
        name, version, ref, media_type, size_bytes, tainted = row
        return ArtifactFound(
            name=name,
            version=version,
            ref=ref,
            media_type=media_type,
            size_bytes=size_bytes,
            tainted=tainted,
        )

    async def keep_artifact(self, agent: AgentKey, found: ArtifactFound, step: int, branch: int) -> None:
        """Give an artifact its name, outside any call's transaction; its version is the next one.

        Raises:
            Unavailable: the database is away.
        """
        values = {
            "agent": agent,
            "name": found.name,
            "ref": found.ref,
            "media_type": found.media_type,
            "size_bytes": found.size_bytes,
            "step": step,
            "branch": branch,
        }
        await self._tuple("atoms.artifact_keep", values)

    async def rewind_atoms(self, agent: AgentKey, lineage: Lineage, *, dry: bool) -> list[Rewound]:
        """Put messages, memories and artifacts of an agent to how they stand on a lineage; release later claims. Twice is as once.

        Args:
            agent: whose.
            lineage: branches, each with the last step that counts.
            dry: only say what would change.

        Raises:
            Unavailable: the database is away.
        """
        cut = max(limit for _, limit in lineage)
        values = {"agent": agent, "dry": dry, "cut": cut, **lineage_values(lineage)}
        for _ in range(REWIND_TRIES - 1):
            try:
                return await self._rewind(values)
            except Unavailable as error:
                # Receivers lock messages in the order of their calls, so the two may wait for each other.
                if not isinstance(error.__cause__, DeadlockDetected):
                    raise
        return await self._rewind(values)

    async def _rewind(self, values: dict[str, Any]) -> list[Rewound]:
        async with (
            borrowed(self._pool) as connection,
            connection.transaction(),
            connection.cursor(row_factory=made_by(Rewound)) as cursor,
        ):
            if not values["dry"]:
                await connection.execute(statement("atoms.lock_sent"), values)
            await cursor.execute(statement("atoms.rewind_kept"), values)
            kept = await cursor.fetchall()
            if not values["dry"]:
                await connection.execute(statement("atoms.release_claims"), values)
            await cursor.execute(statement("atoms.rewind"), values)
            return [*await cursor.fetchall(), *kept]
