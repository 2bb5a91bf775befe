"""What operators do to go back: rollback of one agent, and of all together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringfence.kernel import rollback_atoms
from ringfence.kernel.journal.types import AgentRecord
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import Problem, conflict
from ringfence.kernel.reach import Scratch
from ringfence.kernel.rollback_cuts import Cut, is_rollback, moment_of
from ringfence.kernel.rollback_plan import Member, Undo
from ringfence.kernel.thread import Thread
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.types import SandboxError
from ringfence.sandbox.workspace import WorkspaceError

_TOUCHED = ("changes", "conflicts", "not_undoable", "others")


def undo_document(undo: Undo) -> dict[str, Any]:
    """What a rollback does, as `--preview` shows it."""
    changes: list[dict[str, Any]] = []
    conflicts: list[dict[str, Any]] = [
        {"kind": "state", "target": key, "reason": reason} for key, reason in undo.state_conflicts.items()
    ]
    if undo.files is not None:
        changes += [
            {"kind": undo.files.kinds[i.path], "target": i.path, "action": i.action, "detail": ""}
            for i in undo.files.items
        ]
        conflicts += [
            {"kind": undo.files.kinds[path], "target": path, "reason": undo.files.reasons.get(path, "")}
            for path in undo.files.conflicts
        ]
    for now, before in undo.state:
        action = "restore" if before is not None and before.value is not None else "remove"
        changes.append(
            {"kind": "state", "target": now.key, "action": action, "detail": f"version {now.version}"}
        )
    conflicts += [
        {"kind": "sql", "target": table, "reason": reason} for table, reason in undo.late_conflicts.items()
    ]
    changes += undo.http.changes() + undo.objects.changes()
    conflicts += [{"kind": "object", "target": t, "reason": why} for t, why in undo.objects.conflicts.items()]
    conflicts += [{"kind": "http", "target": url, "reason": why} for url, why in undo.http.conflicts.items()]
    for plan in undo.sql.values():
        for entry in plan.describe():
            key = ", ".join(f"{column}={value}" for column, value in entry["key"].items())
            target = f"{entry['table']} {key}".strip()
            if entry["action"] == "conflict":
                conflicts.append({"kind": "sql", "target": target, "reason": entry["reason"]})
            else:
                kind = entry.get("kind", "row")
                changes.append({"kind": kind, "target": target, "action": entry["action"], "detail": ""})
    changes += rollback_atoms.changes(undo.moved)
    return {
        "to_step": undo.cut,
        "changes": changes,
        "conflicts": conflicts,
        "not_undoable": [
            {
                "step": r.step,
                "action": r.action,
                "resource": r.resource,
                "effect": r.effect,
                # Without an outcome nobody knows whether it was sent.
                "outcome": r.outcome or "unknown",
                "why": undo.http.why.get(r.step),
            }
            for r in undo.not_undoable
        ]
        + rollback_atoms.not_undoable(undo.moved),
        "others": list(undo.others),
    }


async def rollback(
    kernel: Kernel, name: str, to: str, *, preview: bool, path: str, start: bool, operator: str
) -> dict[str, Any]:
    """Put effects back, or say what that would do."""
    thread = await kernel.with_files(name)
    cut = await kernel.rollback.plans.cut_for(thread, to)
    wanted = thread.environment.workspace.canonical(path, follow=False) if path else None
    if preview:
        return _previewed(thread, await kernel.rollback.plans.plan(thread, cut, wanted))
    _refuse_fenced(thread)
    try:
        undo, facts = await kernel.rollback.execute(thread, cut, wanted, operator)
    except (SnapshotError, WorkspaceError) as error:
        raise _stopped(error) from error
    await kernel.core.operator_event("operator.rollback", thread.id, operator=operator, cut=cut.step, **facts)
    if start:
        await _start(kernel, thread)
    return {"preview": False, **undo_document(undo), **facts, "state": thread.state}


@dataclass(slots=True)
class _Fleet:
    """All that did something after a time, as far as they can be had: a thread to plan with each, and who is left out."""

    found: list[Thread] = field(default_factory=list[Thread])
    members: list[Member] = field(default_factory=list[Member])
    undos: list[Undo] = field(default_factory=list[Undo])
    skipped: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


async def rollback_all(
    kernel: Kernel, to: str, *, preview: bool, start: bool, operator: str, skip_unreachable: bool = False
) -> dict[str, Any]:
    """Put back what all agents of the database did after a time, as one, or say what that would do.

    Agents of other kernels are brought under this one for it, and given back afterwards.

    Args:
        kernel: whoever is asked; it carries all of it out.
        to: a time in RFC 3339.
        preview: change nothing.
        start: start each afterwards.
        operator: who asks.
        skip_unreachable: leave out those that can't be had, instead of refusing all.

    Returns:
        agents: a document as of one rollback for each that did something since, with `agent`, in the order in which they go
        back; skipped: those that can't be had, with a `reason`.

    Raises:
        Problem: `to` is no time, one can't be had, or one of them can't go back; nothing was changed then, or a second try goes on.
    """
    at_us = moment_of(to)
    scratch = Scratch(kernel.layout)
    try:
        fleet = await _look(kernel, at_us, to, scratch)
    finally:
        await asyncio.to_thread(scratch.remove)
    shown = [_previewed(member.thread, undo) for member, undo in zip(fleet.members, fleet.undos, strict=True)]
    if fleet.skipped and not preview and not skip_unreachable:
        raise _refused(fleet.skipped)
    states = [thread.state for thread in fleet.found]
    if fleet.found and not preview:
        shown, states = await _all_back(kernel, fleet, to, start, operator)
    documents = [
        {"agent": thread.id, **document, "state": state}
        for thread, document, state in zip(fleet.found, shown, states, strict=True)
    ]
    return {"preview": preview, "to": to, "agents": documents, "skipped": fleet.skipped}


async def _look(kernel: Kernel, at_us: int, to: str, scratch: Scratch) -> _Fleet:
    """Plan for all of them; nothing is changed, and nobody is held up."""
    fleet, members = _Fleet(), list[Member]()
    for record in await _in_order(kernel, at_us):
        try:
            thread = await _seen(kernel, record, scratch)
            members.append(Member(thread=thread, cut=await kernel.rollback.plans.cut_for(thread, to)))
        except Problem as problem:
            fleet.skipped.append({"agent": record.id, "reason": str(problem)})
    for member, undo in zip(members, await kernel.rollback.plans.plan_all(members), strict=True):
        if _is_beyond(member, undo):
            fleet.found.append(member.thread)
            fleet.members.append(member)
            fleet.undos.append(undo)
    return fleet


async def _seen(kernel: Kernel, record: AgentRecord, scratch: Scratch) -> Thread:
    """An agent to plan with: its live side where it is this kernel's to have, else a look at its files."""
    live = kernel.core.threads.get(record.key)
    place = await kernel.rollback.handover.reach.place_of(record)
    others = {k.key for k in await kernel.core.store.kernels() if k.alive and k.fence > 0}
    others.discard(kernel.core.kernel)
    if live is None and (place.beside is not None or place.stored or record.owner in others):
        return await kernel.rollback.handover.reach.glance(record, place, scratch.make())
    thread = await kernel.with_files(record.id)
    _refuse_fenced(thread)
    return thread


def _refused(skipped: Sequence[Mapping[str, str]]) -> Problem:
    why = "; ".join(one["reason"] for one in skipped)
    return conflict(
        f"not all agents can go back, so none did: {why}; mend that, or leave these out with `--skip-unreachable`"
    )


async def _all_back(
    kernel: Kernel, fleet: _Fleet, to: str, start: bool, operator: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Bring all of them under this kernel, put them back, and let those go that have their files elsewhere."""
    handover = kernel.rollback.handover
    keys = [thread.key for thread in fleet.found]
    refused = True
    try:
        threads = await handover.gather(keys)
        try:
            found = [(thread, await kernel.rollback.plans.cut_for(thread, to)) for thread in threads]
            shown = await _carried_out(kernel, found, operator)
            refused = False
            _add_voided(shown, fleet.undos)
            ended = {other["id"] for one in shown for other in one["others"] if other["kind"] == "child"}
            if start:
                for thread in threads:
                    if thread.id not in ended:
                        await _start(kernel, thread)
            return shown, [thread.state for thread in threads]
        finally:
            await asyncio.shield(handover.let_go(keys, refused=refused))
    finally:
        fleet.found = [kernel.core.threads.get(thread.key, thread) for thread in fleet.found]


def _add_voided(shown: Sequence[dict[str, Any]], undos: Sequence[Undo]) -> None:
    """Approvals of agents that another kernel handed over are void already when their rollback begins."""
    for document, undo in zip(shown, undos, strict=True):
        told = {(other["kind"], other["id"]) for other in document["others"]}
        voided = [o for o in undo.others if o["kind"] == "approval" and (o["kind"], o["id"]) not in told]
        document["others"][:0] = voided


def _is_beyond(member: Member, undo: Undo) -> bool:
    """Whether an agent stands elsewhere than at its cut, or anything is left to do or to say: one that went back already does not."""
    lineage, cut = member.thread.lineage, member.cut
    own = (row for row in member.rows if lineage.holds(row.branch, row.step))
    if any(not is_rollback(row) for row in own) or not lineage.holds(cut.parent, cut.step):
        # It goes also where all of its keys are put back in another one's part: forward to a branch that it had left.
        return True
    document = undo_document(undo)
    return any(document[name] for name in _TOUCHED)


async def _in_order(kernel: Kernel, at_us: int) -> list[AgentRecord]:
    """Agents that did something after a time: those that were spawned before those that spawned them, newer before older."""
    store = kernel.core.store
    records: list[AgentRecord] = []
    for key in await store.active_since(at_us):
        record = await store.agent_by_key(key)
        if record is not None and await store.removed_at(key) is None:
            records.append(record)
    depth = {record.key: len(await store.parents(record.key)) for record in records}
    return sorted(records, key=lambda record: (-depth[record.key], -record.key))


async def _carried_out(
    kernel: Kernel, found: Sequence[tuple[Thread, Cut]], operator: str
) -> list[dict[str, Any]]:
    try:
        done = await kernel.rollback.execute_all(found, operator)
    except (SnapshotError, WorkspaceError) as error:
        raise _stopped(error) from error
    for (thread, cut), (_, facts) in zip(found, done, strict=True):
        event = "operator.rollback_all"
        await kernel.core.operator_event(event, thread.id, operator=operator, cut=cut.step, **facts)
    return [{"preview": False, **undo_document(undo), **facts} for undo, facts in done]


def _previewed(thread: Thread, undo: Undo) -> dict[str, Any]:
    return {
        "preview": True,
        **undo_document(undo),
        "point": None,
        "branch": thread.branch,
        "state": thread.state,
    }


def _refuse_fenced(thread: Thread) -> None:
    if thread.fenced:
        raise conflict(f"another kernel owns `{thread.id}` now; nothing was changed, connect to that one")


def _stopped(error: Exception) -> Problem:
    return conflict(f"the rollback stopped: {error}; mend that and run it again, it continues where it was")


async def _start(kernel: Kernel, thread: Thread) -> None:
    if thread.borrowed:
        # The kernel that has its files starts it as soon as it has it back, and so does the one after that.
        await kernel.processes.set_state(thread, "pending")
        return
    async with thread.operation:
        try:
            await kernel.processes.start(thread)
        except SandboxError as error:
            raise Problem(
                f"rolled back, but `{thread.id}` can't start: {error}", exit_code=1, reason="SandboxError"
            ) from error
