"""What the journal says of effects that a rollback took back over HTTP: calls that may be made again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from ringfence.kernel.journal.types import Phase, Row
from ringfence.kernel.replay import OPERATOR_LANE, PUT_BACK
from ringfence.kernel.settled import effect_identity

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.thread import Thread


async def put_on_record(core: Core, thread: Thread, url: str, effects: list[str], how: str) -> None:
    """Say that what some calls did is undone, so that they may be made again.

    Raises:
        JournalUnavailable, Fenced: this kernel is at its end.
    """
    fresh = [effect for effect in effects if effect not in thread.replay.taken_back]
    if not fresh:
        return
    identity = identity_of(thread, PUT_BACK, url, fresh)
    body = msgspec.json.encode({"of": fresh, "result": {"how": how}, "rules": [], "grants": []})
    row = row_of(thread, Phase.OUTCOME, thread.take_step(), PUT_BACK, url, identity)
    row.outcome, row.body = "ok", body
    await core.append_outcome(row)
    thread.replay.taken_back.update(fresh)


def identity_of(thread: Thread, action: str, url: str, effects: Sequence[str]) -> str:
    """The key of what is sent: the same at each try."""
    digest = hashlib.sha256(" ".join(effects).encode()).digest()
    return effect_identity(thread.record.thread, action, url, digest, 0)


def row_of(thread: Thread, phase: Phase, step: int, action: str, resource: str, identity: str) -> Row:
    """What such a record begins with."""
    return Row(
        chain=thread.key,
        phase=phase,
        step=step,
        branch=thread.branch,
        lane=OPERATOR_LANE,
        action=action,
        resource=resource,
        effect="EXTERNAL",
        # No rule decided on it, and it takes nothing of the agent's totals.
        verdict="",
        effect_id=identity,
        started_us=time.time_ns() // 1000,
    )
