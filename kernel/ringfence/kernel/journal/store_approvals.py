"""Approvals: parked calls that wait for a person, and what was decided."""

from __future__ import annotations

from typing import Any

from ringfence.kernel.journal.store_base import StoreBase
from ringfence.kernel.journal.types import AgentKey, ApprovalRecord

CHANNEL_APPROVAL = "ringfence_approval"
LISTED_MAX = 1000


def approval_record(
    key: int, agent: int, digest: str, asks: list[list[Any]], **values: Any
) -> ApprovalRecord:
    """Make an approval from its columns."""
    return ApprovalRecord(
        key=key,
        id=f"a{key}",
        agent=AgentKey(agent),
        digest=bytes.fromhex(digest),
        asks=tuple((rule, action, _hashable(on)) for rule, action, on in asks),
        **values,
    )


def _hashable(resource: Any) -> Any:
    """The words of a command come back from JSON as a list."""
    words: list[str] = resource
    return tuple(words) if isinstance(resource, list) else resource


def approval_key(approval_id: str) -> int | None:
    """Read an approval's number from its id; None for what is no approval id."""
    number = approval_id[1:]
    good = approval_id[:1] == "a" and number.isascii() and number.isdigit() and len(number) < 19  # noqa: PLR2004 - digits of a bigint
    return int(number) if good else None


class ApprovalStore(StoreBase):
    """The part of the store about approvals."""

    async def approval(self, key: int) -> ApprovalRecord | None:
        """Read one.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("approvals.get", approval_record, {"key": key})

    async def approvals(self, agent: AgentKey | None, *, everything: bool) -> list[ApprovalRecord]:
        """Those that wait, or all; newest first, at most `LISTED_MAX`.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": agent, "all": everything, "limit": LISTED_MAX}
        return await self._all("approvals.pending", approval_record, values)

    async def unfinished_approvals(self, agent: AgentKey) -> list[ApprovalRecord]:
        """What waits, and what was approved and has no outcome yet.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("approvals.unfinished", approval_record, {"agent": agent})

    async def granted_approvals(self, agent: AgentKey, step: int) -> list[ApprovalRecord]:
        """What was approved for one step.

        Raises:
            Unavailable: the database is away.
        """
        return await self._all("approvals.granted", approval_record, {"agent": agent, "step": step})

    async def withdraw_approval(self, key: int, reason: str) -> None:
        """Take the force from an approval, decided or not.

        Raises:
            Unavailable: the database is away.
        """
        values = {"key": key, "agent": None, "after": None, "reason": reason}
        await self._all("approvals.withdraw", approval_record, values)

    async def withdraw_approvals(self, agent: AgentKey, after: int, reason: str) -> list[ApprovalRecord]:
        """Void what waits at a step after `after`, also where no call stands behind it any more.

        Raises:
            Unavailable: the database is away.
        """
        values = {"key": None, "agent": agent, "after": after, "reason": reason}
        return await self._all("approvals.withdraw", approval_record, values)

    async def standing_approvals(self, agent: AgentKey, action: str, digest: bytes) -> list[ApprovalRecord]:
        """What a person approved for longer than once and holds now, for one call of one agent; newest first.

        Raises:
            Unavailable: the database is away.
        """
        values = {"agent": agent, "action": action, "digest": digest.hex()}
        return await self._all("approvals.standing", approval_record, values)

    async def end_standing_approval(self, key: int) -> ApprovalRecord | None:
        """Let an approval hold for no further call; None: it held for none.

        Raises:
            Unavailable: the database is away.
        """
        return await self._first("approvals.end_standing", approval_record, {"key": key})

    async def decide_approval(
        self, key: int, state: str, by: str, reason: str, edited: str | None = None, for_ms: int | None = None
    ) -> ApprovalRecord | None:
        """Decide one that waits, and tell its agent's kernel.

        Args:
            key: its number.
            state: approved, denied, expired or voided.
            by: who decides.
            reason: why, in their words.
            edited: canonical arguments to run instead, or None.
            for_ms: how long it holds for the same call again; None: once.

        Returns:
            How it was decided; None: it does not wait any more, or its time is over.

        Raises:
            Unavailable: the database is away.
        """
        values = {"key": key, "state": state, "by": by, "reason": reason, "edited": edited, "for_ms": for_ms}
        return await self._first("approvals.decide", approval_record, values)
