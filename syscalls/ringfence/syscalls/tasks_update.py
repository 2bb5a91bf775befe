"""`tasks.update`: tell the client of a task how it stands, or give it a result, in one transaction with the outcome."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from ringfence.syscalls.base import Env, Plan, Question, Work
from ringfence.syscalls.errors import Conflict, InvalidRequest, NoSuchResource, QuotaExceeded
from ringfence.syscalls.messages_send import body_of

EVENTS_MAX: Final = 10_000
"""Entries of one task, after which it can only be ended."""

BYTES_MAX: Final = 4 << 20
"""The same of what was asked and told of it; the last entry may go beyond."""

STATES: Final = ("working", "input-required", "auth-required", "completed", "failed", "rejected")
"""What an agent may say of a task."""

_TASK: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.[0-9a-f]{24}", re.ASCII)
_ARTIFACT: Final = re.compile(r"[^\x00-\x1f\x7f]{1,200}")


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The task, its state where it changes, and what is told: a text or a JSON value, under a name where it is a result."""

    task: str = ""
    state: str = ""
    text: str | None = None
    json: Any = None
    artifact: str = ""


class Result(msgspec.Struct, frozen=True):
    """State of the task after it."""

    state: str


def client_of(task: str) -> str:
    """The client whose task it is: ids begin with its name.

    Raises:
        InvalidRequest: this is no task's id.
    """
    found = _TASK.fullmatch(task)
    if found is None:
        raise InvalidRequest(
            f"`{task[:200]}` is no task; give the `task` of the message from `messages.receive` that began it"
        )
    return found[1]


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check what is said.

    Raises:
        InvalidRequest: no task, an unknown state, nothing said, both forms, or too much.
    """
    del env
    client = client_of(arguments.task)
    if arguments.state and arguments.state not in STATES:
        raise InvalidRequest(f"`{arguments.state[:100]}` is no state; say one of {', '.join(STATES)}")
    said = arguments.text is not None or arguments.json is not None
    if arguments.artifact and not said:
        raise InvalidRequest("a result has `text` or `json` besides its name in `artifact`")
    if arguments.artifact and _ARTIFACT.fullmatch(arguments.artifact) is None:
        raise InvalidRequest(
            "the name in `artifact` is longer than 200 characters, or holds control characters"
        )
    if not (said or arguments.state):
        raise InvalidRequest("nothing is said; give a `state`, a `text` or a `json`")
    body_of(arguments.text, arguments.json)
    return Plan(resource=arguments.task, questions=(Question(action="tasks.update", resource=client),))


def transaction(arguments: Arguments) -> Work:
    """What to commit."""
    said = arguments.text is not None or arguments.json is not None
    values: dict[str, Any] = {
        "task": arguments.task,
        "state": arguments.state,
        "artifact": arguments.artifact,
    }
    if said:
        values |= {"is_json": arguments.text is None, "body": body_of(arguments.text, arguments.json)}
    return Work(statement="task_update", values={**values, "most": EVENTS_MAX, "bytes_most": BYTES_MAX})


def finish(arguments: Arguments, done: dict[str, Any]) -> Result:
    """What the agent gets once it is committed.

    Raises:
        NoSuchResource: the agent has no such task.
        Conflict: it has ended, so that nobody waits for more.
        QuotaExceeded: too much was told already.
    """
    if "missing" in done:
        raise NoSuchResource(
            f"this agent has no task `{arguments.task}`; a task is told of in its first message"
        )
    if "ended" in done:
        raise Conflict(f"the task `{arguments.task}` has ended ({done['ended']}), and takes nothing more")
    if "full" in done:
        raise QuotaExceeded(
            f"the task `{arguments.task}` holds {done['full']} entries and takes no more; end it"
        )
    return Result(state=done["state"])
