"""`messages.receive`: take the oldest message out of the agent's own mailbox, in one transaction with the outcome."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question, Work
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.messages_send import MESSAGE_BYTES_MAX
from ringfence.syscalls.now import rfc3339
from ringfence.syscalls.payload import SMALL_BYTES, Room, exactly

TIMEOUT_MS_MAX: Final = 366 * 24 * 3600 * 1000
_SENDER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@ -]{0,127}", re.ASCII)


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long to wait, None: as long as it takes; and of whom, empty: of all."""

    timeout_ms: int | None = None
    sender: str = msgspec.field(default="", name="from")


class ReceivedMessage(msgspec.Struct, frozen=True):
    """One message. `text` is None where it was sent as JSON."""

    id: str
    sender: str = msgspec.field(name="from")
    from_name: str
    text: str | None
    json: Any
    sent_at: str


class Result(msgspec.Struct, frozen=True):
    """The message; None: none came in time."""

    message: ReceivedMessage | None


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check time and sender.

    Raises:
        InvalidRequest: it is negative or longer than a year, or the sender is none.
    """
    if arguments.sender and _SENDER.fullmatch(arguments.sender) is None:
        raise InvalidRequest(f"`{arguments.sender[:200]}` is no sender; give a name, an id or `operator`")
    if arguments.timeout_ms is not None and not 0 <= arguments.timeout_ms <= TIMEOUT_MS_MAX:
        raise InvalidRequest(
            f"`timeout_ms` is {arguments.timeout_ms}; it has to lie between 0 and {TIMEOUT_MS_MAX}"
        )
    return Plan(resource=env.name, questions=(Question(action="messages.receive", resource=env.name),))


def room(call: Call, arguments: Arguments) -> Room:
    """The longest message, with what JSON may make of it."""
    del call, arguments
    return exactly(SMALL_BYTES + 6 * MESSAGE_BYTES_MAX)


async def wait(call: Call, arguments: Arguments) -> Result | None:
    """Wait until something may have come; before the first try, not at all."""
    mailbox = call.env.mailbox
    seen, call.memo["seen"] = call.memo.get("seen"), mailbox.arrivals
    if seen is None:
        return None
    left_s = None if arguments.timeout_ms is None else arguments.timeout_ms / 1000 - call.age_s
    if left_s is None or left_s > 0:
        until_us = None if left_s is None else time.time_ns() // 1000 + int(left_s * 1e6)
        text = f"a message from {arguments.sender}" if arguments.sender else "a message"
        async with call.waiting("message", text, until_us):
            came = await mailbox.changed(seen, left_s)
        # INVARIANT: read before the try that follows, so that what comes during it leads to another one.
        call.memo["seen"] = mailbox.arrivals
        if came:
            return None
    return Result(message=None)


def transaction(arguments: Arguments) -> Work:
    """What to commit."""
    return Work(statement="message_take", values={"from": arguments.sender})


def finish(arguments: Arguments, done: dict[str, Any]) -> Result:
    """What the agent gets once it is committed."""
    del arguments
    message = ReceivedMessage(
        id=f"m{done['id']}",
        sender=done["from"],
        from_name=done["from_name"],
        text=None if done["is_json"] else done["body"],
        json=msgspec.json.decode(done["body"]) if done["is_json"] else None,
        sent_at=rfc3339(datetime.fromtimestamp(done["sent_at_us"] / 1e6, UTC)),
    )
    return Result(message=message)
