"""Where A2A clients are told of their tasks, and what is still to be told there."""

from __future__ import annotations

from dataclasses import dataclass

from ringfence.kernel.journal.store_base import StoreBase


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConfig:
    """One place, as its client sees it."""

    id: str
    url: str
    token: str
    scheme: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRecord:
    """One place of which something is to be told.

    Attributes:
        seen: the last entry of the task that was taken there.
        attempts: how often it was tried since then, this time counted.
        failing_s: since when that fails, in seconds.
    """

    task: str
    id: str
    client: str
    agent: str
    url: str
    token: str
    scheme: str
    credentials: str
    seen: int
    attempts: int
    failing_s: float


class PushStore(StoreBase):
    """The part of the store about these. Every method may raise Unavailable."""

    async def push_set(
        self, task: str, given: PushConfig, credentials: str, *, whole: bool, most: int
    ) -> bool:
        """Keep one, in place of another with its id; False: the task has as many as it may.

        Args:
            task: of which task.
            given: where.
            credentials: what goes along with the scheme.
            whole: tell all of the task, and not only what comes from now on.
            most: places of one task.
        """
        values = {
            "task": task,
            "id": given.id,
            "url": given.url,
            "token": given.token,
            "scheme": given.scheme,
        }
        more = {"credentials": credentials, "whole": whole, "most": most}
        return await self._tuple("tasks.push_set", {**values, **more}) is not None

    async def pushes(self, task: str) -> list[PushConfig]:
        """Those of a task, by id."""
        return await self._all("tasks.pushes", PushConfig, {"task": task})

    async def push_delete(self, task: str, ident: str) -> None:
        """Forget one."""
        await self._tuple("tasks.push_delete", {"task": task, "id": ident})

    async def push_hurry(self) -> None:
        """Make due at once what waits."""
        await self._tuple("tasks.push_hurry", {})

    async def push_claim(self, limit: int, lease_s: float) -> list[PushRecord]:
        """Take some of which something is to be told; nobody else gets them within the lease."""
        return await self._all("tasks.push_claim", PushRecord, {"limit": limit, "lease_s": lease_s})

    async def push_told(self, one: PushRecord, seen: int, *, over: bool) -> None:
        """Everything up to an entry was taken there; `over`: nothing more comes."""
        await self._tuple("tasks.push_told", {"task": one.task, "id": one.id, "seen": seen, "over": over})

    async def push_failed(self, one: PushRecord, delay_s: float, error: str, *, over: bool) -> None:
        """It was not taken; tried again after a while, or `over`: no more."""
        values = {"task": one.task, "id": one.id, "delay_s": delay_s, "error": error, "over": over}
        await self._tuple("tasks.push_failed", values)
