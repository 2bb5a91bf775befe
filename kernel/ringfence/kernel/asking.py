"""What a person is shown about a call that asks, and how its target stood then."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any, cast

import msgspec
from ringfence.kernel.provenance import provenance
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls.errors import SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.journal.types import ApprovalRecord

DIFF_BYTES_MAX = 256 << 10
LISTED_MAX = 256
"""Paths that an approval names and whose versions it is bound to; a longer list is told by its number."""

STATE = "state "
PROGRAM = "program"
"""Stands for the rule where the program itself asks."""
_VERSIONED = frozenset({"fs.write", "fs.append", "fs.move", "fs.delete"})


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a body itself asks a person, beside the rules.

    Attributes:
        question: in the program's words; empty: only rules ask.
        detail: what the person is shown.
    """

    question: str = ""
    detail: Mapping[str, Any] = {}


def storable(value: Any) -> Any:
    """The same JSON value with a visible sign for NUL, which the database can't hold."""
    if isinstance(value, str):
        return value.replace("\0", "\N{SYMBOL FOR NULL}")
    if isinstance(value, Mapping):
        named = cast("Mapping[str, Any]", value)
        return {storable(name): storable(inner) for name, inner in named.items()}
    if isinstance(value, list | tuple):
        listed = cast("Sequence[Any]", value)
        return [storable(inner) for inner in listed]
    return value


async def versions_of(flight: Flight, named: Sequence[str] | None = None) -> dict[str, str]:
    """How the target of a call stands: fingerprints of paths, versions of state keys. Empty where it has none.

    Args:
        flight: the call.
        named: look at these instead of what the call's questions name.
    """
    env = flight.env
    if named is None:
        named = _targets(flight)
    paths = [name for name in named if not name.startswith(STATE)]
    found = await asyncio.to_thread(_fingerprints, flight, paths)
    for name in named:
        if name.startswith(STATE):
            value = await env.state.get(name.removeprefix(STATE))
            found[name] = str(value.version)
    return found


def _targets(flight: Flight) -> list[str]:
    action = flight.row.action
    if action in _VERSIONED:
        return [str(q.resource) for q in flight.questions[:LISTED_MAX]]
    if action in ("state.put", "state.delete"):
        return [STATE + flight.plan.resource]
    if action == "state.transaction":
        return [STATE + str(q.resource) for q in flight.questions[:LISTED_MAX]]
    return []


def _fingerprints(flight: Flight, paths: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        try:
            found[path] = flight.env.workspace.fingerprint(path)
        except WorkspaceError as error:
            found[path] = f"unreadable: {error.reason}"
    return found


async def describe(flight: Flight, asked: Asked | None) -> dict[str, Any]:
    """What the inbox shows: the program's own question, how much is touched, a diff where there is one."""
    detail: dict[str, Any] = {} if asked is None else dict(asked.detail)
    if asked is not None and asked.question:
        detail["question"] = asked.question
    if len(flight.questions) > 1:
        # Of a command the body has counted what it changed; the command itself is a question too.
        detail.setdefault("touches", len(flight.questions))
        detail["paths"] = [_shown(q.resource) for q in flight.questions[:LISTED_MAX]]
    if flight.row.action in ("fs.write", "fs.append") and "diff" not in detail:
        diff = await asyncio.to_thread(_diff, flight)
        if diff:
            detail["diff"] = diff
    if flight.plan.no_return:
        detail["undo"] = flight.plan.no_return
    if flight.plan.doubt is not None and await flight.plan.doubt.why():
        detail |= flight.plan.doubt.detail()
    judgement, thread = flight.judgement, flight.thread
    if judgement is not None and judgement.facts:
        detail["because"] = list(judgement.facts)
    if thread.facts.taint is not None:
        detail["tainted"] = thread.facts.taint.text
    sources = await provenance(flight.core, thread.key, thread.lineage.parts, flight.step, flight.canonical)
    if sources:
        detail["provenance"] = sources
    return detail


def _shown(resource: Any) -> str:
    return resource if isinstance(resource, str) else " ".join(resource)


def _diff(flight: Flight) -> str:
    """A unified diff of what a write would do; empty where a side is no short text."""
    path = flight.plan.resource
    new: bytes = flight.arguments.data
    try:
        try:
            old = flight.env.workspace.read(path).data
        except WorkspaceError as error:
            if error.reason != "NoSuchResource":
                return ""
            old = b""
        if flight.row.action == "fs.append":
            new = old + new
        if max(len(old), len(new)) > DIFF_BYTES_MAX:
            return ""
        sides = [old.decode().splitlines(keepends=True), new.decode().splitlines(keepends=True)]
    except (UnicodeDecodeError, WorkspaceError, SyscallError):
        return ""
    return "".join(difflib.unified_diff(sides[0], sides[1], f"now{path}", f"then{path}"))


def evidence(record: ApprovalRecord) -> dict[str, Any]:
    """What a journal body says about the approval that a call ran under."""
    return {
        "id": record.id,
        "by": record.decided_by,
        "at": None if record.decided_at is None else record.decided_at.astimezone(UTC).isoformat(),
        "edited": record.edited is not None,
        "people": [vote["by"] for vote in record.living],
    }
