"""Ends agents with all that descend from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import AgentKey, AgentRecord, ApprovalRecord, StoredRow
from ringfence.kernel.thread import FINAL_STATES, Thread

if TYPE_CHECKING:
    from ringfence.kernel.processes import Processes


def state_of(core: Core, record: AgentRecord) -> str:
    """The state of an agent as this kernel knows it."""
    thread = core.threads.get(record.key)
    return record.state if thread is None else thread.state


async def end_below(core: Core, processes: Processes, key: AgentKey) -> list[dict[str, Any]]:
    """End everything that descends from an agent. The agent itself has to be ended before, so that it spawns nobody more.

    Returns:
        Each agent that had not ended: `id`, the `state` it is in now, and what it `was` before.

    Raises:
        Unavailable: the database is away; some may be ended.
    """
    ended: list[dict[str, Any]] = []
    seen: set[AgentKey] = set()
    while True:
        # A child may have been born while its parent was being ended.
        fresh = [kin for kin in await core.store.descendants(key) if kin.child not in seen]
        if not fresh:
            return ended
        for kin in fresh:
            seen.add(kin.child)
            record = await core.store.agent_by_key(kin.child)
            if record is not None:
                ended += await _end(core, processes, record)


async def _end(core: Core, processes: Processes, record: AgentRecord) -> list[dict[str, Any]]:
    was = state_of(core, record)
    if was in FINAL_STATES:
        return []
    thread = core.threads.get(record.key)
    if thread is None and record.owner == core.kernel and core.adopt is not None:
        # Born a moment ago: it is ended before it was started.
        thread = await core.adopt(record)
    if thread is not None:
        await processes.kill(thread)
    # Without a thread another kernel has it: its parents' rights bound it all the same.
    return [{"id": record.id, "state": was if thread is None else thread.state, "was": was}]


# -- rollback -------------------------------------------------------------------------------------------------------------


async def children_of(core: Core, thread: Thread, rows: Sequence[StoredRow]) -> list[dict[str, Any]]:
    """Children that were spawned by these steps and all that descend from them, as a rollback lists them."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if row.action != "spawn" or row.outcome != "ok":
            continue
        child = await core.store.agent(json.loads(row.body)["result"]["id"])
        # A fork has the steps of its original and not its children.
        if child is None or (await core.store.parents(child.key))[:1] != [thread.key]:
            continue
        keys = [child.key, *(kin.child for kin in await core.store.descendants(child.key))]
        for key in keys:
            record = child if key == child.key else await core.store.agent_by_key(key)
            if record is not None and (state := state_of(core, record)) not in FINAL_STATES:
                found.append(
                    {"kind": "child", "id": record.id, "step": row.step, "action": "killed", "detail": state}
                )
    return found


async def end_children(core: Core, processes: Processes, others: Sequence[dict[str, Any]]) -> None:
    """End the children that a rollback lists."""
    for other in others:
        record = await core.store.agent(other["id"]) if other["kind"] == "child" else None
        if record is not None:
            await _end(core, processes, record)
            await end_below(core, processes, record.key)


async def waiting(core: Core, thread: Thread) -> list[dict[str, Any]]:
    """Approvals that a rollback voids: those of all calls that wait, for the calls are ended."""
    records = await core.store.approvals(thread.key, everything=False)
    return [_approval(record) for record in sorted(records, key=lambda record: record.key)]


def _approval(record: ApprovalRecord) -> dict[str, Any]:
    detail = f"{record.action} on {record.resource}" if record.resource else record.action
    return {"kind": "approval", "id": record.id, "step": record.step, "action": "voided", "detail": detail}
