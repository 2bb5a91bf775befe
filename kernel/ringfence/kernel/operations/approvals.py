"""The inbox of parked calls: list and show."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from ringfence.kernel.asking import PROGRAM
from ringfence.kernel.journal.store_approvals import approval_key
from ringfence.kernel.journal.types import ApprovalRecord
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.problems import Problem
from ringfence.kernel.rights import DOUBTFUL, IRREVERSIBLE, STRAYED, Rights
from ringfence.syscalls.codec import decode_arguments
from ringfence.syscalls.errors import SyscallError


async def approvals(kernel: Kernel, name: str, *, everything: bool) -> dict[str, Any]:
    """Parked calls, oldest first."""
    agent = (await kernel.record(name, removed=True)).key if name else None
    records = await kernel.core.store.approvals(agent, everything=everything)
    names = {record.key: record for record in await kernel.core.store.agents(all=True)}
    found = [
        document(record, names[record.agent].id, names[record.agent].name)
        for record in reversed(records)
        if record.agent in names
    ]
    return {"approvals": found}


def document(record: ApprovalRecord, agent: str, name: str) -> dict[str, Any]:
    """One approval as scripts read it."""
    age = (record.decided_at or datetime.now(UTC)) - record.created_at
    return {
        "id": record.id,
        "agent": agent,
        "name": name,
        "step": record.step,
        "action": record.action,
        "resource": record.resource,
        "effect": record.effect,
        "arguments": msgspec.json.decode(record.arguments),
        "edited": None if record.edited is None else msgspec.json.decode(record.edited),
        "rules": list(dict.fromkeys(str(ask[0]) for ask in record.asks)),
        "detail": dict(record.detail),
        "state": record.state,
        "age_ms": int(age.total_seconds() * 1000),
        "created_at": rfc3339(record.created_at),
        "expires_at": rfc3339(record.expires_at),
        "decided_at": rfc3339(record.decided_at),
        "decided_by": record.decided_by,
        "reason": record.reason or None,
        "good_until": rfc3339(record.good_until),
        "people": record.people,
        "approved_by": [vote["by"] for vote in record.living],
        "not_by": record.not_by or None,
        "votes": [_vote(vote) for vote in record.votes],
        "proposed": proposed(record),
        "digest": digest_of(record),
    }


def _vote(vote: Mapping[str, Any]) -> dict[str, Any]:
    edited = vote.get("edited")
    return {
        "by": vote["by"],
        "at": vote["at"],
        "verdict": vote["verdict"],
        "edited": None if edited is None else msgspec.json.decode(edited),
        "reason": vote.get("reason") or None,
        "for_ms": vote.get("for_ms"),
        "voided_by": vote.get("void"),
    }


def proposed(record: ApprovalRecord) -> Any:
    """Edited arguments that some people approve of, while others have to; None: the agent's own."""
    edited = record.living[0].get("edited") if record.living else None
    return None if edited is None else msgspec.json.decode(edited)


def digest_of(record: ApprovalRecord) -> str:
    """SHA-256 of the arguments that would run if one more approved: what people speak of when they say yes."""
    edited = record.living[0].get("edited") if record.living else record.edited
    return record.digest.hex() if edited is None else hashlib.sha256(str(edited).encode()).hexdigest()


async def show(kernel: Kernel, approval_id: str) -> dict[str, Any]:
    """One of them with everything that is to be decided."""
    record = await find(kernel, approval_id)
    agent = await kernel.core.store.agent_by_key(record.agent)
    shown = document(record, "" if agent is None else agent.id, "" if agent is None else agent.name)
    shown["readable"] = _readable(kernel, record, record.edited or record.arguments)
    if record.living and record.living[0].get("edited") is not None:
        # What one more approval would let run.
        shown["proposed_readable"] = _readable(kernel, record, str(record.living[0]["edited"]))
    if agent is not None:
        shown["why"] = await _why(kernel, record, agent.id)
    return shown


def _readable(kernel: Kernel, record: ApprovalRecord, text: str) -> dict[str, Any] | None:
    """The arguments with bytes as text where they are some; None where the arguments have no bytes."""
    row = kernel.core.table.get(record.action)
    if row is None:
        return None
    try:
        arguments, _, _ = decode_arguments(row, text.encode())
    except SyscallError:
        return None
    fields: dict[str, Any] = msgspec.structs.asdict(arguments)
    if not any(isinstance(value, bytes) for value in fields.values()):
        return None
    given = json.loads(text)
    return {name: _text(fields[name]) for name in given}


def _text(value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"({len(value)} bytes that are no text)"


async def _why(kernel: Kernel, record: ApprovalRecord, agent: str) -> list[str]:
    """The texts of the rules that ask."""
    thread = await kernel.thread(agent)
    texts: dict[str, str] = {}
    one: Rights | None = thread.rights
    while one is not None:
        head = "" if one is thread.rights else f"{one.agent}/"
        told = [*one.policy.rules, *one.policy.conditions]
        texts |= {head + r.id: f"{head}{r.id} '{r.text}' of the {r.origin}" for r in told}
        one = one.parent
    rules = dict.fromkeys(str(ask[0]) for ask in record.asks)
    texts |= {PROGRAM: "the program itself", IRREVERSIBLE: "it destroys, and can't be undone"}
    texts[STRAYED] = (
        "the program took another way after its restart, and this can't be taken for what it did before"
    )
    texts[DOUBTFUL] = "its server defines the tool in another way than before"
    if record.action == "a2a.send":
        texts[DOUBTFUL] = "the agent shows another card than before"
    return [texts.get(rule, rule) for rule in rules]


async def find(kernel: Kernel, approval_id: str) -> ApprovalRecord:
    """One by its id.

    Raises:
        Problem: there is none.
    """
    key = approval_key(approval_id)
    record = None if key is None else await kernel.core.store.approval(key)
    if record is None:
        raise Problem(
            f"there is no approval `{approval_id[:80]}` and never was one; see: ringfence approvals --all",
            exit_code=4,
            reason="NoSuchApproval",
        )
    return record
