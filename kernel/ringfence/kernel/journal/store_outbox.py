"""The outbox: events for receivers outside. The transactions that they tell of put them there, by triggers of the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.types.json import Jsonb
from ringfence.kernel.journal.store_base import StoreBase


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRecord:
    """One event that is to be delivered.

    Attributes:
        message: its id; the same each time it is sent.
        body: JSON.
        attempts: how often it has been taken to be sent, this time counted.
    """

    key: int
    message: str
    body: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRecord:
    """How one receiver does.

    Attributes:
        failing_since: the first failure after the last delivery; None: the last one came through.
        dropped: events that nobody took in time, or that were too many.
        waiting: events that are to be delivered.
    """

    name: str
    events: Sequence[str]
    delivered_at: datetime | None
    failing_since: datetime | None
    last_error: str
    dropped: int
    waiting: int
    oldest_at: datetime | None


class OutboxStore(StoreBase):
    """The part of the store about events for receivers outside. Every method may raise Unavailable."""

    async def declare_webhooks(self, hooks: Mapping[str, Sequence[str]], host: str, data_dir: str) -> None:
        """Say who is told of what from now on, in place of what this data directory said before.

        Args:
            hooks: events by the receiver's name.
            host: of the kernel.
            data_dir: of the kernel.
        """
        listed = [{"name": name, "events": list(events)} for name, events in hooks.items()]
        await self._tuple("outbox.declare", {"hooks": Jsonb(listed), "host": host, "data_dir": data_dir})

    async def hurry_outbox(self, names: Sequence[str]) -> None:
        """Make due at once what waits."""
        await self._tuple("outbox.hurry", {"names": list(names)})

    async def claim_outbox(self, webhook: str, limit: int, lease_s: float) -> list[OutboxRecord]:
        """Take some that are due, the longest due first; nobody else gets them within the lease."""
        values = {"webhook": webhook, "limit": limit, "lease_s": lease_s}
        return await self._all("outbox.claim", OutboxRecord, values)

    async def outbox_sent(self, key: int) -> None:
        """It was taken by its receiver."""
        await self._tuple("outbox.sent", {"key": key})

    async def outbox_failed(self, key: int, delay_s: float, error: str) -> None:
        """It was not, and is to be tried again after a while."""
        await self._tuple("outbox.failed", {"key": key, "delay_s": delay_s, "error": error})

    async def sweep_outbox(self, names: Sequence[str], age_s: float, most: int) -> None:
        """Drop and count what is older, and the oldest where a receiver has more."""
        await self._tuple("outbox.sweep", {"names": list(names), "age_s": age_s, "most": most})

    async def webhooks(self, names: Sequence[str]) -> list[WebhookRecord]:
        """How receivers do, by name."""
        return await self._all("outbox.state", WebhookRecord, {"names": list(names)})

    async def forget_deliveries(self, age_s: float) -> None:
        """Forget the ids of what hooks were given longer ago than this."""
        await self._tuple("outbox.forget_deliveries", {"age_s": age_s})
