"""The parts of a rollback of several agents, as each of their journals has them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import AgentKey, AgentRecord, Phase
from ringfence.kernel.thread import Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One agent's part.

    Attributes:
        record: the agent.
        cut: the last of its steps that stayed.
        step: that of its part.
    """

    record: AgentRecord
    cut: int
    step: int


async def parts_of(store: Store, thread: Thread, step: int) -> list[Part]:
    """The parts of all agents that went back together with a rollback of this one; none: it was alone.

    Raises:
        Unavailable: the database is away.
    """
    intent = next((row for row in await store.step(thread.key, step) if row.phase is Phase.INTENT), None)
    group = None if intent is None else json.loads(intent.body)["arguments"].get("group")
    if group is None:
        return []
    head = await store.rollback_intent(AgentKey(group["head"]), group["id"])
    listed: list[dict[str, int]] = (
        [] if head is None else json.loads(head.body)["arguments"]["group"].get("members") or []
    )
    found: list[Part] = []
    for one in listed:
        key = AgentKey(one["key"])
        record, part = await store.agent_by_key(key), await store.rollback_intent(key, group["id"])
        if record is not None and part is not None:
            found.append(Part(record=record, cut=one["cut"], step=part.step))
    return found
