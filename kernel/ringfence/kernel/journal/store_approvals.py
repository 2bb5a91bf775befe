"""Approvals: parked calls that wait for a person, and what was decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg.types.json import Jsonb
from ringfence.kernel.journal.store_base import StoreBase
from ringfence.kernel.journal.types import AgentKey, ApprovalRecord

CHANNEL_APPROVAL = "ringfence_approval"
LISTED_MAX = 1000


def approval_record(
    key: int, agent: int, digest: str, asks: list[list[Any]], votes: list[dict[str, Any]], **values: Any
) -> ApprovalRecord:
    """Make an approval from its columns."""
    return ApprovalRecord(
        key=key,
        id=f"a{key}",
        agent=AgentKey(agent),
        digest=bytes.fromhex(digest),
        asks=tuple((rule, action, _hashable(on)) for rule, action, on in asks),
        votes=tuple(votes),
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
        self, key: int, state: str, by: str, reason: str, vote: Mapping[str, Any] | None = None
    ) -> ApprovalRecord | None:
        """Decide one that waits, against it, and tell its agent's kernel.

        Args:
            key: its number.
            state: denied, expired or voided.
            by: who decides.
            reason: why, in their words.
            vote: what is kept of a person's denial; None: nobody's.

        Returns:
            How it was decided; None: it does not wait any more, or the vote's message was had before.

        Raises:
            Unavailable: the database is away.
        """
        message = "" if vote is None else vote.get("message", "")
        kept = None if vote is None else Jsonb(dict(vote))
        values = {"key": key, "state": state, "by": by, "reason": reason, "vote": kept, "message": message}
        return await self._first("approvals.decide", approval_record, values)

    async def vote_approval(self, key: int, vote: Mapping[str, Any]) -> ApprovalRecord | None:
        """Add one person's approval to one that waits; the last that is needed approves it, and its agent's kernel is told.

        Args:
            key: its number.
            vote: as in `ApprovalRecord.votes`.

        Returns:
            How it stands now; None: it does not wait any more, its time is over, this person approved the same before, or
            the vote's message was had before.

        Raises:
            Unavailable: the database is away.
            BadRow: a text can't be stored.
        """
        values = {
            "key": key,
            "by": vote["by"],
            "edited": vote.get("edited"),
            "message": vote.get("message", ""),
            "vote": Jsonb(dict(vote)),
        }
        return await self._first("approvals.vote", approval_record, values)
