"""Agents that one kernel wants from another that lives, to roll them back together with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psycopg.rows import tuple_row
from ringfence.kernel.journal.database import borrowed
from ringfence.kernel.journal.store_base import StoreBase, statement
from ringfence.kernel.journal.types import AgentKey, KernelKey

CHANNEL_HANDOVER: Final = "ringfence_handover"
ASKED: Final = "asked"
BACK: Final = "back"
"""Says that an agent is wanted, or that one was given back."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An agent of this kernel that another one wants."""

    agent: AgentKey
    asker: KernelKey


class HandoverStore(StoreBase):
    """The part of the store about agents that go from kernel to kernel."""

    async def reserve_agents(self, kernel: KernelKey, agents: Sequence[AgentKey]) -> dict[AgentKey, str]:
        """Have agents go back together under this kernel and no other, and ask their owners for them.

        Returns:
            Those that another living kernel has reserved, with its id; nothing was reserved then.

        Raises:
            Unavailable: the database is away.
        """
        values = {"kernel": kernel, "agents": sorted(agents)}
        async with borrowed(self._pool) as connection, connection.cursor(row_factory=tuple_row) as cursor:
            async with connection.transaction() as whole:
                await cursor.execute(statement("handovers.reserve"), values)
                if len(await cursor.fetchall()) < len(set(agents)):
                    await cursor.execute(statement("handovers.held_by"), values)
                    held = {AgentKey(agent): str(by) for agent, by in await cursor.fetchall()}
                    whole.force_rollback = True
                    return held
            await connection.execute(
                statement("notify.send"), {"channel": CHANNEL_HANDOVER, "payload": ASKED}
            )
        return {}

    async def drop_handovers(self, kernel: KernelKey, agents: Sequence[AgentKey]) -> None:
        """Want agents no longer.

        Raises:
            Unavailable: the database is away.
        """
        await self._tuple("handovers.drop", {"kernel": kernel, "agents": list(agents)})

    async def handed_agents(self) -> set[AgentKey]:
        """Agents that go, or went, back together under some kernel and were not given back: their files may be another's.

        Raises:
            Unavailable: the database is away.
        """
        return {AgentKey(row[0]) for row in await self._tuples("handovers.agents", {})}

    async def wanted_agents(self, kernel: KernelKey) -> list[Wanted]:
        """List agents of this kernel that living ones want.

        Raises:
            Unavailable: the database is away.
        """
        found = await self._tuples("handovers.asked", {"kernel": kernel})
        return [Wanted(AgentKey(agent), KernelKey(asker)) for agent, asker in found]

    async def handover_answer(self, kernel: KernelKey, agent: AgentKey) -> tuple[bool, str]:
        """What became of an agent that this kernel wants: whether its program was ended for it, and why it is refused.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple("handovers.answer", {"kernel": kernel, "agent": agent})
        return (False, "") if row is None else (bool(row[0]), str(row[1]))

    async def hand_over(self, agent: AgentKey, kernel: KernelKey, asker: KernelKey, *, lived: bool) -> bool:
        """Make the kernel that wants an agent its owner.

        Args:
            agent: which.
            kernel: the owner, for whom nothing of it is under way.
            asker: who wants it.
            lived: whether its program was ended for it.

        Returns:
            False: the asker lives no longer or wants it no longer, or `kernel` does not own it.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": agent, "kernel": kernel, "asker": asker, "lived": lived}
        async with borrowed(self._pool) as connection, connection.transaction():
            await connection.execute(statement("kernels.lock_agent"), values)
            cursor = await connection.execute(statement("handovers.give"), values)
            return await cursor.fetchone() is not None

    async def refuse_handover(self, agent: AgentKey, asker: KernelKey, why: str) -> None:
        """Say why an agent is not given over.

        Raises:
            Unavailable: the database is away.
        """
        await self._tuple("handovers.refuse", {"agent": agent, "asker": asker, "why": why})

    async def give_back_agent(self, agent: AgentKey, kernel: KernelKey, owner: KernelKey | None) -> None:
        """Leave an agent to the kernel that has its files: one that has ended to `owner`, any other to whoever claims it.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": agent, "kernel": kernel, "owner": owner}
        async with borrowed(self._pool) as connection:
            async with connection.transaction():
                await connection.execute(statement("kernels.lock_agent"), values)
                await connection.execute(statement("handovers.give_back"), values)
            await connection.execute(statement("notify.send"), {"channel": CHANNEL_HANDOVER, "payload": BACK})
