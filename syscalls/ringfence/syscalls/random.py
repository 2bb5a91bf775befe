"""`random`: random bytes, recorded so that a replay sees the same."""

from __future__ import annotations

import secrets
from typing import Final

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.errors import InvalidRequest

SIZE_DEFAULT: Final = 16
SIZE_MAX: Final = 4096


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many bytes; 0: 16."""

    size_bytes: int = 0


class Result(msgspec.Struct, frozen=True):
    """The bytes."""

    data: bytes


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the size.

    Raises:
        InvalidRequest: the size is out of bounds.
    """
    del env
    if not 0 <= arguments.size_bytes <= SIZE_MAX:
        raise InvalidRequest(f"`size_bytes` is {arguments.size_bytes}; ask for 1 to {SIZE_MAX}")
    return Plan(resource="", questions=(Question(action="random", resource=""),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Draw from the operating system."""
    del call
    return Result(data=secrets.token_bytes(arguments.size_bytes or SIZE_DEFAULT))
