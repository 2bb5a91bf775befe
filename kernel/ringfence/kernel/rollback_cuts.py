"""Where a rollback, a fork or a diff leads, and what an agent did since, over all its branches.

An agent's steps are numbered over all its branches, and a rollback is a step like others: it changes files, rows and keys,
behind a point of its own. So how the world stood after a step, on whatever branch, is what is left when everything that took
effect after it is undone, the newest first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import BranchRecord, Phase, StoredRow
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.replay import NO_CUT, OPERATOR_LANE, PARKED, Lineage
from ringfence.kernel.thread import Thread

PRUNED = "agent.points_pruned"
"""The event that says before which step an agent's points are gone."""

_ASIDE = b'"aside":true'
"""What a fork's row says that tells of its original's own way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a rollback leads: the last step that is kept, and the branch whose journal up to there is the new one's prefix.

    `seen` is the branch that the agent was on when it was found.
    """

    step: int
    parent: int
    seen: int


async def pruned_before(store: Store, thread: Thread) -> int:
    """The step before which points were removed on purpose; 0: none was."""
    row = await store.last_event(thread.key, PRUNED)
    return 0 if row is None else int(json.loads(row.body)["before_step"])


def refuse_pruned(point: dict[str, Any], step: int, pruned: int) -> None:
    """Refuse what needs a point that was removed on purpose.

    Raises:
        Problem: it was.
    """
    if step < pruned and point["kind"] != "state":
        raise conflict(
            f"the rollback point {point['id']} was pruned; nothing goes back beyond step {pruned - 1} any more"
        )


def point_of(row: StoredRow) -> dict[str, Any] | None:
    """The rollback point an outcome carries."""
    return json.loads(row.body).get("point") if b'"point":' in row.body else None


def is_rollback(row: StoredRow) -> bool:
    """Whether a row is an operator's rollback, whole or of a path."""
    return row.action == "rollback" and row.lane == OPERATOR_LANE


async def done_since(store: Store, thread: Thread, step: int) -> list[StoredRow]:
    """Outcomes of all calls and rollbacks after a step, over all branches, the one that took effect last first.

    Raises:
        Unavailable: the database is away.
    """
    branches = await store.branches(thread.key)
    parts = [(record.branch, NO_CUT) for record in branches]
    rows = [row async for row in store.lineage_outcomes(thread.key, parts, step)]
    # What a fork knows of its original's own way beyond the fork is not its own to undo.
    rows = [row for row in rows if row.outcome != PARKED and _ASIDE not in row.body]
    # INVARIANT: in the order of their ends. A call that waited for a person has the number of when it was made, and takes
    # effect after later ones.
    return sorted(rows, key=lambda row: row.pos, reverse=True)


class Cuts:
    """Finds where to go back to.

    Args:
        store: the journal.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, thread: Thread, to: str) -> Cut:
        """The last step that is kept: a point keeps what was before its step, a step keeps itself, a time what was done by then.

        Points and steps may be of any branch of the present run. `0` is the beginning of the run.

        Raises:
            Problem: no such point or step, or it is archived.
        """
        cut = await self._find(thread, to)
        behind, _, _ = await self._store.archived_behind(thread.key)
        if cut.step < behind:
            raise conflict(
                f"the steps of `{thread.id}` before {behind} are archived, and nothing goes back beyond the checkpoint of that step; "
                f"see: ringfence steps {thread.id}"
            )
        return cut

    async def _find(self, thread: Thread, to: str) -> Cut:
        branches = await self._store.branches(thread.key)
        begun = next(record.cut_step for record in branches if record.branch == thread.lineage.root)
        if to.startswith("p") and _is_number(to[1:]):
            return await self._at_point(thread, to, branches)
        if not _is_number(to):
            return await self._at_time(thread, moment_of(to), branches)
        step = int(to)
        if step > thread.last_step:
            text = f"`{thread.id}` has no step {step}; its last one is {thread.last_step}"
            raise Problem(text, exit_code=4, reason="NoSuchStep")
        if step == 0:
            return Cut(step=begun, parent=thread.branch, seen=thread.branch)
        row = await self._row(thread, step, branches)
        if row is None:
            text = f"step {step} of `{thread.id}` is not on a branch of its present run, or has not ended; see: ringfence steps {thread.id}"
            raise Problem(text, exit_code=4, reason="NoSuchStep")
        return Cut(step=step, parent=_prefix(thread, row), seen=thread.branch)

    async def _row(self, thread: Thread, step: int, branches: Sequence[BranchRecord]) -> StoredRow | None:
        """The newest outcome of a step of the present run."""
        found = [
            row
            for row in await self._store.step(thread.key, step)
            if row.phase is Phase.OUTCOME
            and _ASIDE not in row.body
            and Lineage.of(row.branch, branches).root == thread.lineage.root
        ]
        return found[-1] if found else None

    async def _at_point(self, thread: Thread, to: str, branches: Sequence[BranchRecord]) -> Cut:
        step = int(to[1:])
        row = await self._row(thread, step, branches)
        if row is None or point_of(row) is None:
            text = f"no rollback point `{to}` on a branch of `{thread.id}`; see: ringfence points {thread.id}"
            raise Problem(text, exit_code=4, reason="NoSuchPoint")
        # The point of a rollback leads back to the branch that it had left.
        left = json.loads(row.body)["result"].get("left_branch") if is_rollback(row) else None
        parent = _prefix(thread, row) if left is None else int(left)
        return Cut(step=step - 1, parent=parent, seen=thread.branch)

    async def _at_time(self, thread: Thread, at_us: int, branches: Sequence[BranchRecord]) -> Cut:
        last = await self._store.done_by(thread.key, at_us)
        if last is None:
            # Nothing had ended by then: of the present run nothing is kept.
            return Cut(step=0, parent=thread.branch, seen=thread.branch)
        step, branch = last
        same = Lineage.of(branch, branches).root == thread.lineage.root
        # Beyond the beginning of the run what earlier ones did is undone too; the run itself begins anew.
        return Cut(step=step, parent=branch if same else thread.branch, seen=thread.branch)


def _prefix(thread: Thread, row: StoredRow) -> int:
    """The branch whose journal leads to a row."""
    return thread.branch if thread.lineage.holds(row.branch, row.step) else row.branch


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def moment_of(to: str) -> int:
    """A time as operators write it, in microseconds since the epoch.

    Raises:
        Problem: it is none, or has no zone.
    """
    try:
        at = datetime.fromisoformat(to)
    except ValueError:
        raise bad_usage(
            f"`{to}` is neither a point such as p12, nor a step, nor a time in RFC 3339"
        ) from None
    if at.tzinfo is None:
        raise bad_usage(
            f"the time `{to}` has no zone and could be yours or UTC; write it as 2026-01-31T12:00:00Z or 2026-01-31T13:00:00+01:00"
        )
    return int(at.timestamp() * 1_000_000)
