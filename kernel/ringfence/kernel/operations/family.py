"""What operators see of families, and do with them as a whole."""

from __future__ import annotations

from typing import Any

from ringfence.kernel.journal.store_kin import Kin
from ringfence.kernel.journal.types import AgentKey, AgentRecord
from ringfence.kernel.operations.kernel import Kernel, agent_row
from ringfence.kernel.thread import FINAL_STATES


async def tree(kernel: Kernel, name: str, *, everything: bool) -> dict[str, Any]:
    """Who spawned whom, from one agent or from every one that was submitted."""
    store = kernel.core.store
    records = {record.key: record for record in await store.agents(True)}
    children: dict[AgentKey, list[Kin]] = {}
    spawned: set[AgentKey] = set()
    for kin in await store.kin():
        if not {kin.child, kin.parent} <= records.keys():
            continue  # one of them is removed; a child that is left stands by itself
        children.setdefault(kin.parent, []).append(kin)
        spawned.add(kin.child)
    roots = [(await kernel.record(name)).key] if name else [key for key in records if key not in spawned]
    nodes = [_node(kernel, records, children, key, None) for key in roots]
    return {"agents": [node for node in nodes if everything or name or _lives(node)]}


def _node(
    kernel: Kernel,
    records: dict[AgentKey, AgentRecord],
    children: dict[AgentKey, list[Kin]],
    key: AgentKey,
    kin: Kin | None,
) -> dict[str, Any]:
    below = [_node(kernel, records, children, k.child, k) for k in children.get(key, ())]
    row = agent_row(kernel, records[key])
    shown = {name: row[name] for name in ("id", "name", "state", "process", "waiting_for")}
    return {**shown, "spawned_at_step": None if kin is None else kin.step, "children": below}


def _lives(node: dict[str, Any]) -> bool:
    return node["state"] not in FINAL_STATES or any(_lives(child) for child in node["children"])


async def kin_of(kernel: Kernel, key: AgentKey) -> dict[str, Any]:
    """Parent and children of one agent, as `show` has them."""
    store = kernel.core.store
    above = await store.parents(key)
    parent = await store.agent_by_key(above[0]) if above else None
    children: list[dict[str, Any]] = []
    for kin in await store.descendants(key):
        record = await store.agent_by_key(kin.child) if kin.parent == key else None
        if record is not None:
            state = agent_row(kernel, record)["state"]
            children.append({"id": record.id, "name": record.name, "state": state, "step": kin.step})
    return {"parent": None if parent is None else parent.id, "children": children}
