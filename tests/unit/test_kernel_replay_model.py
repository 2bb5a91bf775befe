"""What a restarted program gets, against a model that copies whole histories: calls, retries, rollbacks of rollbacks, restarts.

The model keeps for every branch a plain list of what happened on it; the real parts keep one journal and work it out.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ringfence.kernel.journal.types import BranchRecord, CheckpointRecord, Phase, StoredRow
from ringfence.kernel.replay import HAPPENED, OPERATOR_LANE, RETRIED, Effects, Lineage, Replay
from ringfence.kernel.settled import effect_identity

LANES = ("0", "0.0", "0.1")
OUTCOMES = ("ok", "ok", "ok", "error", "denied", "refused", "cancelled", "unknown")
CALLS = ("pay 1", "pay 2")


def stored(
    *,
    pos: int,
    step: int,
    branch: int,
    lane: str,
    lane_step: int,
    outcome: str,
    effect_id: str = "",
    action: str = "http.post",
) -> StoredRow:
    return StoredRow(
        chain=1,
        pos=pos,
        phase=Phase.OUTCOME,
        step=step,
        branch=branch,
        lane=lane,
        lane_step=lane_step,
        action=action,
        resource="",
        effect="EXTERNAL",
        verdict="allow",
        outcome=outcome,
        digest=b"",
        effect_id=effect_id,
        started_us=0,
        duration_us=0,
        body=b"{}",
        hash=b"",
    )


@dataclass
class History:
    """One branch as the model sees it: its own copy of everything that counts on it."""

    places: dict[tuple[str, int], tuple[int, str]] = field(
        default_factory=dict[tuple[str, int], tuple[int, str]]
    )  # -> step, outcome
    used: dict[int, str] = field(default_factory=dict[int, str])  # step -> effect id of what happened
    next_of: dict[str, int] = field(default_factory=dict[str, int])
    checkpoint: tuple[int, int] | None = None  # step, lane step
    moments: list[tuple[int, History]] = field(
        default_factory=list["tuple[int, History]"]
    )  # after each step: a copy

    def after(self, step: int) -> History:
        """This history as it was when `step` was its last."""
        made = History()
        for at, moment in self.moments:
            if at > step:
                break
            made = copy.deepcopy(moment)
        made.moments = [(at, moment) for at, moment in self.moments if at <= step]
        return made


class Lives(RuleBasedStateMachine):
    """Random lives of one agent."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = [BranchRecord(branch=0, parent=None, cut_step=0, created_at=datetime.now(UTC))]
        self.rows: list[StoredRow] = []
        self.checkpoints: list[CheckpointRecord] = []
        self.now = 0
        self.step = 0
        self.model = {0: History()}
        self.lineage = Lineage.of(0, self.branches)
        self.outcome_of: dict[int, str] = {}

    # -- the real parts, as the kernel uses them ----------------------------------------------------------------------

    def lineage_rows(self) -> list[StoredRow]:
        rows = [row for row in self.rows if self.lineage.holds(row.branch, row.step)]
        return sorted(rows, key=lambda row: (row.step, row.pos))

    def loaded(self) -> Replay:
        replay = Replay()
        saved = [c for c in self.checkpoints if self.lineage.holds(c.branch, c.step)]
        replay.checkpoint = max(saved, key=lambda c: c.step, default=None)
        after = 0 if replay.checkpoint is None else replay.checkpoint.step
        for row in self.lineage_rows():
            if row.step > after:
                replay.add(row)
        return replay

    def effects(self) -> Effects:
        effects = Effects()
        for row in self.rows:
            effects.add(row)
        return effects

    def append(self, **fields: object) -> StoredRow:
        row = stored(pos=len(self.rows) + 1, **fields)  # type: ignore[arg-type] - the same names
        self.rows.append(row)
        return row

    def take_step(self) -> int:
        self.step += 1
        return self.step

    def next_effect(self, call: str) -> str:
        consumed = self.effects().consumed(self.lineage)
        occurrence = 0
        while (effect := effect_identity("t", "http.post", call, b"", occurrence)) in consumed:
            occurrence += 1
        return effect

    @property
    def past(self) -> History:
        return self.model[self.now]

    def happened(self, step: int, lane: str, lane_step: int, outcome: str, effect: str) -> None:
        past = self.past
        past.places[lane, lane_step] = (step, outcome)
        past.next_of[lane] = max(past.next_of.get(lane, 0), lane_step + 1)
        past.used.pop(step, None)
        self.outcome_of[step] = outcome
        if outcome in HAPPENED and effect:
            past.used[step] = effect
        past.moments.append(
            (step, copy.deepcopy(History(past.places, past.used, past.next_of, past.checkpoint)))
        )

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(lane=st.sampled_from(LANES), outcome=st.sampled_from(OUTCOMES), call=st.sampled_from(CALLS))
    def call(self, lane: str, outcome: str, call: str) -> None:
        lane_step = self.past.next_of.get(lane, 0)
        effect = self.next_effect(call)
        # INVARIANT under test: two different calls of one lineage never share an id.
        assert effect not in self.past.used.values()
        step = self.take_step()
        self.append(
            step=step, branch=self.now, lane=lane, lane_step=lane_step, outcome=outcome, effect_id=effect
        )
        self.happened(step, lane, lane_step, outcome, effect)

    @rule(lane=st.sampled_from(LANES), call=st.sampled_from(CALLS))
    def refused_late(self, lane: str, call: str) -> None:
        """A try whose refusal is recorded only after the one that took its place, as when the database was away."""
        lane_step = self.past.next_of.get(lane, 0)
        effect = self.next_effect(call)
        first, second = self.take_step(), self.take_step()
        made = {"branch": self.now, "lane": lane, "lane_step": lane_step, "effect_id": effect}
        self.append(step=second, outcome="ok", **made)
        self.append(step=first, outcome="refused", **made)
        self.happened(second, lane, lane_step, "ok", effect)

    def doubted(self, step: int, effect: str, row: StoredRow) -> bool:
        return effect == row.effect_id and self.outcome_of[step] == "unknown"

    def unknown(self) -> list[tuple[str, int]]:
        return [place for place, (_, outcome) in self.past.places.items() if outcome == "unknown"]

    @precondition(lambda self: self.unknown())
    @rule(data=st.data(), done=st.booleans())
    def resolve(self, data: st.DataObject, done: bool) -> None:
        lane, lane_step = data.draw(st.sampled_from(sorted(self.unknown())))
        step, _ = self.past.places[lane, lane_step]
        row = next(row for row in self.rows if row.step == step)
        outcome = "ok" if done else "cancelled"
        self.append(
            step=step,
            branch=row.branch,
            lane=lane,
            lane_step=lane_step,
            outcome=outcome,
            effect_id=row.effect_id,
        )
        self.outcome_of[step] = outcome
        # What a person says of a step holds on every branch that has it. That it was not done holds for its effect: the other
        # branches where it was only recognised, and so is unknown too, hold it no longer.
        for history in self.model.values():
            for known in [history, *(moment for _, moment in history.moments)]:
                if known.places.get((lane, lane_step), (0, ""))[0] == step:
                    known.places[lane, lane_step] = (step, outcome)
                    known.used[step] = row.effect_id
                if not done:
                    known.used = {
                        s: e for s, e in known.used.items() if s != step and not self.doubted(s, e, row)
                    }

    @rule()
    def save(self) -> None:
        lane_step = self.past.next_of.get("0", 0)
        step = self.take_step()
        self.append(
            step=step, branch=self.now, lane="0", lane_step=lane_step, outcome="ok", action="checkpoint.save"
        )
        self.checkpoints.append(
            CheckpointRecord(
                step=step, branch=self.now, lane_step=lane_step, schema_version=1, next_child=0, state=b"{}"
            )
        )
        self.past.checkpoint = (step, lane_step)
        self.happened(step, "0", lane_step, "ok", "")

    @precondition(lambda self: self.step > 0)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        kept = [0, *(at for at, _ in self.past.moments)]
        self.branch_from(self.now, data.draw(st.sampled_from(kept)))

    @precondition(lambda self: self.branches[-1].parent is not None)
    @rule()
    def roll_the_rollback_back(self) -> None:
        """To the point from just before the newest rollback: back on the branch it had left, whole."""
        newest = self.branches[-1]
        assert newest.parent is not None
        if self.now == newest.branch:
            self.branch_from(self.left, self.rolled - 1)

    def branch_from(self, parent: int, cut: int) -> None:
        step = self.take_step()
        made = len(self.branches)
        self.branches.append(
            BranchRecord(branch=made, parent=parent, cut_step=cut, created_at=datetime.now(UTC))
        )
        self.append(step=step, branch=made, lane=OPERATOR_LANE, lane_step=0, outcome="ok", action="rollback")
        self.model[made] = self.model[parent].after(cut)
        self.left, self.rolled = self.now, step
        self.now = made
        self.lineage = Lineage.of(made, self.branches)

    # -- what must hold, whenever a program is started again ----------------------------------------------------------

    @invariant()
    def a_restarted_program_gets_what_the_model_says(self) -> None:
        replay = self.loaded()
        past = self.past
        saved = past.checkpoint
        assert (replay.checkpoint.step if replay.checkpoint else None) == (saved[0] if saved else None)
        assert replay.first_step == (0 if saved is None else saved[1] + 1)
        after = saved[0] if saved else 0
        for lane in LANES:
            count = past.next_of.get(lane, 0)
            for lane_step in range(count + 1):
                step, outcome = past.places.get((lane, lane_step), (0, ""))
                found = replay.find(lane, lane_step)
                if step <= after:
                    # Before the checkpoint nobody asks; after the end there is nothing.
                    assert found is None
                elif outcome in RETRIED and lane_step == count - 1:
                    assert found is None
                else:
                    assert found is not None
                    row = self.rows[found.pos - 1]
                    assert (found.step, row.step, row.outcome) == (step, step, outcome)
                    assert found.unknown == (outcome == "unknown")
        waiting = sorted(s for s, o in past.places.values() if o == "unknown" and s > after)
        assert replay.waits() == waiting

    @invariant()
    def the_operators_lane_is_never_replayed(self) -> None:
        assert all(lane != OPERATOR_LANE for lane, _ in self.loaded().outcomes)

    @invariant()
    def ids_in_use_are_those_of_what_happened_on_this_branch(self) -> None:
        effects = self.effects()
        # A newer branch may have recognised an effect; what this branch holds stays held.
        assert effects.consumed(self.lineage) == set(self.past.used.values())
        assert set(effects.known()) == {e for h in self.model.values() for e in self.all_used(h)}

    @staticmethod
    def all_used(history: History) -> set[str]:
        return set(history.used.values())


Lives.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase
