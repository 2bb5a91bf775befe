"""The part of a rollback about messages, memories and artifacts.

What the agent received after the cut goes back into its mailbox; what it sent and nobody has received is voided; what it
kept is hidden. Nothing is deleted: a rollback of the rollback finds all of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Rewound
from ringfence.kernel.replay import Lineage
from ringfence.kernel.thread import Thread

TAKEN = "taken"


async def rewind(core: Core, thread: Thread, cut: int, parent: int, *, dry: bool) -> list[Rewound]:
    """Put them to how they stood at a step; `dry` only says what would change.

    Args:
        core: the kernel's parts.
        thread: whose.
        cut: last step that is kept.
        parent: branch whose journal up to there is kept.
        dry: change nothing.

    Raises:
        Unavailable: the database is away.
    """
    parts = Lineage.of(parent, await core.store.branches(thread.key)).parts
    kept = [(branch, min(limit, cut)) for branch, limit in parts]
    return await core.store.rewind_atoms(thread.key, kept, dry=dry)


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
