"""The part of a rollback about messages, memories and artifacts.

What the agent received after the cut goes back into its mailbox; what it sent and nobody has received is voided; what it
kept is hidden. Nothing is deleted: a rollback of the rollback finds all of it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ringfence.kernel.core import Core
from ringfence.kernel.facts import earlier_runs
from ringfence.kernel.journal.types import Rewound
from ringfence.kernel.replay import Lineage
from ringfence.kernel.rollback_cuts import Cut
from ringfence.kernel.thread import Thread

TAKEN = "taken"


async def rewind(core: Core, thread: Thread, cut: Cut, *, dry: bool) -> list[Rewound]:
    """Put them to how they stood at a step; `dry` only says what would change.

    Args:
        core: the kernel's parts.
        thread: whose.
        cut: where it leads. What earlier runs kept stays, up to there.
        dry: change nothing.

    Raises:
        Unavailable: the database is away.
    """
    branches = await core.store.branches(thread.key)
    lineage = Lineage.of(cut.parent, branches)
    every = [(record.branch, Lineage.of(record.branch, branches)) for record in branches]
    parts = [*lineage.parts, *(part for run in earlier_runs(lineage, every) for part in run.parts)]
    kept = [(branch, min(limit, cut.step)) for branch, limit in parts]
    return await core.store.rewind_atoms(thread.key, kept, dry=dry)


def match(planned: Iterable[list[Rewound]]) -> None:
    """Of agents that go back together: what one has received of another goes back into no mailbox, and is voided."""
    every = list(planned)
    returned = {one.target for moved in every for one in moved if one.action == "return"}
    for moved in every:
        moved[:] = [
            replace(one, action="void") if one.action == TAKEN and one.target in returned else one
            for one in moved
        ]
    drop_voided(every)


def drop_voided(done: Iterable[list[Rewound]]) -> None:
    """Leave out that a message goes back into a mailbox where it is voided as well."""
    every = list(done)
    voided = {one.target for moved in every for one in moved if one.action == "void"}
    for moved in every:
        moved[:] = [one for one in moved if one.action != "return" or one.target not in voided]


def merged(first: Sequence[Rewound], again: Sequence[Rewound]) -> list[Rewound]:
    """What two rewinds did together: the later word on a message counts."""
    later = {(one.kind, one.target): one for one in again}
    gone = {key for key, one in later.items() if one.action != TAKEN}
    kept = [one for one in first if (one.kind, one.target) not in gone and one.action != TAKEN]
    return [*kept, *again]


def changes(moved: Sequence[Rewound]) -> list[dict[str, Any]]:
    """As the document of a rollback lists them."""
    return [
        {"kind": one.kind, "target": one.target, "action": one.action, "detail": one.detail}
        for one in moved
        if one.action != TAKEN
    ]


def not_undoable(moved: Sequence[Rewound]) -> list[dict[str, Any]]:
    """Messages that another agent has received, as the document lists them."""
    return [
        {
            "step": one.step,
            "action": "messages.send",
            "resource": f"{one.target} {one.detail}",
            "effect": "WRITE",
            "outcome": "ok",
        }
        for one in sorted(moved, key=lambda one: -one.step)
        if one.action == TAKEN
    ]
