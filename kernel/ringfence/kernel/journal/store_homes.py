"""Where the newest files of agents are, of those that are in a shared store too."""

from __future__ import annotations

from ringfence.kernel.journal.store_base import StoreBase
from ringfence.kernel.journal.types import AgentKey, KernelKey


class HomeStore(StoreBase):
    """The part of the store about the places of files."""

    async def homes(self) -> dict[str, str]:
        """The data directory of each agent that has not ended and has one, by agent id.

        Raises:
            Unavailable: the database is away.
        """
        return {str(agent): str(home) for agent, home in await self._tuples("homes.all", {})}

    async def home_of(self, agent: AgentKey) -> str:
        """The data directory with an agent's newest files; empty where its files are in no shared store.

        Raises:
            Unavailable: the database is away.
        """
        row = await self._tuple("homes.of", {"agent": agent})
        return "" if row is None else str(row[0])

    async def move_home(self, agent: AgentKey, kernel: KernelKey, home: str) -> bool:
        """Say that an agent's newest files are elsewhere now; False: another kernel owns it.

        Raises:
            Unavailable: the database is away.
        """
        return await self._tuple("homes.move", {"agent": agent, "kernel": kernel, "home": home}) is not None
