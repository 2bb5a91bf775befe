"""Limits that operators set for single agents."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ringfence.kernel.journal.store_base import StoreBase
from ringfence.kernel.journal.types import AgentKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRecord:
    """One limit. `kind` is `total` or `rate`; `period_s` is None for a total."""

    name: str
    kind: str
    amount: float
    period_s: float | None
    set_by: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How many calls of an action ended within a span of time before now: an agent's own, and with those below it."""

    span_us: int
    action: str
    own: int
    family: int


class BudgetStore(StoreBase):
    """The part of the store about budgets."""

    async def budgets(self, key: AgentKey) -> list[BudgetRecord]:
        """List the limits that stand in place of an agent's manifest.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("budgets.list", BudgetRecord, {"agent": key})

    async def turns(self, key: AgentKey, below: Sequence[AgentKey], spans_us: Sequence[int]) -> list[Turns]:
        """Count the calls of an agent that a rate may still count.

        Args:
            key: the agent.
            below: who descends from it.
            spans_us: periods of rates.

        Raises:
            Unavailable: the database is away.
        """
        now_us = time.time_ns() // 1000
        values = {"agent": key, "chains": [key, *below], "spans_us": list(spans_us), "now_us": now_us}
        return await self._all("budgets.turns", Turns, values)

    async def set_budget(
        self, key: AgentKey, name: str, kind: str, amount: float, period_s: float | None, by: str
    ) -> None:
        """Set a limit, in place of an earlier one.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": key, "name": name, "kind": kind, "amount": amount, "period_s": period_s, "by": by}
        await self._tuple("budgets.set", values)

    async def unset_budget(self, key: AgentKey, name: str, kind: str) -> None:
        """Go back to the manifest's limit.

        Raises:
            Unavailable: the database is away.
        """
        await self._tuple("budgets.unset", {"agent": key, "name": name, "kind": kind})
