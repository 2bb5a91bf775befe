"""Who was spawned by whom."""

from __future__ import annotations

from dataclasses import dataclass

from ringfence.kernel.journal.store_base import StoreBase
from ringfence.kernel.journal.types import AgentKey, JournalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    """One child: who spawned it at which step, and how far below an agent that was submitted."""

    child: AgentKey
    parent: AgentKey
    step: int
    depth: int


def _key(key: int) -> AgentKey:
    return AgentKey(key)


def _parent(parent: int) -> AgentKey:
    return AgentKey(parent)


def _kin(child: int, parent: int, step: int, depth: int) -> Kin:
    return Kin(child=AgentKey(child), parent=AgentKey(parent), step=step, depth=depth)


def _amount(key: str, sum: float) -> tuple[str, float]:  # noqa: A002 - the column's name
    return key, sum


class KinStore(StoreBase):
    """The part of the store about families."""

    async def new_agent_key(self) -> AgentKey:
        """Take a key for an agent whose files are made before its row.

        Raises:
            Unavailable: the database is away.
        """
        found = await self._first("kin.new_key", _key, {})
        if found is None:
            raise JournalError("the sequence of agents gave no number")
        return found

    async def parents(self, key: AgentKey) -> list[AgentKey]:
        """The parent of an agent, the parent's parent and so on; empty where it was submitted.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("kin.parents", _parent, {"agent": key})

    async def descendants(self, key: AgentKey) -> list[Kin]:
        """All that descend from an agent, parents before their children.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("kin.descendants", _kin, {"agent": key})

    async def kin(self) -> list[Kin]:
        """Everyone who was spawned.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("kin.all", _kin, {})

    async def reserved_by_children(self, key: AgentKey, after_step: int) -> dict[str, float]:
        """What the totals of the children took from an agent's, of those spawned after a step.

        Raises:
            Unavailable: the database is away.
        """
        return dict(await self._all("kin.reserved", _amount, {"agent": key, "after": after_step}))
