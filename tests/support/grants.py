"""Grants as the store gives them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ringfence.kernel.journal.types import AgentKey, GrantRecord


def grant(
    number: int,
    rule: str,
    verdict: str = "allow",
    *,
    uses_left: int | None = None,
    expires_in: float | None = None,
    revoked: bool = False,
) -> GrantRecord:
    now = datetime.now(UTC)
    return GrantRecord(
        id=f"g{number}",
        agent=AgentKey(1),
        origin="operator",
        verdict=verdict,
        rule=rule,
        created_at=now,
        created_by="tester",
        expires_at=None if expires_in is None else now + timedelta(seconds=expires_in),
        uses_left=uses_left,
        revoked_at=now if revoked else None,
    )
