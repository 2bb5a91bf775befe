"""Tasks that clients gave to agents by A2A, as they are read. They are written by atomic work (`task_ask`, `task_update`, `task_cancel`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ringfence.kernel.journal.store_base import StoreBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """One task.

    Attributes:
        state: as it was told last; `working` also where the agent has taken what was asked.
        events: how many entries it has.
        bytes: what these say.
        agent: id of the agent.
        agent_state: how the agent stands.
        waits: what it waits for, in words.
        error: of the agent.
        approval: `{key, action, resource}` of a call of the agent that waits for a person; None: none does.
    """

    id: str
    context: str
    state: str
    events: int
    bytes: int
    created_at: datetime
    updated_at: datetime
    agent: str
    agent_state: str
    waits: str
    error: str
    approval: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent:
    """One entry of a task.

    Attributes:
        kind: `asked`, `told`, `result` or `canceled`.
        state: of the task after it.
        body: what was said; None: nothing. Of `asked` always JSON.
    """

    seq: int
    kind: str
    state: str
    is_json: bool
    body: str | None
    artifact: str
    at: datetime


class TaskStore(StoreBase):
    """The part of the store about tasks. Every method may raise Unavailable."""

    async def tasks(
        self,
        client: str,
        *,
        ids: Sequence[str] | None = None,
        agent: str | None = None,
        context: str = "",
        since: datetime | None = None,
        before: tuple[datetime, str] | None = None,
        limit: int,
    ) -> list[TaskRecord]:
        """Find tasks of a client, the one that changed last first.

        Args:
            client: whose.
            ids: only these; None: all.
            agent: only of this one, by id; None: of all.
            context: only of this one; empty: of all.
            since: only those that changed after it.
            before: only those behind this one, by change and id.
            limit: most of them.
        """
        at, last = before or (None, "")
        values = {
            "client": client,
            "ids": None if ids is None else list(ids),
            "agent": agent,
            "context": context,
        }
        paged = {"since": since, "before": at, "last": last, "limit": limit}
        return await self._all("tasks.found", TaskRecord, {**values, **paged})

    async def count_tasks(self, client: str, agent: str | None, context: str, since: datetime | None) -> int:
        """Count what `tasks` would find on all pages."""
        values = {"client": client, "agent": agent, "context": context, "since": since}
        row = await self._tuple("tasks.count", values)
        return 0 if row is None else int(row[0])

    async def task_events(self, task: str, after: int, limit: int) -> list[TaskEvent]:
        """Read entries of a task in order, those behind one."""
        return await self._all("tasks.events", TaskEvent, {"task": task, "after": after, "limit": limit})
