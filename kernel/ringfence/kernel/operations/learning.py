"""What an agent did, as questions of policy, and the smallest rules for it."""

from __future__ import annotations

import asyncio
import json
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from ringfence.kernel.journal.types import Phase, StoredRow
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.rollback_cuts import point_of
from ringfence.kernel.thread import Thread
from ringfence.policy.actions import OWN_ACTIONS, kind_of
from ringfence.policy.canonical import WORKSPACE
from ringfence.policy.learn import Used, as_yaml, learn
from ringfence.policy.shell import redirections
from ringfence.policy.types import Verdict
from ringfence.sandbox.points import PointManifest
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.syscalls.base import Question
from ringfence.syscalls.codec import decode_arguments
from ringfence.syscalls.errors import SyscallError

_ABSENT = "absent"
_PLANNED = frozenset(
    {"sql.read", "sql.write", "state.transaction", "mcp.call", "mcp.read", "mcp.prompt", "mcp.complete"}
)
"""Calls whose questions follow from their arguments alone, and are not the one that their row names."""

_REFUSED = frozenset({"denied", "refused"})


async def learned(kernel: Kernel, name: str, *, denied: bool) -> dict[str, Any]:
    """The smallest rules for what an agent did, on its present branch and those that it left.

    Raises:
        Problem: no such agent.
    """
    thread = await kernel.thread(name)
    intents: dict[int, StoredRow] = {}
    used: dict[Used, None] = {}
    async for row in kernel.core.store.audit(thread.key):
        if (
            row.lane == OPERATOR_LANE
            or row.action in OWN_ACTIONS
            or row.phase not in (Phase.INTENT, Phase.OUTCOME)
        ):
            continue
        if row.phase is Phase.INTENT:
            intents[row.step] = row
            continue
        intent = intents.pop(row.step, None)
        questions = await asyncio.to_thread(_all_questions, kernel, thread, row, intent)
        used |= dict.fromkeys(questions)
    rights = await thread.current_rights()

    def denies(one: Used) -> str:
        # Facts that nobody looks at here count as matched, but only where a rule or a condition says something.
        decision = rights.decide(Question(action=one.action, resource=one.resource), "WRITE")
        return decision.reason if decision.verdict is Verdict.DENY and decision.rules else ""

    found = await asyncio.to_thread(learn, used, denies)
    return {
        "agent": thread.id,
        "allow": list(found.allow),
        "ask": list(found.ask),
        "denied": list(found.denied),
        "barred": [{"rule": rule, "by": why} for rule, why in found.barred],
        "uncovered": [{"action": u.action, "resource": u.resource} for u in found.uncovered],
        "yaml": as_yaml(found, denied=denied),
    }


def _all_questions(kernel: Kernel, thread: Thread, row: StoredRow, intent: StoredRow | None) -> list[Used]:
    return list(_questions(kernel, thread, row, intent))


def _questions(kernel: Kernel, thread: Thread, row: StoredRow, intent: StoredRow | None) -> Iterator[Used]:
    """What one call asked of policy, and what it got."""
    if row.action not in kernel.core.table or not row.verdict:
        return
    verdict = Verdict(row.verdict)
    if row.outcome in _REFUSED and verdict is not Verdict.DENY and not _was_denied(row):
        return  # never decided against: a budget or a point was in the way
    if b'"because":' in row.body and verdict is Verdict.DENY:
        return  # a condition denied it: no rule is missing
    verdict = Verdict.DENY if row.outcome == "denied" and verdict is not Verdict.ASK else verdict
    manifest = _manifest(thread, row)
    if row.action == "exec.run":
        words = _words(row, intent)
        if words:
            yield Used(action=row.action, resource=words, verdict=verdict)
            # What it wrote stands in its point; what it was denied to write, or was to read, in its words alone.
            opened = redirections(words, _cwd(row, intent), WORKSPACE)
            wanted = opened if verdict is Verdict.DENY else [one for one in opened if one[0] == "fs.read"]
            yield from (Used(action=action, resource=path, verdict=verdict) for action, path in wanted)
    elif row.action in _PLANNED:
        yield from _planned(kernel, thread, row, intent, verdict)
    elif row.resource or kind_of(row.action) == "none":
        yield Used(action=row.action, resource=row.resource, verdict=verdict)
    if manifest is not None:
        yield from _changed(row, manifest, verdict)


def _was_denied(row: StoredRow) -> bool:
    return row.outcome == "denied"


def _arguments(row: StoredRow, intent: StoredRow | None) -> Any:
    for one in (intent, row):
        found = None if one is None else json.loads(one.body).get("arguments")
        if found is not None:
            return found
    return None


def _words(row: StoredRow, intent: StoredRow | None) -> tuple[str, ...]:
    arguments: dict[str, Any] = _arguments(row, intent) or {}
    words: list[Any] = arguments.get("argv") or []
    return tuple(str(word) for word in words)


def _cwd(row: StoredRow, intent: StoredRow | None) -> str:
    arguments: dict[str, Any] = _arguments(row, intent) or {}
    return posixpath.normpath(posixpath.join(WORKSPACE, str(arguments.get("cwd") or "")))


def _planned(
    kernel: Kernel, thread: Thread, row: StoredRow, intent: StoredRow | None, verdict: Verdict
) -> Iterator[Used]:
    arguments = _arguments(row, intent)
    known = False
    if arguments is not None:
        table = kernel.core.table[row.action]
        try:
            decoded, _, _ = decode_arguments(table, json.dumps(arguments).encode())
            for question in table.body.plan(decoded, thread.environment).questions:
                known = True
                yield Used(action=question.action, resource=question.resource, verdict=verdict)
        except SyscallError:
            # The resource may be gone by now; the row names what was shown.
            pass
    if not known and row.resource and row.action.startswith("sql."):
        yield Used(action=row.action, resource=row.resource, verdict=verdict)


def _manifest(thread: Thread, row: StoredRow) -> PointManifest | None:
    """The point of a call that changed more paths than the one that it names."""
    point = point_of(row) if row.action in ("exec.run", "workspace.commit", "fs.delete", "fs.move") else None
    if point is None:
        return None
    try:
        return thread.environment.snapshots.load(point["id"])
    except SnapshotError:
        return None


def _changed(row: StoredRow, manifest: PointManifest, verdict: Verdict) -> Iterator[Used]:
    """What a call asked about the paths that it changed."""
    after = {path.path: manifest.expect.get(path.path, path.before) for path in manifest.paths}
    changed = [path for path in manifest.paths if after[path.path] != path.before]
    gone = [path.path for path in changed if after[path.path] == _ABSENT]
    made = [path.path for path in changed if after[path.path] != _ABSENT]
    if row.action == "fs.move":
        made = _moved_to(row.resource, gone, made)
        for path in gone:
            yield Used(action="fs.move", resource=path, verdict=verdict)
            yield Used(action="fs.read", resource=path, verdict=verdict)
        gone = []
    for action, paths in (("fs.delete", gone), ("fs.write", made)):
        for path in paths:
            yield Used(action=action, resource=path, verdict=verdict)


def _moved_to(source: str, gone: Sequence[str], made: Sequence[str]) -> list[str]:
    """Where each path went: the parents that a move made on its way are nobody's question."""
    new = set(made)
    for target in sorted(new, key=len, reverse=True):
        images = [target + path[len(source) :] for path in gone]
        if new.issuperset(images):
            return images
    return list(made)
