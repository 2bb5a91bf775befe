"""`messages.send`: put a message into an agent's mailbox, in one transaction with the outcome."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from ringfence.syscalls.base import Env, Plan, Question, Work
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import InvalidRequest, NoSuchResource, QuotaExceeded

MESSAGE_BYTES_MAX: Final = 256 << 10
MAILBOX_MESSAGES_MAX: Final = 10_000
RETRY_AFTER_MS: Final = 1000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_LOOKS_LIKE_AN_ID: Final = re.compile(r".-[a-z0-9]{5}\Z", re.ASCII)


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who gets it, and the message: a text, or else a JSON value."""

    to: str = ""
    text: str | None = None
    json: Any = None


class Result(msgspec.Struct, frozen=True):
    """Id of the message, and id of the agent that gets it."""

    id: str
    to: str


def body_of(text: str | None, value: Any) -> str:
    """The message as it is stored: the text itself, or canonical JSON.

    Raises:
        InvalidRequest: there are both, or it is too large.
    """
    if text is not None and value is not None:
        raise InvalidRequest("a message is either `text` or `json`; leave one of them out")
    body = canonical_json(value).decode() if text is None else text
    size = len(body.encode())
    if size > MESSAGE_BYTES_MAX:
        raise InvalidRequest(
            f"the message has {size} bytes; at most {MESSAGE_BYTES_MAX} fit, put more into an artifact or a file"
        )
    return body


def work(to: str, text: str | None, value: Any, sender: str | None = None) -> Work:
    """What puts a message into a mailbox.

    Args:
        to: name or id.
        text: the text, or None for JSON.
        value: the JSON value.
        sender: who sends it where that is no agent.
    """
    values = {"to": to, "is_json": text is None, "body": body_of(text, value), "most": MAILBOX_MESSAGES_MAX}
    return Work(statement="message_send", values=values if sender is None else {**values, "sender": sender})


def check(to: str, done: dict[str, Any]) -> dict[str, Any]:
    """What the work answered, where it put the message in.

    Raises:
        NoSuchResource: nobody has that name or id, or it has ended.
        InvalidRequest: several have that name.
        QuotaExceeded: the mailbox is full.
    """
    if "missing" in done:
        raise NoSuchResource(f"no agent `{to}`; `ringfence ps` lists those that there are")
    if "several" in done:
        ids = ", ".join(done["several"])
        raise InvalidRequest(f"several agents are named `{to}`: {ids}; send to one of these ids")
    if "ended" in done:
        way = (
            f"roll it back first: `ringfence rollback {done['ended']} --to STEP --start`"
            if done["state"] == "done"
            else f"start it again with `ringfence start {done['ended']}`"
        )
        raise NoSuchResource(
            f"the agent `{done['ended']}` has ended ({done['state']}), so its mailbox takes no messages; {way}"
        )
    if "full" in done:
        raise QuotaExceeded(
            f"the mailbox of `{done['to']}` holds {done['full']} messages and takes no more until it receives some; "
            "send again later",
            retry_after_ms=str(RETRY_AFTER_MS),
        )
    return done


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the message.

    Raises:
        InvalidRequest: no receiver, both forms of a message, or one that is too large.
    """
    del env
    if _NAME.fullmatch(arguments.to) is None:
        raise InvalidRequest(f"`{arguments.to[:200]}` is no name or id of an agent; see `ringfence ps`")
    body_of(arguments.text, arguments.json)
    return _plan(arguments.to, arguments.to)


async def locate(arguments: Arguments, env: Env) -> Plan | None:
    """The plan with the receiver's name where `to` is an id: rules speak of names."""
    name = (
        await env.peers.name_of(arguments.to) if _LOOKS_LIKE_AN_ID.search(arguments.to) is not None else None
    )
    return None if name is None else _plan(arguments.to, name)


def _plan(to: str, name: str) -> Plan:
    return Plan(resource=to, questions=(Question(action="messages.send", resource=name),))


def transaction(arguments: Arguments) -> Work:
    """What to commit."""
    return work(arguments.to, arguments.text, arguments.json)


def finish(arguments: Arguments, done: dict[str, Any]) -> Result:
    """What the agent gets once it is committed.

    Raises:
        NoSuchResource, InvalidRequest, QuotaExceeded: the mailbox can't take it; nothing is committed.
    """
    sent = check(arguments.to, done)
    return Result(id=f"m{sent['message']}", to=sent["to"])
