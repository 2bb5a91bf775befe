"""Puts the facts of a thread together for the conditions that ask about them, and only those facts."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from ringfence.kernel.sharing import shared
from ringfence.policy.conditions import Amount, Created, Environment, Share
from ringfence.policy.exact import Exact
from ringfence.policy.facts import Facts
from ringfence.policy.hearsay import Hearsay
from ringfence.policy.matcher import match_name
from ringfence.syscalls.base import Question
from ringfence.syscalls.http_body import json_of
from ringfence.syscalls.http_place import resource_of

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.rights import Rights
    from ringfence.kernel.thread import Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Of the rows that a call changes: whether its thread made all of them, or that this is found out before any effect."""

    made: bool | None = None
    later: bool = False


async def facts_for(
    core: Core,
    thread: Thread,
    rights: Rights,
    questions: Sequence[Question],
    arguments: bytes | None,
    rows: Rows | None = None,
) -> tuple[Facts, ...]:
    """The facts of each question.

    Args:
        core: the kernel.
        thread: whose.
        rights: under which they are asked.
        questions: what is asked.
        arguments: of the call, canonical JSON; None where there is no call.
        rows: of a call that changes rows, what is known of them; None: nothing.

    Raises:
        Unavailable: the database is away.
    """
    asked = rights.conditions_on(questions)
    reads = None
    if any(item.fresh_s is not None for item in asked):
        reads = await thread.history.as_facts(core, thread)
    kinds = {type(test) for item in asked for test in item.tests}
    if Created in kinds:
        await thread.history.catch_up(core, thread)
    looked_into = not kinds.isdisjoint((Amount, Hearsay))
    given = arguments_of(arguments) if looked_into and arguments is not None else None
    told = await thread.history.told.to(core, thread) if Hearsay in kinds else None
    shares = thread.budgets.shares() if Share in kinds else None
    others = [test for item in asked for test in item.tests if isinstance(test, Share) and test.of]
    of_others = await shared(core, thread, others) if others else None
    taint = thread.facts.taint
    return tuple(
        Facts(
            tainted="" if taint is None else taint.text,
            reads=reads,
            environment=environment_of(rights, thread, question, given) if Environment in kinds else None,
            created=_created(thread, question, rows) if Created in kinds else None,
            created_later=rows is not None and rows.later and question.action == "sql.write",
            now=datetime.now(UTC),
            arguments=given,
            shares=shares,
            shared=of_others,
            told=told,
        )
        for question in questions
    )


def known_at_once(thread: Thread) -> Facts:
    """The facts that need no look at a disk or a database."""
    taint = thread.facts.taint
    return Facts(
        tainted="" if taint is None else taint.text, now=datetime.now(UTC), shares=thread.budgets.shares()
    )


def environment_of(
    rights: Rights, thread: Thread, question: Question, arguments: Mapping[str, Any] | None
) -> str | None:
    """The environment of what a question is about; empty: it has none; None: it can't be told."""
    declared = rights.kernel_file.resources
    family = question.action.partition(".")[0]
    resource = question.resource if isinstance(question.resource, str) else ""
    if family == "http":
        found = resource_of(resource, thread.environment.http.values())
        names = [] if found is None else [found[0].name]
    elif family in {"sql", "object"}:
        names = [resource.partition("/")[0]]
    elif family == "a2a":
        names = [resource]
    elif family == "mcp":
        names = question.action.split(".")[1:2]
    elif family == "llm":
        serving = thread.environment.llm.values()
        names = [one.name for one in serving if any(match_name(model, resource) for model in one.models)]
        chosen = str((arguments or {}).get("resource") or "")
        names = [chosen] if chosen in names else names
    else:
        return ""
    labels = {declared[name].environment for name in names if name in declared}
    if len(labels) != 1:
        # Of several hosts the strictest can't be told, and of one that is not declared nothing.
        return None
    return labels.pop()


def _created(thread: Thread, question: Question, rows: Rows | None) -> bool | None:
    if question.action == "sql.write":
        return None if rows is None else rows.made
    if not isinstance(question.resource, str):
        return None
    family = question.action.partition(".")[0]
    if family == "fs":
        return question.resource in thread.history.created
    if family == "state":
        return f"state {question.resource}" in thread.history.created
    return None


def arguments_of(canonical: bytes) -> Mapping[str, Any]:
    """Arguments as JSON values, and under `json` the body of a request that is some."""
    given = cast("dict[str, Any]", json.loads(canonical, parse_float=Exact))
    body = given.get("body")
    if isinstance(body, str) and "json" not in given:
        # INVARIANT: a body that can be read in two ways, or in none, has no field that a condition could find.
        with suppress(ValueError):
            given["json"] = json_of(base64.b64decode(body), given.get("headers") or {})
    return given
