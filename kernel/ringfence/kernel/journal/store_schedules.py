"""Schedules and the runs they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ringfence.kernel.journal.database import Connection, borrowed
from ringfence.kernel.journal.store_agents import agent_patch
from ringfence.kernel.journal.store_base import StoreBase, agent_record, made_by, statement
from ringfence.kernel.journal.types import (
    AgentKey,
    AgentRecord,
    BranchRecord,
    KernelKey,
    OwnerMoved,
    ScheduleRecord,
)


def _record(**values: Any) -> ScheduleRecord:
    values["agent"], values["queued"] = AgentKey(values["agent"]), tuple(values["queued"])
    return ScheduleRecord(**values)


class ScheduleStore(StoreBase):
    """The part of the store about schedules."""

    async def schedule(self, key: AgentKey) -> ScheduleRecord | None:
        """Read the schedule of an agent; None where it has none.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("schedules.by_agent", _record, {"agent": key})

    async def schedules(self) -> list[ScheduleRecord]:
        """List all schedules in the order their agents were submitted.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("schedules.list", _record, {})

    async def move_schedule(
        self,
        key: AgentKey,
        next_at: datetime | None,
        *,
        paused: bool,
        settled_at: datetime,
        queued: Sequence[datetime] = (),
    ) -> ScheduleRecord | None:
        """Say when it fires next, whether it is paused, up to when all is dealt with, and what waits for a run.

        Raises:
            Unavailable: the database is away.
        """
        values = {
            "agent": key,
            "next_at": next_at,
            "paused": paused,
            "settled_at": settled_at,
            "queued": list(queued),
        }
        return await self._first("schedules.move", _record, values)

    async def begin_run(
        self,
        key: AgentKey,
        *,
        kernel: KernelKey,
        fence: int,
        thread: str,
        last_step: int,
        before: ScheduleRecord,
        next_at: datetime | None,
        queued: Sequence[datetime],
        settled_at: datetime,
    ) -> tuple[AgentRecord, BranchRecord, ScheduleRecord] | None:
        """Begin a run: a new thread on a branch without a parent, in one transaction.

        INVARIANT: a fire begins one run, whoever else saw it: only who finds it as in `before` moves the schedule on.

        Args:
            key: the agent.
            kernel: who begins it.
            fence: its fencing token.
            thread: id of the run's thread.
            last_step: last step before the run.
            before: the schedule as it was read.
            next_at: when it fires after this.
            queued: times that wait for runs of their own after this one.
            settled_at: up to when all times are dealt with.

        Returns:
            None where a run is under way or somebody else has moved the schedule on.

        Raises:
            OwnerMoved: another kernel owns the agent.
            Unavailable: the database is away.
        """
        values: dict[str, Any] = {
            "agent": key,
            "kernel": kernel,
            "fence": fence,
            "thread": thread,
            "cut_step": last_step,
            "expected": before.next_at,
            "expected_queue": list(before.queued),
            "next_at": next_at,
            "queued": list(queued),
            "settled_at": settled_at,
        }
        async with borrowed(self._pool) as connection, connection.transaction():
            # The lock that moves an owner: whoever holds it sees the owner that the commit will find.
            await connection.execute(statement("kernels.lock_agent"), values)
            if await (await connection.execute(statement("schedules.owned"), values)).fetchone() is None:
                raise OwnerMoved(key)
            schedule = await _one(connection, "schedules.begin", _record, values)
            if schedule is None:
                return None
            branch = await _one(connection, "schedules.first_branch_of_run", BranchRecord, values)
            values["branch"] = None if branch is None else branch.branch
            agent = await _one(connection, "schedules.begin_agent", agent_record, values)
        return None if agent is None or branch is None else (agent, branch, schedule)

    async def run_told(self, key: AgentKey, thread: str) -> bool:
        """Whether the journal tells that a run began.

        Args:
            key: the agent.
            thread: id of the run's thread.

        Raises:
            Unavailable: the database is away.
        """
        return await self._tuple("schedules.run_told", {"agent": key, "thread": thread}) is not None

    async def end_run(self, key: AgentKey, outcome: str, why: str, **fields: Any) -> ScheduleRecord | None:
        """Record how a run ended and what the agent is now, in one transaction.

        Args:
            key: the agent.
            outcome: `done`, `failed` or `replaced`.
            why: why it failed.
            fields: as `set_agent` takes them.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": key, "outcome": outcome, "error": why}
        async with borrowed(self._pool) as connection, connection.transaction():
            schedule: ScheduleRecord | None = await _one(connection, "schedules.finish", _record, values)
            await connection.execute(
                statement("agents.set"), {"keys": [key], "patches": [agent_patch(fields)]}
            )
        return schedule


async def _one(connection: Connection, name: str, make: Any, values: Mapping[str, Any]) -> Any:
    async with connection.cursor(row_factory=made_by(make), binary=True) as cursor:
        await cursor.execute(statement(name), values)
        return await cursor.fetchone()
