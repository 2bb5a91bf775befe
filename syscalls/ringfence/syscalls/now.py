"""`now`: the kernel's clock, recorded so that a replay sees the same time."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """None."""


class Result(msgspec.Struct, frozen=True):
    """The time, RFC 3339 in UTC with microseconds."""

    time: str


def plan(arguments: Arguments, env: Env) -> Plan:
    """A clock has no resource."""
    del arguments, env
    return Plan(resource="", questions=(Question(action="now", resource=""),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Read the clock."""
    del call, arguments
    return Result(time=rfc3339(datetime.now(UTC)))


def rfc3339(moment: datetime) -> str:
    """A UTC time with exactly six digits of fraction."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
