"""Grants and their revocation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb
from ringfence.kernel.journal.database import CHANNEL_ACK, Connection, borrowed
from ringfence.kernel.journal.store_base import grant_key, grant_record, made_by, statement
from ringfence.kernel.journal.store_notify import NotifyStore
from ringfence.kernel.journal.types import AgentKey, GrantRecord, JournalError, Unavailable

ACK_POLL_S = 0.25


class GrantStore(NotifyStore):
    """The part of the store about grants."""

    async def grants(self, key: AgentKey, *, active: bool = True) -> list[GrantRecord]:
        """List an agent's grants; with `active` only those that can still be used.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("grants.list", grant_record, {"agent": key, "active": active})

    async def add_grant(
        self,
        key: AgentKey,
        rule: str,
        verdict: str,
        by: str,
        expires_at: datetime | None,
        uses: int | None,
    ) -> tuple[GrantRecord, int]:
        """Add a permission and move the agent's policy epoch.

        Args:
            key: the agent.
            rule: the rule in the manifest's form.
            verdict: allow, ask or deny.
            by: who grants it.
            expires_at: when it ends, or None.
            uses: how often it may be used, or None.

        Returns:
            The grant and the new epoch.

        Raises:
            Unavailable: the database is away.
        """
        values = {
            "agent": key,
            "rule": rule,
            "verdict": verdict,
            "by": by,
            "expires_at": expires_at,
            "uses": uses,
        }
        granted, epoch = await self._moved("grants.add", values)
        if not granted:
            raise JournalError("the grant was not stored")
        return granted[0], epoch

    async def revoke(self, key: AgentKey, grant_ids: Sequence[str] | None) -> tuple[int, list[GrantRecord]]:
        """Take permissions away and move the agent's policy epoch.

        Once it returns, no call decided under an older epoch can commit its intent, on any kernel. What was
        under way is settled when the owner acknowledges the epoch: see `wait_acked`.

        Args:
            key: the agent.
            grant_ids: ids to revoke; None: all. Unknown ones and ones already revoked are left out.

        Returns:
            The new epoch and the grants revoked by this call.

        Raises:
            Unavailable: the database is away. Whether it happened is then not known; revoking again is safe.
        """
        numbers = None if grant_ids is None else [n for n in map(grant_key, grant_ids) if n is not None]
        revoked, epoch = await self._moved("grants.revoke", {"agent": key, "grants": numbers})
        return epoch, revoked

    async def _moved(self, name: str, values: Mapping[str, Any]) -> tuple[list[GrantRecord], int]:
        async with borrowed(self._pool) as connection, connection.transaction():
            async with connection.cursor(row_factory=made_by(grant_record)) as cursor:
                await cursor.execute(statement(name), values)
                records = await cursor.fetchall()
            return records, await _epoch(connection, values)

    async def use_grant(self, grant_id: str) -> int | None:
        """Use up one of a grant's uses.

        Returns:
            Uses left; None: it isn't limited. -1: none was left, or the grant is revoked or unknown: it gives
            no right.

        Raises:
            Unavailable: the database is away.
        """
        number = grant_key(grant_id)
        if number is None:
            return -1
        used = await self._tuple("grants.use", {"grant": number})
        if used is not None:
            return int(used[0])
        left = await self._tuple("grants.uses_left", {"grant": number})
        return None if left is not None and left[0] is None else -1

    async def ack_epoch(self, key: AgentKey, epoch: int, report: Mapping[str, Any]) -> None:
        """Say that everything decided under an older epoch is settled, cancelled or listed in `report`.

        Raises:
            Unavailable: the database is away.
        """
        await self._tuple("grants.ack", {"agent": key, "epoch": epoch, "report": Jsonb(dict(report))})

    async def wait_acked(self, key: AgentKey, epoch: int, timeout_s: float) -> dict[str, Any] | None:
        """Wait until the agent's owner has acknowledged an epoch.

        Args:
            key: the agent.
            epoch: what `revoke` returned.
            timeout_s: longest wait.

        Returns:
            The owner's report. A report with `owner_lost` comes from a takeover. None: no kernel owns the
            agent, or its owner's lease has run out, so it can commit nothing and start nothing.

        Raises:
            TimeoutError: a living owner has not acknowledged it in time: the right may still be in use.
            Unavailable: the database is away.
        """
        woken = asyncio.Event()

        def on_ack(_channel: str, payload: str) -> None:
            if not payload or json.loads(payload).get("agent") == key:
                woken.set()

        deadline = time.monotonic() + timeout_s
        listener = self.listen([CHANNEL_ACK], on_ack)
        try:
            while True:
                woken.clear()
                row = await self._tuple("grants.acked", {"agent": key, "epoch": epoch})
                if row is None:
                    return None
                report, owned = row
                if report is not None:
                    return dict(report)
                if not owned:
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"the owner has not acknowledged epoch {epoch} within {timeout_s:g} s")
                # The poll finds what a lost notification or a lapsed lease doesn't announce.
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, ACK_POLL_S)):
                        await woken.wait()
        finally:
            await listener.stop()


async def _epoch(connection: Connection, values: Mapping[str, Any]) -> int:
    cursor = await connection.execute(statement("grants.epoch"), values)
    row: TupleRow | None = await cursor.fetchone()
    if row is None:
        raise Unavailable("the agent is gone")
    return int(row[0])
