"""Agents, their branches and their checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import psycopg
from psycopg.types.json import Jsonb
from ringfence.kernel.journal.database import Connection, Pool, borrowed
from ringfence.kernel.journal.deltas import UnpackError, unpack_chain
from ringfence.kernel.journal.store_base import Lineage, StoreBase, agent_record, made_by, statement
from ringfence.kernel.journal.store_kernels import short_id
from ringfence.kernel.journal.together import Together
from ringfence.kernel.journal.types import (
    AgentKey,
    AgentRecord,
    Ambiguous,
    BranchRecord,
    CheckpointRecord,
    Damaged,
    JournalError,
    KernelKey,
)

SETTABLE = frozenset(
    {
        "state",
        "waiting_for",
        "error",
        "exit_code",
        "restarts",
        "started_at",
        "ended_at",
        "branch",
        "asleep",
        "wake_at",
    }
)
NULLABLE = frozenset({"exit_code", "started_at", "ended_at", "wake_at"})
ID_TRIES = 5
PATCHED_AT_ONCE = 64


class _Saved(NamedTuple):
    """A row of `agents.checkpoint`."""

    step: int
    branch: int
    lane_step: int
    schema_version: int
    next_child: int
    packing: int
    state: bytes
    digest: bytes


def storable(text: str) -> str:
    """Replace what a PostgreSQL text can't hold; for texts that come from outside, as error messages do."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")


def agent_patch(fields: Mapping[str, Any]) -> str:
    """What `agents.set` takes, from some of the settable fields.

    Raises:
        TypeError: another field, or None for a field that can't be empty.
    """
    patch: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in SETTABLE or (value is None and name not in NULLABLE):
            raise TypeError(f"agents have no settable `{name}` of this kind")
        if isinstance(value, datetime):
            patch[name] = value.isoformat()
        else:
            patch[name] = storable(value) if isinstance(value, str) else value
    return json.dumps(patch)


class AgentStore(StoreBase):
    """The part of the store about agents."""

    def __init__(self, pool: Pool, dsn: str) -> None:
        super().__init__(pool, dsn)
        self._patches: Together[tuple[AgentKey, str], None] = Together(
            self._set_one, self._set, PATCHED_AT_ONCE
        )

    async def create_agent(
        self,
        *,
        name: str,
        thread: str,
        manifest: str,
        source: str,
        labels: Mapping[str, str],
        input: bytes,  # noqa: A002 - the record's own field is named so
        owner: KernelKey | None,
        uid_base: int | None,
        grants: Sequence[tuple[str, str]],
        first_fire: datetime | None = None,
        waiting_for: str = "",
        submitted_by: str = "",
    ) -> AgentRecord:
        """Create an agent with its first branch and its manifest's grants, in one transaction.

        Args:
            name: what people call it; several agents may share it.
            thread: id of its thread; empty: the agent's own id.
            manifest: the manifest's text.
            source: where the manifest came from.
            labels: the manifest's labels.
            input: what it was submitted with.
            owner: kernel that runs it, or None for the first that claims it.
            uid_base: its uid is this plus its key; None: no uid of its own.
            grants: (verdict, rule text) of each allow or ask line of the manifest.
            first_fire: when its schedule fires first; it is `sleeping` until then. None: it has no schedule.
            waiting_for: what it waits for then.
            submitted_by: the person or account that submitted, forked or imported it; empty: nobody knows.

        Raises:
            Unavailable: the database is away.
            BadRow: a text can't be stored.
        """
        values = {
            "submitted_by": submitted_by,
            "name": name,
            "labels": Jsonb(dict(labels)),
            "manifest": manifest,
            "source": source,
            "input": input,
            "owner": owner,
            "uid_base": uid_base,
        }
        async with borrowed(self._pool) as connection:
            for _ in range(ID_TRIES):
                agent_id = f"{name}-{short_id()}"
                try:
                    async with connection.transaction():
                        chosen = {"id": agent_id, "thread": thread or agent_id}
                        record = await _create(connection, values | chosen, grants)
                        if first_fire is None:
                            return record
                        asleep = {"agent": record.key, "next_at": first_fire, "waiting_for": waiting_for}
                        await connection.execute(statement("schedules.create"), asleep)
                        await connection.execute(statement("schedules.asleep"), asleep)
                        return replace(record, state="sleeping", waiting_for=waiting_for)
                except psycopg.errors.UniqueViolation:
                    continue
        raise JournalError(f"no free id for an agent named `{name}`; try again")

    async def submitter(self, key: AgentKey) -> str:
        """Who submitted an agent, or the one that it descends from; empty where nobody knows.

        Raises:
            Unavailable: the database is away.
        """
        found = await self._tuple("agents.submitter", {"key": key})
        return "" if found is None else str(found[0])

    async def agent(self, id_or_name: str) -> AgentRecord | None:
        """Find an agent by its id, or by its name where only one has it.

        Raises:
            Ambiguous: several agents have this name.
            Unavailable: the database is away.
        """
        found = await self.agents_called(id_or_name)
        if len(found) > 1:
            raise Ambiguous(id_or_name, [agent.id for agent in found])
        return found[0] if found else None

    async def agents_called(self, id_or_name: str) -> list[AgentRecord]:
        """Find the agent of this id, or else all of this name, newest first.

        Raises:
            Unavailable: the database is away.
        """
        if "\0" in id_or_name:
            return []
        found = await self._all("agents.find", agent_record, {"word": id_or_name})
        return [agent for agent in found if agent.id == id_or_name] or found

    async def agent_by_key(self, key: AgentKey) -> AgentRecord | None:
        """Read one agent.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("agents.by_key", agent_record, {"key": key})

    async def agents(self, all: bool = False) -> list[AgentRecord]:  # noqa: A002 - as the command's flag
        """List agents in the order they were submitted; with `all` those that ended too.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("agents.list", agent_record, {"all": all})

    async def set_agent(self, key: AgentKey, **fields: Any) -> None:
        """Set some of the settable fields, which are the names in `SETTABLE`.

        A final state without a time has ended now, or when it did before; any other state has not ended.

        Raises:
            TypeError: another field, or None for a field that can't be empty.
            JournalError: an unknown state.
            Unavailable: the database is away.
        """
        await self._patches.ask((key, agent_patch(fields)))

    async def _set(self, some: Sequence[tuple[AgentKey, str]]) -> list[None]:
        """Apply patches in the order in which they came, those of different agents in one transaction."""
        left = list(some)
        while left:
            # INVARIANT: agents are locked in the order of their keys, by every kernel.
            first = dict(reversed(left))
            values = {"keys": sorted(first), "patches": [first[key] for key in sorted(first)]}
            await self._tuple("agents.set", values)
            for patch in first.items():
                left.remove(patch)
        return [None] * len(some)

    async def _set_one(self, patch: tuple[AgentKey, str]) -> None:
        await self._set([patch])

    async def forget_agent(self, key: AgentKey) -> bool:
        """Remove an agent that never ran.

        Returns:
            False where something is recorded of it: then it stays.

        Raises:
            Unavailable: the database is away.
        """
        return await self._tuple("agents.forget", {"key": key}) is not None

    async def branches(self, key: AgentKey) -> list[BranchRecord]:
        """List an agent's branches in order.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("agents.branches", BranchRecord, {"agent": key})

    async def add_branch(self, key: AgentKey, parent: int, cut_step: int) -> BranchRecord:
        """Start a branch and make it the agent's; its prefix is the parent's journal through `cut_step`.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": key, "parent": parent, "cut_step": cut_step}
        async with borrowed(self._pool) as connection, connection.transaction():
            await connection.execute(statement("agents.lock_row"), values)
            async with connection.cursor(row_factory=made_by(BranchRecord)) as cursor:
                await cursor.execute(statement("agents.add_branch"), values)
                record = await cursor.fetchone()
            if record is None:
                raise JournalError("the branch was not stored")
            await connection.execute(statement("agents.set_branch"), {"agent": key, "branch": record.branch})
            await connection.execute(statement("schedules.reopen"), {"agent": key})
            return record

    async def latest_checkpoint(
        self, key: AgentKey, lineage: Lineage, *, before_step: int | None = None
    ) -> CheckpointRecord | None:
        """Find the newest checkpoint of a lineage.

        Args:
            key: the agent.
            lineage: (branch, last step that counts) of the branch and its ancestors.
            before_step: look only at older ones; to offer an earlier one than one that can't be read.

        Raises:
            Damaged: its bytes are not those that were saved.
            Unavailable: the database is away.
        """
        values = {"agent": key, "before": before_step, **lineage_values(lineage)}
        rows = await self._all("agents.checkpoint", _Saved, values)
        if not rows:
            return None
        step, branch, lane_step, schema_version, next_child, _, _, digest = rows[0]
        chain = [(row.step, row.packing, row.state) for row in reversed(rows)]
        try:
            base = await asyncio.to_thread(unpack_chain, chain)
        except UnpackError as error:
            raise Damaged(step, schema_version) from error
        if hashlib.sha256(base.state).digest() != digest:
            raise Damaged(step, schema_version)
        return CheckpointRecord(
            step=step,
            branch=branch,
            lane_step=lane_step,
            schema_version=schema_version,
            next_child=next_child,
            state=base.state,
            base=base,
        )


def lineage_values(lineage: Lineage) -> dict[str, list[int]]:
    """Spread a lineage over the two arrays that statements take."""
    return {"branches": [branch for branch, _ in lineage], "cuts": [cut for _, cut in lineage]}


async def _create(
    connection: Connection, values: Mapping[str, Any], grants: Sequence[tuple[str, str]]
) -> AgentRecord:
    async with connection.cursor(row_factory=made_by(agent_record), binary=True) as cursor:
        await cursor.execute(statement("agents.create"), values)
        record = await cursor.fetchone()
    if record is None:
        raise JournalError("the agent was not stored")
    await connection.execute(statement("agents.first_branch"), {"agent": record.key})
    if grants:
        await connection.execute(
            statement("agents.first_grants"),
            {
                "agent": record.key,
                "verdicts": [verdict for verdict, _ in grants],
                "rules": [rule for _, rule in grants],
            },
        )
    return record
