"""Who was spawned by whom."""

from __future__ import annotations

from dataclasses import dataclass

from ringfence.kernel.journal.database import borrowed
from ringfence.kernel.journal.store_base import StoreBase, statement
from ringfence.kernel.journal.types import AgentKey, JournalError, KernelKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    """One child: who spawned it at which step, and how far below an agent that was submitted."""

    child: AgentKey
    parent: AgentKey
    step: int
    depth: int


def _key(key: int, maker: str) -> tuple[AgentKey, str]:
    return AgentKey(key), maker


def _parent(parent: int) -> AgentKey:
    return AgentKey(parent)


def _kin(child: int, parent: int, step: int, depth: int) -> Kin:
    return Kin(child=AgentKey(child), parent=AgentKey(parent), step=step, depth=depth)


def _amount(key: str, sum: float) -> tuple[str, float]:  # noqa: A002 - the column's name
    return key, sum


class KinStore(StoreBase):
    """The part of the store about families."""

    async def new_agent_key(self, kernel: KernelKey) -> tuple[AgentKey, str]:
        """Take a key for an agent whose files are made before its row.

        Returns:
            The key, and the id of the kernel that makes them.

        Raises:
            Unavailable: the database is away.
        """
        found = await self._first("kin.new_key", _key, {"kernel": kernel})
        if found is None:
            raise JournalError("the sequence of agents gave no number")
        return found

    async def was_born(
        self, kernel: KernelKey, fence: int, maker: str, parent: AgentKey, child: str
    ) -> bool | None:
        """Whether a child was committed whose files another kernel made.

        The maker is fenced where it is dead: its lease has run out, it was released, or it ran before on the asker's data
        directory.

        Returns:
            None: nobody can say for good, as the maker may still commit it, or the database knows no such kernel, or
            the asker is fenced itself.

        Raises:
            Unavailable: the database is away.
        """
        values = {"kernel": kernel, "fence": fence, "maker": maker, "parent": parent, "child": child}
        async with borrowed(self._pool) as connection, connection.transaction():
            await connection.execute(statement("kin.fence_maker"), values)
            told = await connection.execute(statement("kin.is_fenced"), values)
            if await told.fetchone() is None:
                return None
            # A batch that was checked before the fence moved holds this lock until it is committed.
            await connection.execute(statement("kin.lock_parent"), values)
            told = await connection.execute(statement("kin.is_born"), values)
            return await told.fetchone() is not None

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
