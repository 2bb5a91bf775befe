"""The inbox of parked calls: list, show, approve, deny."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
from ringfence.kernel.asking import PROGRAM
from ringfence.kernel.journal.store_approvals import approval_key
from ringfence.kernel.journal.types import ApprovalRecord
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.operations.rights import look_again
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.rights import Rights
from ringfence.policy.types import Verdict
from ringfence.syscalls.codec import decode_arguments
from ringfence.syscalls.errors import SyscallError

REASON_CHARS_MAX = 2000
STANDING_MS_MAX = 30 * 86_400_000
"""Longest that an approval holds for the same call again."""


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
    }


async def show(kernel: Kernel, approval_id: str) -> dict[str, Any]:
    """One of them with everything that is to be decided."""
    record = await _record(kernel, approval_id)
    agent = await kernel.core.store.agent_by_key(record.agent)
    shown = document(record, "" if agent is None else agent.id, "" if agent is None else agent.name)
    shown["readable"] = _readable(kernel, record)
    if agent is not None:
        shown["why"] = await _why(kernel, record, agent.id)
    return shown


def _readable(kernel: Kernel, record: ApprovalRecord) -> dict[str, Any] | None:
    """The arguments with bytes as text where they are some; None where the arguments have no bytes."""
    row = kernel.core.table.get(record.action)
    if row is None:
        return None
    try:
        arguments, _, _ = decode_arguments(row, (record.edited or record.arguments).encode())
    except SyscallError:
        return None
    fields: dict[str, Any] = msgspec.structs.asdict(arguments)
    if not any(isinstance(value, bytes) for value in fields.values()):
        return None
    given = json.loads(record.edited or record.arguments)
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
    return [texts.get(rule, "the program itself" if rule == PROGRAM else rule) for rule in rules]


async def approve(
    kernel: Kernel, approval_id: str, arguments: bytes, reason: str, for_ms: int, operator: str
) -> dict[str, Any]:
    """Let a parked call run, once; with `for_ms` also when the same agent makes it again within that time."""
    record = await _waiting(kernel, approval_id)
    if for_ms:
        _may_stand(record, arguments, for_ms)
    edited = await _edited(kernel, record, arguments) if arguments else None
    return await _decide(kernel, record, "approved", operator, reason, edited, for_ms or None)


def _may_stand(record: ApprovalRecord, arguments: bytes, for_ms: int) -> None:
    """Refuse an approval for longer than once where it would not be for the same call, or for no call that anybody saw."""
    if arguments:
        raise bad_usage("edited arguments are approved once; approve without --edit, or without --for")
    if any(ask[0] == PROGRAM for ask in record.asks):
        raise bad_usage("the program asks a person itself, and each time anew; approve without --for")
    if for_ms > STANDING_MS_MAX:
        raise bad_usage(
            f"an approval holds for {STANDING_MS_MAX // 86_400_000} days at most; change the rule instead"
        )


async def end(kernel: Kernel, approval_id: str, reason: str, operator: str) -> dict[str, Any]:
    """Let an approval hold for no further call; answers when no later call on any kernel runs under it."""
    record = await _record(kernel, approval_id)
    ended = await kernel.core.store.end_standing_approval(record.key)
    if ended is None:
        raise conflict(
            f"approval {record.id} holds for no further call; see: ringfence approvals show {record.id}"
        )
    agent = await kernel.core.store.agent_by_key(record.agent)
    owner = "" if agent is None else agent.id
    affected = [] if agent is None else await look_again(kernel, agent)
    await kernel.core.operator_event(
        "operator.approval_end", owner, operator=operator, approval=record.id, reason=reason
    )
    return {"id": record.id, "agent": owner, "good_until": rfc3339(ended.good_until), "affected": affected}


async def deny(kernel: Kernel, approval_id: str, reason: str, operator: str) -> dict[str, Any]:
    """Refuse a parked call; its agent is told why."""
    if not reason.strip():
        raise bad_usage("the reason is empty; the agent and whoever audits it are told: --reason TEXT")
    return await _decide(kernel, await _waiting(kernel, approval_id), "denied", operator, reason, None)


async def _decide(
    kernel: Kernel,
    record: ApprovalRecord,
    state: str,
    operator: str,
    reason: str,
    edited: str | None,
    for_ms: int | None = None,
) -> dict[str, Any]:
    if len(reason) > REASON_CHARS_MAX:
        raise bad_usage(f"the reason has {len(reason)} characters; the limit is {REASON_CHARS_MAX}")
    agent = await kernel.core.store.agent_by_key(record.agent)
    owner = "" if agent is None else agent.id
    # INVARIANT: on record before it counts: a decision that nobody can find again would be worse than one made twice.
    await kernel.core.operator_event(
        f"operator.{'approve' if state == 'approved' else 'deny'}",
        owner,
        operator=operator,
        approval=record.id,
        step=record.step,
        edited=edited is not None,
        reason=reason,
        **({} if for_ms is None else {"for_ms": for_ms}),
    )
    decided = await kernel.core.store.decide_approval(record.key, state, operator, reason, edited, for_ms)
    if decided is None:
        raise _decided_before(await _record(kernel, record.id))
    # Its own kernel may be this one: no need to wait for the notification.
    kernel.core.approvals.notice(record.agent)
    until = rfc3339(decided.good_until)
    return {"id": record.id, "agent": owner, "step": record.step, "state": state, "good_until": until}


async def _edited(kernel: Kernel, record: ApprovalRecord, raw: bytes) -> str:
    """Canonical arguments that an operator gives in place of the agent's; refused where they can't be called at all."""
    row = kernel.core.table.get(record.action)
    if row is None:
        raise conflict(f"this release has no syscall `{record.action}`; deny {record.id}")
    agent = await kernel.core.store.agent_by_key(record.agent)
    if agent is None:
        raise conflict(f"the agent of {record.id} is gone")
    thread = await kernel.thread(agent.id)
    try:
        arguments, canonical, _ = decode_arguments(row, raw)
        plan = row.body.plan(arguments, thread.environment)
    except SyscallError as error:
        raise bad_usage(f"the edited arguments are refused: {error.message}") from error
    judgement = thread.rights.judge(tuple(plan.questions), record.effect)
    if judgement.verdict is Verdict.DENY:
        text = f"the edited call is denied: {judgement.decision.reason}"
        raise Problem(text, exit_code=3, reason="Denied")
    return canonical.decode()


async def _record(kernel: Kernel, approval_id: str) -> ApprovalRecord:
    key = approval_key(approval_id)
    record = None if key is None else await kernel.core.store.approval(key)
    if record is None:
        raise Problem(
            f"there is no approval `{approval_id[:80]}` and never was one; see: ringfence approvals --all",
            exit_code=4,
            reason="NoSuchApproval",
        )
    return record


async def _waiting(kernel: Kernel, approval_id: str) -> ApprovalRecord:
    record = await _record(kernel, approval_id)
    if record.state != "pending":
        raise _decided_before(record)
    if record.expires_at <= datetime.now(UTC):
        raise conflict(
            f"approval {record.id} ran out at {rfc3339(record.expires_at)}; the agent has to ask anew"
        )
    return record


def _decided_before(record: ApprovalRecord) -> Problem:
    """Why nobody can decide it any more."""
    at = rfc3339(record.decided_at)
    texts = {
        "approved": f"already approved by {record.decided_by} at {at}",
        "denied": f"already denied by {record.decided_by} at {at}: {record.reason}",
        "expired": f"it ran out at {rfc3339(record.expires_at)}; the agent has to ask anew",
        "voided": f"it was closed at {at}: {record.reason}",
    }
    default = f"it ran out at {rfc3339(record.expires_at)}; the agent has to ask anew"
    return conflict(f"approval {record.id}: {texts.get(record.state, default)}")
