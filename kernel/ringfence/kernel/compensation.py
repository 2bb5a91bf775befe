"""The part of a rollback that goes out over HTTP: what was kept is put back, and what left the system is made up for.

Both are on record with the effect that they take back, so that a call that was taken back may be made again, and one that
was not is recognised for ever. The operator's declaration decides what is sent: rights and totals of the agent have no say.

    plan        from the journal and the kernel file alone: what a call is made up for with, or why it can't be
    intent      of a compensation, before it is sent
    outcome     ok, error, or unknown where it may have arrived; what failed is tried again by the next rollback

INVARIANT: a compensation that may have arrived is sent again only with the same key, or where the standard says that it does nothing twice.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
from ringfence.kernel.journal.types import Entry, Phase, StoredRow
from ringfence.kernel.replay import (
    COMPENSATE,
    HAPPENED,
    OPERATOR_LANE,
    Lineage,
    taken_back_by,
)
from ringfence.kernel.settled import answer_from
from ringfence.kernel.taken_back import identity_of, put_on_record, row_of
from ringfence.policy.problems import PatternError
from ringfence.syscalls.http_compensate import (
    SENT_AGAIN,
    Done,
    NoWay,
    Recorded,
    Request,
    compensation_of,
    send_compensation,
)
from ringfence.syscalls.http_place import belongs, resource_of
from ringfence.syscalls.http_undo import HttpPlan, Kept, KeptPoint, plan_put_back, put_back, undo_of

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.thread import Thread

FORKED: Final = "the original did it, and can undo it"
_INHERITED: Final = b'"inherited":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """One compensation.

    Attributes:
        step: of the call that it makes up for.
        of: effect id of that call.
        request: what is sent.
        again: the step of a try that a crash cut short; 0: none.
        unsure: whether an earlier try may have arrived, and nobody knows.
    """

    step: int
    of: str
    request: Request
    again: int = 0
    unsure: bool = False


@dataclass(slots=True, kw_only=True)
class Outward:
    """What a rollback does over HTTP.

    Attributes:
        kept: what is put back, and what is left alone.
        steps: by URL of what was kept, the oldest step and the effects that putting it back takes back.
        owed: compensations.
        why: by step, why nothing makes up for a call.
        with_others: by URL of what is put back, whose effects there are taken back with it, of agents that go back together.
    """

    kept: HttpPlan = field(default_factory=HttpPlan)
    steps: dict[str, tuple[int, list[str]]] = field(default_factory=dict[str, tuple[int, list[str]]])
    owed: list[Owed] = field(default_factory=list[Owed])
    why: dict[int, str] = field(default_factory=dict[int, str])
    with_others: dict[str, list[tuple[Thread, str]]] = field(
        default_factory=dict[str, "list[tuple[Thread, str]]"]
    )

    @property
    def conflicts(self) -> dict[str, str]:
        """What is left alone or failed, with the reason, by URL."""
        return self.kept.conflicts

    def changes(self) -> list[dict[str, Any]]:
        """As the document of a rollback lists them."""
        found = [
            {
                "kind": "http",
                "target": kept.put_back_url,
                "action": "remove" if kept.absent else "restore",
                "detail": kept.method,
            }
            for kept in self.kept.items
        ]
        return found + [
            {
                "kind": "http",
                "target": one.request.url,
                "action": "compensate",
                "detail": f"{one.request.method} for step {one.step}",
            }
            for one in self.owed
        ]


# -- planning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Book:
    """What the journal says of effects: those that were taken back, compensations that failed, tries that a crash cut short."""

    back: frozenset[str]
    failed: dict[str, StoredRow]
    begun: dict[str, StoredRow]
    kept: frozenset[str]
    """Effects of the steps that stay."""


async def _book(core: Core, thread: Thread, kept: Lineage, cut: int) -> _Book:
    back: set[str] = set()
    failed: dict[str, StoredRow] = {}
    stays: set[str] = set()
    async for row in core.store.effect_outcomes(thread.key):
        if row.lane != OPERATOR_LANE:
            if row.outcome in HAPPENED and row.step <= cut and kept.holds(row.branch, row.step):
                stays.add(row.effect_id)
            continue
        back |= taken_back_by(row)
        if row.action == COMPENSATE and _INHERITED not in row.body:
            of = _said(row).of[0]
            failed.pop(of, None)
            if row.outcome in ("error", "unknown"):
                failed[of] = row
    begun = {
        _said(intent).of[0]: intent
        for intent, _ in await core.store.unfinished(thread.key)
        if intent.lane == OPERATOR_LANE and intent.action == COMPENSATE
    }
    return _Book(back=frozenset(back), failed=failed, begun=begun, kept=frozenset(stays))


class _Said(msgspec.Struct):
    of: list[str] = []
    of_step: int = 0
    arguments: dict[str, Any] = {}


_said_in = msgspec.json.Decoder(_Said).decode


def _said(row: StoredRow) -> _Said:
    return _said_in(row.body)


async def plan(
    core: Core,
    thread: Thread,
    *,
    kept: Sequence[tuple[StoredRow, KeptPoint]],
    not_undoable: list[StoredRow],
    stays: Lineage,
    cut: int,
) -> Outward:
    """Find out what is to be done over HTTP; changes nothing.

    Args:
        core: the kernel's parts.
        thread: whose.
        kept: rows with an HTTP point, newest first, each with what was kept.
        not_undoable: rows of calls that left the system; those that can be made up for are taken out.
        stays: lineage that is gone on with.
        cut: last step of it that is kept.

    Raises:
        Unavailable: the database is away.
    """
    outward = Outward()
    for row, point in kept:
        url = point.kept.keep_url
        _, effects = outward.steps.get(url, (0, []))
        outward.steps[url] = (row.step, [*effects, *([row.effect_id] if row.effect_id else [])])
    outward.kept = await plan_put_back(thread.environment.http, [point for _, point in kept], thread.id)
    book = await _book(core, thread, stays, cut)
    found: dict[str, Owed] = {}
    for row in [row for row in not_undoable if row.action.startswith("http.")]:
        if row.effect_id in book.back:
            not_undoable.remove(row)
            continue
        try:
            owed = await _owed_for(core, thread, row, book)
        except NoWay as error:
            if str(error):
                outward.why[row.step] = str(error)
            continue
        not_undoable.remove(row)
        found.setdefault(owed.of, owed)
    for of, intent in book.begun.items():
        found.setdefault(of, _again(intent))
    for of, row in book.failed.items():
        # What an earlier rollback could not make up for, unless what is kept has come to rest on it meanwhile.
        if of not in book.kept and of not in book.back:
            found.setdefault(of, _again(row))
    outward.owed = list(found.values())
    return outward


def _again(row: StoredRow) -> Owed:
    """Another try of a compensation that a crash cut short, that failed, or of which nobody knows: of the same request."""
    said, begun = _said(row), row.phase is Phase.INTENT
    request = msgspec.convert(said.arguments, Request)
    return Owed(
        step=said.of_step,
        of=said.of[0],
        request=request,
        again=row.step if begun else 0,
        unsure=begun or row.outcome == "unknown",
    )


async def _owed_for(core: Core, thread: Thread, row: StoredRow, book: _Book) -> Owed:
    """What makes up for a call.

    Raises:
        NoWay: nothing does; empty where nobody says how.
    """
    tried = book.begun.get(row.effect_id) or book.failed.get(row.effect_id)
    if tried is not None and (again := _again(tried)).unsure:
        # Whatever is declared by now: another request had another key.
        return again
    if row.outcome != "ok" or not row.effect_id:
        raise NoWay("nobody knows what came of it" if row.outcome == "unknown" else "")
    await _refuse_others(core, thread, row)
    method = row.action.removeprefix("http.").upper()
    try:
        found = resource_of(row.resource, thread.environment.http.values())
        undo = None if found is None else undo_of(found[0], method, row.resource)
    except PatternError:
        raise NoWay("") from None
    if found is None or undo is None or not undo.compensate:
        raise NoWay("")
    call = await _recorded(core, thread, row)
    request = compensation_of(found[0], undo, call, thread.environment.http.values())
    return Owed(step=row.step, of=row.effect_id, request=request)


async def _refuse_others(core: Core, thread: Thread, row: StoredRow) -> None:
    """A fork makes up for nothing that its original did, nor for what it only recognised as done by it."""
    if _INHERITED in row.body:
        raise NoWay(FORKED)
    sent: int | None = json.loads(row.body).get("recognised")
    if sent is not None and any(_INHERITED in one.body for one in await core.store.step(thread.key, sent)):
        raise NoWay(FORKED)


async def _recorded(core: Core, thread: Thread, row: StoredRow) -> Recorded:
    """A call and its answer, from the journal."""
    answer = await answer_from(row, core.blobs, frozenset())
    if answer.result is None:
        raise NoWay("its answer is not on record")
    rows = await core.store.step(thread.key, row.step)
    bodies = [json.loads(one.body) for one in rows if one.phase in (Phase.INTENT, Phase.OUTCOME)]
    given: dict[str, Any] = next(body["arguments"] for body in bodies if "arguments" in body)
    said: dict[str, Any] = json.loads(answer.result)
    return Recorded(
        url=row.resource,
        headers=given.get("headers") or {},
        body=base64.b64decode(given.get("body") or ""),
        status=int(said.get("status") or 0),
        answer_headers=said.get("headers") or {},
        answer=base64.b64decode(said.get("body") or ""),
    )


# -- carrying it out --------------------------------------------------------------------------------------------------


async def carry_out(core: Core, thread: Thread, outward: Outward) -> None:
    """Do it, the newest first; what fails becomes a conflict and stays on record.

    Raises:
        JournalUnavailable, Fenced: this kernel is at its end; the next one carries the rollback to its end.
    """
    plans = outward.kept
    for kept in plans.standing:
        await _on_record(core, thread, outward, kept, "it stood there already")
    work: list[tuple[int, Kept | Owed]] = [
        *((outward.steps[kept.keep_url][0], kept) for kept in plans.items),
        *((owed.step, owed) for owed in outward.owed),
    ]
    for _, one in sorted(work, key=lambda each: -each[0]):
        if isinstance(one, Kept):
            source = plans.sources[one.keep_url]
            failed = await put_back(thread.environment.http, one, source, thread.id)
            if failed:
                plans.items.remove(one)
                plans.conflicts[one.put_back_url] = failed
            else:
                await _on_record(core, thread, outward, one, f"put back with {one.method}")
        else:
            failed = await _compensate(core, thread, one)
            if failed:
                outward.owed.remove(one)
                plans.conflicts[f"{one.request.method} {one.request.url}"] = failed


async def _on_record(core: Core, thread: Thread, outward: Outward, kept: Kept, how: str) -> None:
    """Say what is undone by it, of this agent and of those that go back with it."""
    effects = outward.steps[kept.keep_url][1]
    every = [(thread, each) for each in effects] + outward.with_others.get(kept.keep_url, [])
    for who in dict.fromkeys(each for each, _ in every):
        mine = [effect for other, effect in every if other is who]
        await put_on_record(core, who, kept.put_back_url, mine, how)


async def _compensate(core: Core, thread: Thread, owed: Owed) -> str:
    """Send one. Returns why it is not done; empty: it is."""
    request = owed.request
    resource = thread.environment.http.get(request.resource)
    identity = identity_of(thread, COMPENSATE, request.url, [owed.of])
    said = {"arguments": msgspec.to_builtins(request), "of": [owed.of], "of_step": owed.step}
    step = owed.again or thread.take_step()
    place = f"{request.method} {request.url}"
    keyed = resource is not None and resource.idempotency_header is not None
    once = not keyed and request.method not in SENT_AGAIN
    if resource is None:
        done = Done(failed=f"the resource `{request.resource}` is no longer declared", sent=False)
    elif not belongs(request.url, resource, thread.environment.http.values()):
        done = Done(
            failed=f"`{request.url.partition('?')[0]}` is no longer below `{resource.name}`", sent=False
        )
    elif owed.unsure and once:
        done = Done(failed="it may have arrived before")
    else:
        if not owed.again:
            row = row_of(thread, Phase.INTENT, step, COMPENSATE, place, identity)
            row.body = msgspec.json.encode(said)
            await core.append(Entry(row=row))
        done = await send_compensation(resource, request, key=identity, agent=thread.id)
        await core.failpoints.reach("rollback:after_compensation", thread.id)
    row = row_of(thread, Phase.OUTCOME, step, COMPENSATE, place, identity)
    result: dict[str, Any] = (
        {"error": {"reason": "CallFailed", "message": done.failed, "metadata": {}}}
        if done.failed
        else {"result": {"status": done.status}}
    )
    # INVARIANT: what may have arrived once stays so, however a later try ends, until one of them is done.
    unsure = bool(done.failed) and (owed.unsure or (done.sent and not done.status))
    row.outcome = "unknown" if unsure else "error" if done.failed else "ok"
    row.body = msgspec.json.encode({**said, **result, "rules": [], "grants": []})
    await core.append_outcome(row)
    if not done.failed:
        thread.replay.taken_back.add(owed.of)
        return ""
    later = "it is not sent twice: look there" if unsure and once else "the next rollback tries it again"
    return f"step {owed.step} is not made up for: {done.failed}; {later}"
