"""`ask`: the program asks a person something and waits for the answer, however long that takes."""

from __future__ import annotations

from typing import Any

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.errors import Denied, InvalidRequest
from ringfence.syscalls.payload import Room, exactly

_MOST_CHARS = 4000
_ANSWER_BYTES = 32 << 10


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The question in the program's words, and whatever the person should see beside it."""

    question: str = ""
    details: Any = None


class Result(msgspec.Struct, frozen=True):
    """Whether the person agreed, what they said, and who it was."""

    approved: bool = False
    answer: str = ""
    by: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the question.

    Raises:
        InvalidRequest: there is none, or it is too long for a person.
    """
    del env
    text = arguments.question.strip()
    if not text:
        raise InvalidRequest("`question` is empty; say what the person should decide")
    if len(text) > _MOST_CHARS:
        raise InvalidRequest(f"`question` has {len(text)} characters; the limit is {_MOST_CHARS}: shorten it")
    return Plan(resource="", questions=(Question(action="ask", resource=""),))


def room(call: Call, arguments: Arguments) -> Room:
    """What a person may say: nobody is asked whose answer would not fit."""
    del call, arguments
    return exactly(_ANSWER_BYTES)


async def run(call: Call, arguments: Arguments) -> Result:
    """Wait for the answer. A denial is an answer, not an error; no answer in time is an error.

    Raises:
        Denied: nobody answered before the approval ran out, or a rule denies asking.
    """
    detail = {} if arguments.details is None else {"details": arguments.details}
    try:
        said = await call.confirm((), question=arguments.question.strip(), detail=detail)
    except Denied as denied:
        by = denied.metadata.get("by")
        if by is None:
            raise
        return Result(approved=False, answer=denied.metadata.get("answer", ""), by=by)
    return Result(approved=True, answer=said.answer, by=said.by)
