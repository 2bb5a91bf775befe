"""What operators do with permissions."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from ringfence.kernel.facts import Marks, marks_of
from ringfence.kernel.journal.types import AgentKey, AgentRecord, GrantRecord, Phase, StoredRow
from ringfence.kernel.operations.kernel import Kernel, rfc3339
from ringfence.kernel.ownership import parsed
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.provenance import provenance
from ringfence.kernel.replay import Lineage
from ringfence.kernel.revocation import apply_epoch
from ringfence.kernel.rights import DOUBTFUL, IRREVERSIBLE, STRAYED
from ringfence.kernel.thread import Thread
from ringfence.kernel.weighing import facts_for
from ringfence.policy.actions import kind_of, row_of
from ringfence.policy.canonical import canonical_path, canonical_url
from ringfence.policy.kernel_file import conditions_of
from ringfence.policy.manifest_types import Manifest
from ringfence.policy.problems import ManifestError
from ringfence.policy.rules import parse_rule, select_rules
from ringfence.policy.types import Resource, Verdict
from ringfence.syscalls.base import Question
from ringfence.syscalls.codec import decode_arguments
from ringfence.syscalls.errors import SyscallError
from ringfence.syscalls.http_common import no_return

ACK_S = 15.0
_GRANT_ID = re.compile(r"g[0-9]+")


async def grant(
    kernel: Kernel,
    name: str,
    rule_text: str,
    *,
    expires_ms: int,
    uses: int,
    operator: str,
    deny: bool = False,
) -> dict[str, Any]:
    """Add a permission, or a deny: answers when no later call on any kernel gets past it.

    A deny of the manifest, of the operator's ceilings or of this kind wins over every permission.
    """
    record = await kernel.record(name)
    if deny and uses:
        raise bad_usage("a deny isn't used up; leave `--uses` out, or say how long it holds with `--expires`")
    try:
        rule = parse_rule(rule_text, Verdict.DENY if deny else Verdict.ALLOW)
    except ManifestError as error:
        raise bad_usage(f"the rule `{rule_text}` can't be used: {error}", "BadRule") from error
    expires = datetime.now(UTC) + timedelta(milliseconds=expires_ms) if expires_ms else None
    granted, epoch = await kernel.core.store.add_grant(
        record.key, rule.text, rule.verdict.value, operator, expires, uses or None
    )
    affected = await _make_known(kernel, record.key, epoch)
    affected += await _descendants_know(kernel, record.key)
    await kernel.core.operator_event(
        "operator.grant",
        record.id,
        operator=operator,
        grant=granted.id,
        verdict=granted.verdict,
        rule=rule.text,
        epoch=epoch,
        affected=affected,
    )
    return {
        "id": granted.id,
        "rule": granted.rule,
        "verdict": granted.verdict,
        "expires_at": rfc3339(granted.expires_at),
        "uses_left": granted.uses_left,
        "epoch": epoch,
        "affected": affected,
    }


def _permissions(grants: Sequence[GrantRecord]) -> list[GrantRecord]:
    # INVARIANT: who takes permissions away, all or some, takes no deny away with them.
    return [g for g in grants if g.verdict != Verdict.DENY]


def _chosen(grants: list[GrantRecord], wanted: str) -> list[GrantRecord]:
    """Grants a revocation names: by id, by the same rule, or by an action alone. A deny only by its id."""
    if _GRANT_ID.fullmatch(wanted):
        return [g for g in grants if g.id == wanted]
    grants = _permissions(grants)
    try:
        rules = select_rules(wanted, [parse_rule(g.rule, g.verdict, rule_id=g.id) for g in grants])
    except ManifestError as error:
        raise bad_usage(
            f"`{wanted}` names no permission: {error}; see: ringfence show AGENT", "BadRule"
        ) from error
    chosen = {rule.id for rule in rules}
    return [g for g in grants if g.id in chosen]


def canonical_resource(action: str, resource: str) -> Resource:
    """A resource as people type it, as policy wants it."""
    kind = kind_of(action)
    if kind == "path":
        return canonical_path(resource)
    if kind == "url":
        return canonical_url(resource)
    return tuple(shlex.split(resource)) if kind == "command" else resource


async def revoke(
    kernel: Kernel, name: str, wanted: str, *, everything: bool, purge: bool, operator: str
) -> dict[str, Any]:
    """Take permissions away; answers when no later call on any kernel can use them."""
    started = time.monotonic()
    record = await kernel.record(name)
    grants = await kernel.core.store.grants(record.key)
    if everything == bool(wanted):
        raise bad_usage("name one rule or grant, or say --all; see: ringfence show AGENT")
    chosen = _permissions(grants) if everything else _chosen(grants, wanted)
    if not chosen and not everything:
        held = "; ".join(f"{g.id} {g.rule}" for g in grants) or "none"
        text = f"`{record.id}` has no permission `{wanted}`; it has: {held}; name one of these"
        raise Problem(text, exit_code=4, reason="NoSuchGrant")
    epoch, revoked = await kernel.core.store.revoke(record.key, [g.id for g in chosen])
    if purge:
        await _purge(kernel, record, [g.id for g in revoked])
    affected = await _make_known(kernel, record.key, epoch)
    affected += await _descendants_know(kernel, record.key)
    await kernel.core.operator_event(
        "operator.revoke",
        record.id,
        operator=operator,
        grants=[g.id for g in revoked],
        rules=[g.rule for g in revoked],
        epoch=epoch,
        purge=purge,
        affected=affected,
    )
    return {
        "epoch": epoch,
        "revoked": [{"id": g.id, "rule": g.rule} for g in revoked],
        "affected": affected,
        "elapsed_ms": round((time.monotonic() - started) * 1000, 3),
    }


async def look_again(kernel: Kernel, record: AgentRecord) -> list[dict[str, Any]]:
    """Have every call of an agent and its descendants decided again; answers when no later one rests on what was before.

    Returns:
        The calls that this ended or found under way.
    """
    epoch, _ = await kernel.core.store.revoke(record.key, [])
    return [*await _make_known(kernel, record.key, epoch), *await _descendants_know(kernel, record.key)]


async def _purge(kernel: Kernel, record: AgentRecord, grants: list[str]) -> None:
    """Withhold what was recorded under grants, from the agent and from all whose rights they bounded."""
    threads = [await kernel.thread(record.id)]
    for kin in await kernel.core.store.descendants(record.key):
        below = await kernel.core.store.agent_by_key(kin.child)
        if below is not None:
            threads.append(await kernel.thread(below.id))
    for thread in threads:
        thread.purged = thread.purged | frozenset(grants)
        await kernel.core.event(thread.key, "revoke.purge", thread.id, grants=grants)


async def _descendants_know(kernel: Kernel, key: AgentKey) -> list[dict[str, Any]]:
    """Have the owners of all descendants take over their epochs, which moved with the agent's own.

    Returns:
        Their affected calls, each with its `agent`.
    """
    store = kernel.core.store
    kin = await store.descendants(key)
    records = [record for k in kin if (record := await store.agent_by_key(k.child)) is not None]
    reports = await asyncio.gather(*(_make_known(kernel, r.key, r.epoch) for r in records))
    return [{"agent": r.id, **call} for r, report in zip(records, reports, strict=True) for call in report]


async def _make_known(kernel: Kernel, key: Any, epoch: int) -> list[dict[str, Any]]:
    """Have the owner of the agent take over the epoch: this kernel at once, another one by its acknowledgement."""
    thread = kernel.core.threads.get(key)
    if thread is not None and not thread.fenced:
        return await apply_epoch(kernel.core, thread, epoch)
    record = await kernel.core.store.agent_by_key(key)
    if thread is None and record is not None and record.owner == kernel.core.kernel:
        # Owned and not running here: nothing of it is under way.
        await kernel.core.store.ack_epoch(key, epoch, {"affected": []})
        return []
    try:
        report = await kernel.core.store.wait_acked(key, epoch, ACK_S)
    except TimeoutError:
        text = (
            f"the permission is taken from every new call, but the kernel that owns the agent has not answered in {ACK_S:g} s; "
            "calls that were under way may still be running: run the same command again"
        )
        raise conflict(text) from None
    if report is None:
        return []
    return list(report.get("affected", []))


async def policy_show(kernel: Kernel, name: str) -> dict[str, Any]:
    """Rules in force."""
    thread = await kernel.thread(name)
    rights = thread.rights
    rules = [
        {"id": g.id, "verdict": g.verdict, "text": g.rule, "origin": g.origin} for g in rights.grants.values()
    ]
    rules += [
        {"id": r.id, "verdict": "deny", "text": r.text, "origin": "manifest"}
        for r in thread.manifest.rules
        if r.verdict == "deny"
    ]
    parents: list[dict[str, Any]] = []
    above, delegated = rights.parent, rights.delegated
    while above is not None:
        held = [*((g.id, g.verdict, g.rule) for g in above.grants.values()), *_denies(above.manifest)]
        theirs = [{"id": f"{above.agent}/{i}", "verdict": v, "text": t} for i, v, t in held]
        parents.append({"agent": above.agent, "rules": theirs, "delegates": list(delegated)})
        above, delegated = above.parent, above.delegated
    ceilings = [
        {"id": r.id, "verdict": str(r.verdict), "text": r.text}
        for r in kernel.ownership.resources.file.ceilings.rules
    ]
    conditions = [
        {"id": c.id, "verdict": str(c.then), "text": c.text, "origin": c.origin}
        for c in conditions_of(thread.manifest, kernel.ownership.resources.file)
    ]
    return {
        "agent": thread.id,
        "epoch": rights.epoch,
        "policy_version": rights.version,
        "rules": rules,
        "parents": parents,
        "ceilings": ceilings,
        "conditions": conditions,
        "tainted": None if thread.facts.taint is None else thread.facts.taint.text,
    }


def _denies(manifest: Manifest) -> list[tuple[str, str, str]]:
    return [(r.id, "deny", r.text) for r in manifest.rules if r.verdict == "deny"]


async def can_i(kernel: Kernel, name: str, action: str, resource: str) -> dict[str, Any]:
    """What a call would get, without acting."""
    thread = await kernel.thread(name)
    if row_of(action) not in kernel.core.table:
        raise bad_usage(f"no action `{action}`; there are: {', '.join(kernel.core.table)}")
    try:
        canonical = canonical_resource(action, resource)
    except ValueError as error:
        raise bad_usage(f"the resource `{resource}` can't be used: {error}") from error
    questions = _questions_of(kernel, thread, action, canonical)
    facts = None
    if thread.rights.conditions_on(questions):
        facts = await facts_for(kernel.core, thread, thread.rights, questions, None)
    effect = kernel.core.table[row_of(action)].effect
    decision = thread.rights.judge(questions, effect.name, facts=facts).decision
    final = no_return(action, str(canonical), thread.environment)
    if final and decision.verdict is Verdict.ALLOW:
        return {"verdict": "ask", "rule": IRREVERSIBLE, "reason": final, "because": list(decision.facts)}
    return {
        "verdict": decision.verdict.value,
        "rule": decision.rules[0] if decision.rules else None,
        "reason": decision.reason,
        "because": list(decision.facts),
    }


def _questions_of(kernel: Kernel, thread: Thread, action: str, resource: Resource) -> tuple[Question, ...]:
    """What a call on a resource asks of policy: of a command also what its redirections open."""
    question = Question(action=action, resource=resource)
    if action != "exec.run":
        return (question,)
    row = kernel.core.table[action]
    try:
        arguments, _, _ = decode_arguments(row, json.dumps({"argv": list(resource)}).encode())
        plan = row.body.plan(arguments, thread.environment)
    except SyscallError as error:
        raise bad_usage(f"the command can't be run: {error.message}") from error
    return (*plan.questions, *plan.foreseen)


async def explain(kernel: Kernel, name: str, step: int) -> dict[str, Any]:
    """Why a step got its verdict, as it was recorded when it was decided."""
    record = await kernel.record(name)
    rows = await kernel.core.store.step(record.key, step)
    rows = [row for row in rows if row.phase in (Phase.INTENT, Phase.OUTCOME)]
    if not rows:
        raise Problem(
            f"`{record.id}` has no step {step}; see: ringfence steps {record.id}",
            exit_code=4,
            reason="NoSuchStep",
        )
    row = rows[-1]
    body: dict[str, Any] = json.loads(row.body)
    thread = await kernel.thread(name)
    texts = await _texts(kernel, record.key, thread.manifest)
    for key in await kernel.core.store.parents(record.key):
        parent = await kernel.core.store.agent_by_key(key)
        if parent is not None:
            theirs = await _texts(kernel, key, parsed(parent))
            texts |= {f"{parent.id}/{rule}": known for rule, known in theirs.items()}
    more: dict[str, list[str]] = body.get("while_running") or {}
    error: dict[str, str] = body.get("error") or {}
    wanted: list[str] = [*(body.get("rules") or []), *more.get("rules", [])]
    return {
        "step": row.step,
        "action": row.action,
        "resource": row.resource,
        "effect": row.effect,
        "verdict": row.verdict,
        "outcome": row.outcome or None,
        "rules": [_rule(r, texts.get(r, ("", "", "", 0))) for r in wanted],
        "grants": body.get("grants") or [],
        "epoch": body.get("epoch"),
        "policy_version": body.get("policy_version"),
        "reason": error.get("message")
        or body.get(IRREVERSIBLE)
        or body.get(DOUBTFUL)
        or body.get(STRAYED)
        or body.get("reason")
        or "",
        "point": body.get("point"),
        "because": body.get("because") or [],
        "facts": await _facts_of(kernel, record.key, rows),
    }


async def _facts_of(kernel: Kernel, key: AgentKey, rows: Sequence[StoredRow]) -> dict[str, Any]:
    """What the kernel knew when a step was decided, and where its arguments come from."""
    marks = marks_of(rows[-1].body) or Marks()
    found: dict[str, Any] = {
        "tainted": None
        if marks.tainted is None
        else {"step": marks.tainted.step, "by": marks.tainted.source},
        "taints": marks.taints or None,
        "untaints": marks.untaints or None,
        "provenance": [],
    }
    for row in rows:
        arguments: object = json.loads(row.body).get("arguments")
        if arguments is not None:
            lineage = Lineage.of(row.branch, await kernel.core.store.branches(key)).parts
            raw = json.dumps(arguments).encode()
            found["provenance"] = await provenance(kernel.core, key, lineage, row.step, raw)
            break
    return found


Known: TypeAlias = tuple[str, str, str, int]
"""Text, origin, verdict and line of a rule or condition; line 0: it stands in no file."""


async def _texts(kernel: Kernel, key: AgentKey, manifest: Manifest) -> dict[str, Known]:
    """What is known of every rule and condition of an agent, by id; of those that are gone too."""
    file = kernel.ownership.resources.file
    known = [*manifest.rules, *(r for role in manifest.roles for r in file.roles.get(role, ()))]
    texts: dict[str, Known] = {r.id: (r.text, "manifest", str(r.verdict), r.line) for r in known}
    texts |= {r.id: (r.text, "ceiling", str(r.verdict), r.line) for r in file.ceilings.rules}
    texts |= {c.id: (c.text, c.origin, str(c.then), c.line) for c in conditions_of(manifest, file)}
    lines = {(str(r.verdict), r.text): r.line for r in reversed(known)}
    grants = await kernel.core.store.grants(key, active=False)
    for grant in grants:
        line = lines.get((grant.verdict, grant.rule), 0) if grant.origin == "manifest" else 0
        texts[grant.id] = (grant.rule, grant.origin, grant.verdict, line)
    return texts


def _rule(rule: str, known: Known) -> dict[str, Any]:
    text, origin, verdict, line = known
    agent, _, _ = rule.rpartition("/")
    return {
        "id": rule,
        "text": text,
        "origin": origin,
        "verdict": verdict,
        "agent": agent or None,
        "line": line or None,
    }
