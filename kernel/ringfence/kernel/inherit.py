"""Journal rows in another agent's chain: what a fork inherits of its original's past.

Rows keep their steps, branches, lanes and effect ids, so that replay, budgets and the recognition of effects read them as
they read an agent's own. Each says in its body where it comes from; its hash is of the new chain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Entry, Phase, Row, StoredRow
from ringfence.kernel.replay import OPERATOR_LANE, PARKED, Lineage
from ringfence.kernel.rollback_cuts import PRUNED

WINDOW = 512
"""Rows that wait for their commit together."""

_COUNTED = frozenset({"rules", "grants", "reserved", "used", "error"})
"""What is kept of a call that the copy's past does not hold: what it spent, and under which rights."""

_EVENTS = frozenset({"revoke.purge", PRUNED})

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_point = msgspec.json.Decoder(dict[str, object]).decode


def row_in(chain: int, row: StoredRow, body: bytes) -> Row:
    """A stored row, to be appended to another chain."""
    return Row(
        chain=chain,
        phase=row.phase,
        action=row.action,
        resource=row.resource,
        step=row.step,
        branch=row.branch,
        lane=row.lane,
        lane_step=row.lane_step,
        effect=row.effect,
        verdict=row.verdict,
        outcome=row.outcome,
        digest=row.digest,
        effect_id=row.effect_id,
        started_us=row.started_us,
        duration_us=row.duration_us,
        body=body,
    )


async def append_all(core: Core, rows: AsyncIterator[Row]) -> int:
    """Append rows in their order, with a bounded number under way; returns how many there were.

    Raises:
        JournalError: the database is away, or another kernel owns the agent.
    """
    waiting: list[asyncio.Future[None]] = []
    count = 0
    async for row in rows:
        waiting.append(core.journal.append(Entry(row=row)))
        count += 1
        if len(waiting) >= WINDOW:
            await asyncio.gather(*waiting)
            waiting.clear()
    await asyncio.gather(*waiting)
    return count


@dataclass(slots=True, kw_only=True)
class Past:
    """What of an agent's journal a fork takes.

    Attributes:
        source: the original's id.
        chain: the new agent's.
        kept: the lineage of the fork: in full. Of everything else only what left the system, and what was spent.
        up_to: position of the original's last row that counts.
        finished: steps that have an outcome up to there.
        pruned: the step before which the original's points are gone.
        points: rollback points of the workspace that the kept rows name, and that are there.
    """

    source: str
    chain: int
    kept: Lineage
    up_to: int
    pruned: int = 0
    finished: set[int] = field(default_factory=set[int])
    points: list[str] = field(default_factory=list[str])

    async def rows(self, core: Core, source_key: int) -> AsyncIterator[Row]:
        """Walk what is taken, in written order."""
        async for row in core.store.audit(source_key):
            if row.pos > self.up_to:
                break
            if row.phase is Phase.OUTCOME and row.outcome != PARKED:
                self.finished.add(row.step)
        async for row in core.store.audit(source_key):
            if row.pos > self.up_to:
                break
            taken = self.take(row)
            if taken is not None:
                yield taken

    def take(self, row: StoredRow) -> Row | None:
        """One row as the fork has it; None: it is not inherited."""
        if row.phase is Phase.EVENT:
            # What a purge withheld stays withheld, and points that were removed are not missed.
            return row_in(self.chain, row, row.body) if row.action in _EVENTS else None
        if row.phase is Phase.PROGRESS:
            return None
        held = self.kept.holds(row.branch, row.step)
        if row.step not in self.finished:
            # A call that waits for a person asks anew in the fork; one that may have been sent is settled there.
            sent = row.phase is Phase.INTENT and row.effect_id and row.lane != OPERATOR_LANE
            return row_in(self.chain, row, self._body(row, aside=False)) if held and sent else None
        if not held and row.phase is Phase.INTENT:
            return None
        return row_in(self.chain, row, self._body(row, aside=not held))

    def _body(self, row: StoredRow, *, aside: bool) -> bytes:
        body = _decode(row.body)
        if aside and not row.effect_id:
            body = {key: value for key, value in body.items() if key in _COUNTED}
        if "point" in body and (aside or not self._keep_point(row, bytes(body["point"]))):
            del body["point"]
            if not aside and row.action != "rollback":
                body["shared"] = msgspec.Raw(b"true")
        body["inherited"] = msgspec.Raw(msgspec.json.encode(f"{self.source}/{row.step}"))
        if aside:
            body["aside"] = msgspec.Raw(b"true")
        return msgspec.json.encode(body)

    def _keep_point(self, row: StoredRow, raw: bytes) -> bool:
        """Whether the fork can go back by a point: rows and keys are shared with the original, who alone can undo its own."""
        point = _point(raw)
        whole = row.action == "rollback" and row.lane == OPERATOR_LANE and _leaves_branch(row)
        if whole or point["kind"] not in ("workspace", "rollback"):
            return False
        if row.step >= self.pruned:
            self.points.append(str(point["id"]))
        return True


class _Result(msgspec.Struct):
    branch: int = -1
    left_branch: int = -1


class _RollbackBody(msgspec.Struct):
    result: _Result


def _leaves_branch(row: StoredRow) -> bool:
    result = msgspec.json.decode(row.body, type=_RollbackBody).result
    return result.branch != result.left_branch
