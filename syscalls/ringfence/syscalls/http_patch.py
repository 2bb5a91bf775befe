"""`http.patch`: send a PATCH to a declared resource."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from ringfence.syscalls.http_client import room_of, send
from ringfence.syscalls.http_common import plan_http

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env, Plan
    from ringfence.syscalls.payload import Room


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """URL, headers and body."""

    url: str = ""
    headers: dict[str, str] = {}
    body: bytes = b""


class Result(msgspec.Struct, frozen=True):
    """Status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the resource and what the call does to it; see `plan_http` for what is refused."""
    return plan_http("PATCH", arguments.url, arguments.headers, env)


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del arguments
    return room_of(call)


async def run(call: Call, arguments: Arguments) -> Result:
    """Send it once; see `send` for how it can fail."""
    answer = await send(call, arguments.body)
    return Result(status=answer.status, headers=answer.headers, body=answer.body)
