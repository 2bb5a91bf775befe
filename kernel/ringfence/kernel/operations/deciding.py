"""What people decide about parked calls: approve, deny, end. The operators' commands and the callback both come here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ringfence.kernel.asking import PROGRAM
from ringfence.kernel.journal.types import ApprovalRecord
from ringfence.kernel.operations.approvals import digest_of, find
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.operations.rights import look_again
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.policy.types import Verdict
from ringfence.syscalls.codec import decode_arguments
from ringfence.syscalls.errors import SyscallError

REASON_CHARS_MAX = 2000
STANDING_MS_MAX = 30 * 86_400_000
"""Longest that an approval holds for the same call again."""


async def approve(
    kernel: Kernel,
    approval_id: str,
    arguments: bytes,
    reason: str,
    for_ms: int,
    operator: str,
    *,
    message: str = "",
    digest: str = "",
) -> dict[str, Any]:
    """Let a parked call run, once; with `for_ms` also when the same agent makes it again within that time.

    Where several people are needed, each approves certain arguments: whoever approves others takes the force from what was
    approved before.

    Args:
        kernel: this one.
        approval_id: as `approvals` lists it.
        arguments: JSON to run instead; empty: the agent's own.
        reason: kept with it.
        for_ms: for how long it holds; 0: once.
        operator: the account or the person that decides.
        message: id of the callback that says so; empty: a command does.
        digest: of the arguments that the person has seen, the agent's or those that others proposed; empty: not said.

    Raises:
        Problem: it is not this person's to approve, or nobody's any more.
    """
    record = await _waiting(kernel, approval_id)
    person = kernel.person_of(operator)
    if record.not_by and kernel.person_of(record.not_by) == person:
        alias = "" if record.not_by == person else f", as `{record.not_by}`,"
        text = f"`{person}`{alias} submitted the agent of {record.id}, and another person has to approve its calls"
        raise Problem(text, exit_code=3, reason="NotYours")
    if arguments and digest:
        raise bad_usage("a digest is of arguments that are there already; give it, or --edit, and not both")
    if for_ms:
        _may_stand(record, arguments, for_ms)
    edited = await _edited(kernel, record, arguments) if arguments else _seconded(record, digest)
    if edited == record.arguments:
        edited = None
    vote = _vote(person, "approved", reason, message) | {"edited": edited}
    if for_ms:
        if edited is not None:
            raise bad_usage("edited arguments are approved once; approve without --for")
        vote["for_ms"] = for_ms
    _count_once(record, vote)
    owner = await _on_record(kernel, record, vote, operator)
    voted = await kernel.core.store.vote_approval(record.key, vote)
    if voted is None:
        raise _not_counted(await find(kernel, record.id), vote)
    kernel.core.approvals.notice(record.agent)
    approving = [v["by"] for v in voted.living]
    return {
        "id": record.id,
        "agent": owner,
        "step": record.step,
        "state": voted.state,
        "good_until": rfc3339(voted.good_until),
        "people": voted.people,
        "approved_by": approving,
        "voided": [v["by"] for v in record.living if v["by"] not in approving],
    }


def _vote(person: str, verdict: str, reason: str, message: str) -> dict[str, Any]:
    if len(reason) > REASON_CHARS_MAX:
        raise bad_usage(f"the reason has {len(reason)} characters; the limit is {REASON_CHARS_MAX}")
    if "\0" in reason or any("\ud800" <= letter <= "\udfff" for letter in reason):
        raise bad_usage("the reason has a character that can't be kept; write it without")
    said = {"by": person, "at": rfc3339(datetime.now(UTC)), "verdict": verdict, "reason": reason}
    return said | ({"message": message} if message else {})


def _seconded(record: ApprovalRecord, digest: str) -> str | None:
    """The arguments that a person has seen, by their digest: None: the agent's own."""
    if not digest or digest == record.digest.hex():
        return None
    if digest != digest_of(record):
        raise conflict(f"{record.id} is about other arguments than those of this digest; look at it again")
    return str(record.living[0]["edited"])


def _count_once(record: ApprovalRecord, vote: dict[str, Any]) -> None:
    """Refuse what a person said before: nobody counts twice, and no message does."""
    if vote.get("message") and any(v.get("message") == vote["message"] for v in record.votes):
        raise Problem(
            f"this message about {record.id} was had before; sign a new one", exit_code=5, reason="Replayed"
        )
    again = next(
        (v for v in record.living if v["by"] == vote["by"] and v.get("edited") == vote.get("edited")), None
    )
    if vote["verdict"] == "approved" and again is not None:
        missing = record.people - len(record.living)
        text = f"{vote['by']} approved {record.id} already at {again['at']} and counts once; {still(missing)}"
        raise conflict(text)


def still(missing: int) -> str:
    """Who is waited for, for people."""
    return "one more person has to approve" if missing == 1 else f"{missing} more people have to approve"


async def _on_record(kernel: Kernel, record: ApprovalRecord, vote: dict[str, Any], operator: str) -> str:
    """Put it on record before it counts; gives the agent's id."""
    agent = await kernel.core.store.agent_by_key(record.agent)
    owner = "" if agent is None else agent.id
    more = {name: vote[name] for name in ("for_ms", "message") if name in vote}
    if vote["by"] != operator:
        more["account"] = operator
    # INVARIANT: on record before it counts: a decision that nobody can find again would be worse than one made twice.
    await kernel.core.operator_event(
        f"operator.{'approve' if vote['verdict'] == 'approved' else 'deny'}",
        owner,
        operator=vote["by"],
        approval=record.id,
        step=record.step,
        edited=vote.get("edited") is not None,
        reason=vote["reason"],
        people=record.people,
        **more,
    )
    return owner


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
    record = await find(kernel, approval_id)
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


async def deny(
    kernel: Kernel, approval_id: str, reason: str, operator: str, *, message: str = ""
) -> dict[str, Any]:
    """Refuse a parked call; its agent is told why. One person is enough, whoever approved before."""
    if not reason.strip():
        raise bad_usage("the reason is empty; the agent and whoever audits it are told: --reason TEXT")
    record = await _waiting(kernel, approval_id)
    person = kernel.person_of(operator)
    vote = _vote(person, "denied", reason, message)
    _count_once(record, vote)
    owner = await _on_record(kernel, record, vote, operator)
    if await kernel.core.store.decide_approval(record.key, "denied", person, reason, vote) is None:
        raise _not_counted(await find(kernel, record.id), vote)
    # Its own kernel may be this one: no need to wait for the notification.
    kernel.core.approvals.notice(record.agent)
    return {"id": record.id, "agent": owner, "step": record.step, "state": "denied", "good_until": None}


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
        start = f"start from `arguments` of: ringfence approvals show {record.id} --json (bytes are in base64 there)"
        raise bad_usage(f"the edited arguments are refused: {error.message}; {start}") from error
    judgement = thread.rights.judge((*plan.questions, *plan.foreseen), record.effect)
    if judgement.verdict is Verdict.DENY:
        text = f"the edited call is denied: {judgement.decision.reason}"
        raise Problem(text, exit_code=3, reason="Denied")
    return canonical.decode()


async def _waiting(kernel: Kernel, approval_id: str) -> ApprovalRecord:
    record = await find(kernel, approval_id)
    if record.state != "pending" or record.expires_at <= datetime.now(UTC):
        raise _decided_before(record)
    return record


def _not_counted(record: ApprovalRecord, vote: dict[str, Any]) -> Problem:
    """Why what a person said did not count, after all that was looked at before it was said."""
    if record.state == "pending" and record.expires_at > datetime.now(UTC):
        try:
            _count_once(record, vote)
        except Problem as problem:
            return problem
    return _decided_before(record)


def _decided_before(record: ApprovalRecord) -> Problem:
    """Why nobody can decide it any more."""
    at = rfc3339(record.decided_at)
    texts = {
        "approved": f"already approved by {record.decided_by} at {at}",
        "denied": f"already denied by {record.decided_by} at {at}: {record.reason}",
        "voided": f"it was closed at {at}: {record.reason}",
    }
    default = f"it ran out at {rfc3339(record.expires_at)}; the agent has to ask anew"
    return conflict(f"approval {record.id}: {texts.get(record.state, default)}")
