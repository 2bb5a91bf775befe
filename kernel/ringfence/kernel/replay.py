"""What a restarted program finds again: outcomes by lane and step along the lineage of its branch.

A branch's prefix is its parent's journal up to and with the cut. Step numbers grow over all branches, so a branch's
lineage is a list of `(branch, last step)` and a row belongs to it if its branch is listed and its step lies within.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ringfence.kernel.journal.deltas import Base
from ringfence.kernel.journal.types import BranchRecord, CheckpointRecord, Phase, StoredRow
from ringfence.kernel.past import Past
from ringfence.kernel.places import NEWEST, Held, Places

NO_CUT = (1 << 62) - 1
RETRIED = frozenset({"denied", "refused", "cancelled", "error"})
"""Outcomes that are decided afresh when no later step of their lane exists."""

HAPPENED = frozenset({"ok", "unknown"})
"""Outcomes of calls that took effect, or may have."""

PARKED = "parked"
"""Outcome of a call that waits for a person: it answers nothing, the waiting call itself does."""

OPERATOR_LANE = "op"
"""Lane of operator work such as a rollback; no program ever asks for it."""

BOUNDARY_LANE = "workspace"
"""Lane of the kernel's own boundaries of `direct` programs; no program ever asks for it."""

CONTENT = "call-"
"""How lanes begin whose calls are known by what they ask."""

ASIDE = frozenset({"mcp.tools", "mcp.resources", "mcp.prompts", "mcp.complete"})
"""Actions that a client of a door makes by itself, as when its rights change: whether it does says nothing of the program."""

COMPENSATE = "compensate"
"""Action of what a rollback sends to make up for a call that left the system."""

PUT_BACK = "put_back"
"""Action of what a rollback sends to put back what a call had destroyed or changed there."""


def taken_back_by(row: StoredRow) -> frozenset[str]:
    """Effects that a row of a rollback says are undone: the same calls may be made again."""
    if row.lane != OPERATOR_LANE or row.outcome != "ok" or row.action not in (COMPENSATE, PUT_BACK):
        return frozenset()
    return frozenset(json.loads(row.body)["of"])


_SENT = b'"sent":"yes"'
_EXPIRED = b'"expired"'


def was_sent(row: StoredRow) -> bool:
    """Whether a failed call did leave the system, as one whose answer could not be read: it is not made again."""
    if row.outcome != "error" or _SENT not in row.body:
        return False
    error: dict[str, Any] = json.loads(row.body).get("error") or {}
    return row.effect != "READ" and error.get("metadata", {}).get("sent") == "yes"


def was_answered(row: StoredRow) -> bool:
    """Whether a person denied the call: that is an answer, and nobody is asked the same again."""
    return row.verdict == "ask" and bool(_denial(row).get("by"))


def has_expired(row: StoredRow) -> bool:
    """Whether the call was refused because nobody answered in time: an answer too, until a person starts an ended agent."""
    return _EXPIRED in row.body and bool(_denial(row).get("expired"))


def _denial(row: StoredRow) -> dict[str, str]:
    """Facts of a denial; empty for any other outcome."""
    if row.outcome != "denied":
        return {}
    error: dict[str, Any] = json.loads(row.body).get("error") or {}
    return error.get("metadata") or {}


def is_programs(lane: str) -> bool:
    """Whether a lane is one of the program's own, as the library numbers them; others come from its commands."""
    return lane == "0" or lane.startswith("0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A branch and its ancestors, newest first."""

    branch: int
    parts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, branch: int, branches: Sequence[BranchRecord]) -> Lineage:
        """Follow parents from `branch`; each ancestor counts up to where its child was cut."""
        by_id = {record.branch: record for record in branches}
        parts: list[tuple[int, int]] = []
        at, limit = branch, NO_CUT
        while True:
            parts.append((at, limit))
            record = by_id[at]
            if record.parent is None:
                return cls(branch=branch, parts=tuple(parts)) if parts[1:] else _alone(branch)
            limit = min(limit, record.cut_step)
            at = record.parent

    @property
    def root(self) -> int:
        """The branch without a parent: where the run began."""
        return self.parts[-1][0]

    def holds(self, branch: int, step: int) -> bool:
        """Whether a row of `branch` at `step` belongs to this lineage."""
        return any(branch == b and step <= limit for b, limit in self.parts)


@lru_cache(maxsize=64)
def _alone(branch: int) -> Lineage:
    """The lineage of a branch without a parent: most agents have the same."""
    return Lineage(branch=branch, parts=((branch, NO_CUT),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A call that a crash caught after its intent: its intent and what it recorded last."""

    intent: StoredRow
    progress: bytes | None


class Try(NamedTuple):
    """One call that left the system, or may have: what its row says beside this is read when it is recognised."""

    step: int
    pos: int
    branch: int
    unknown: bool


@dataclass(slots=True)
class Effects:
    """Calls that left the system, over all branches."""

    _tries: dict[str, dict[int, Try]] = field(default_factory=dict[str, dict[int, Try]])
    taken_back: set[str] = field(default_factory=set[str])
    """Those that a rollback has undone: who makes the call again makes another."""

    def add(self, row: StoredRow) -> None:
        """Take one outcome, in the order they were recorded. What did not happen frees its id again."""
        if not row.effect_id:
            return
        if row.lane == OPERATOR_LANE:
            self.taken_back |= taken_back_by(row)
            return
        tries = self._tries.setdefault(row.effect_id, {})
        if row.outcome in HAPPENED:
            tries[row.step] = Try(row.step, row.pos, row.branch, row.outcome == "unknown")
            return
        # INVARIANT: only a later word on the same step takes it back: a try that was refused may be recorded after
        # the one that was made in its place.
        taken_back = tries.pop(row.step, None)
        if taken_back is not None and taken_back.unknown:
            # Somebody looked: that holds for the effect, however often it was recognised.
            for step in [s for s, other in tries.items() if other.unknown]:
                del tries[step]

    def known(self) -> dict[str, Try]:
        """The newest outcome of every effect that happened, or may have."""
        return {effect: tries[max(tries)] for effect, tries in self._tries.items() if tries}

    def consumed(self, lineage: Lineage) -> set[str]:
        """Ids that are used up on a lineage."""
        return {
            effect
            for effect, tries in self._tries.items()
            if any(lineage.holds(one.branch, one.step) for one in tries.values())
        }


@dataclass(slots=True)
class Replay:
    """Recorded outcomes that a program may ask for again.

    Attributes:
        outcomes: the newest by place.
        last: the last step with one, by lane.
        unfinished: calls that a dead kernel began.
        checkpoint: what the program goes on from.
        past: rows that were read last.
        taken_back: effects that a rollback has undone, over all branches.
        saved: the newest checkpoint of the branch, which the next one may rest on: later than `checkpoint` while it runs.
        asks_anew: whether a person started the agent after its end: what nobody answered in time is asked again.
        caught_up: whether all that is known by what it asks was asked for again; found out by who looks.
        one_way: whether calls that are known by what they ask are one after the other, as far as files go: of a `direct` program.
        answered: the newest step of the program's that is not made afresh.
    """

    outcomes: Places = field(default_factory=Places)
    last: dict[str, int] = field(default_factory=dict[str, int])
    unfinished: dict[tuple[str, int], Unfinished] = field(default_factory=dict[tuple[str, int], Unfinished])
    checkpoint: CheckpointRecord | None = None
    saved: Base | None = None
    past: Past = field(default_factory=Past)
    taken_back: set[str] = field(default_factory=set[str])
    asks_anew: bool = False
    caught_up: bool = False
    one_way: bool = False
    answered: int = 0

    def add(self, row: StoredRow) -> None:
        """Take one outcome; of several for one place the newest counts.

        Newest by step first: what is said late about an earlier try of a place does not speak for the later one.
        """
        if row.phase is not Phase.OUTCOME or row.lane == OPERATOR_LANE:
            return
        self.caught_up = False
        place = (row.lane, row.lane_step)
        held = self.outcomes.get(place)
        if row.outcome == PARKED:
            if held is not None and held.expired and held.step < row.step:
                self.outcomes.pop(place)  # asked anew: the call that waits now answers the place
            return
        if held is None or (held.step, held.pos) <= (row.step, row.pos):
            expired = has_expired(row)
            retry = row.outcome in RETRIED and not (expired or was_sent(row) or was_answered(row))
            aside, unknown, cut = row.action in ASIDE, row.outcome == "unknown", row.outcome == "cancelled"
            self.outcomes.put(place, Held(row.step, row.pos, retry, unknown, expired, aside, cut))
            if not (retry or aside) and row.lane != BOUNDARY_LANE:
                self.answered = max(self.answered, row.step)
        if row.lane_step >= self.last.get(row.lane, -1):
            self.last[row.lane] = row.lane_step

    def find(self, lane: str, lane_step: int) -> Held | None:
        """The outcome that answers this place again, or None where the call is to be made afresh."""
        held = self.outcomes.get((lane, lane_step))
        return None if held is None or self._made_afresh(lane, lane_step, held) else held

    def _made_afresh(self, lane: str, lane_step: int, held: Held) -> bool:
        if not (held.retry or (held.expired and self.asks_anew)) or self.last.get(lane) != lane_step:
            return False
        # Each such call has a lane of its own. One that was refused, or failed, and that answered ones came after keeps its place
        # among them: what the program did then rests on its refusal.
        kept = self.one_way and held.retry and not held.cut and lane.startswith(CONTENT)
        return not (kept and held.step < self.answered)

    def first_of(self, lane: str) -> int | None:
        """The first step of a lane that is known from behind the checkpoint; None: nothing is."""
        begun = [at for name, at in self.unfinished if name == lane]
        recorded = self.outcomes.first(lane)
        return min(begun if recorded is None else [recorded, *begun], default=None)

    def waits(self) -> list[int]:
        """Steps whose outcome an operator has to settle, in order."""
        return sorted(held.step for _, held in self.outcomes.items() if held.unknown)

    def recorded_order(self) -> list[int]:
        """Positions of the outcomes that answer lanes of the program again, in the order in which they were recorded.

        Empty where the program had one lane: its own order is all there is.
        """
        lanes: set[str] = set()
        found: list[int] = []
        for (lane, lane_step), held in self.outcomes.items():
            retried = self._made_afresh(lane, lane_step, held)
            if is_programs(lane) and not held.unknown and not retried and held.pos < NEWEST:
                lanes.add(lane)
                found.append(held.pos)
        return sorted(found) if len(lanes) > 1 else []

    @property
    def bare(self) -> bool:
        """Whether it is as one that has just begun; rows that were read can be read again."""
        found = self.last or self.unfinished or self.taken_back or self.asks_anew
        return not found and self.outcomes.bare and self.checkpoint is None and self.saved is None

    @property
    def first_step(self) -> int:
        """Step of lane `0` that the program continues at."""
        return 0 if self.checkpoint is None else self.checkpoint.lane_step + 1
