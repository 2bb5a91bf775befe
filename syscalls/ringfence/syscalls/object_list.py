"""`object.list`: objects of a declared resource beneath a prefix."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec
from ringfence.syscalls.base import Call, Env, Plan
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.object_common import Target, plan_object, within
from ringfence.syscalls.payload import Room

LIMIT_MAX: Final = 1000
_EACH_BYTES: Final = 1400


class ObjectInfo(msgspec.Struct, frozen=True):
    """One object, as `ObjectInfo` of the protocol."""

    object: str = ""
    size_bytes: int = 0
    version: str = ""
    modified_at: str = ""


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where to look, and how many at most."""

    prefix: str = ""
    after: str = ""
    limit: int = 0


class Result(msgspec.Struct, frozen=True):
    """Those that were found."""

    objects: tuple[ObjectInfo, ...] = ()
    truncated: bool = False


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the resource.

    Raises:
        InvalidRequest: a bound out of range, or no prefix.
        NoSuchResource: no such resource.
    """
    if not 0 <= arguments.limit <= LIMIT_MAX:
        raise InvalidRequest(f"`limit` is {arguments.limit}; give 1 to {LIMIT_MAX}, or 0 for that")
    return plan_object("object.list", arguments.prefix, env, prefix=True)


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del call
    return Room(most=(arguments.limit or LIMIT_MAX) * _EACH_BYTES, least=1)


async def run(call: Call, arguments: Arguments) -> Result:
    """List what policy lets the agent see.

    Raises:
        CallFailed: the target can't be asked.
    """
    target: Target = call.plan.data
    prefix = f"{target.key}/" if target.key else ""
    after = arguments.after.removeprefix(f"{target.resource.name}/")
    limit = arguments.limit or LIMIT_MAX
    found: list[ObjectInfo] = []
    page = await within(call, target, target.driver.list(prefix, after, limit))
    for one in page.objects:
        name = f"{target.resource.name}/{one.key}"
        if not call.env.visible("object.list", name):
            continue
        found.append(
            ObjectInfo(
                object=name,
                size_bytes=one.size,
                version=one.version,
                modified_at=moment(one.modified_us),
            )
        )
    if target.resource.untrusted:
        call.taint(f"the resource `{target.resource.name}`")
    return Result(objects=tuple(found), truncated=page.more)


def moment(at_us: int) -> str:
    """A time as the protocol has it; empty where it is not known."""
    return f"{datetime.fromtimestamp(at_us / 1e6, UTC):%Y-%m-%dT%H:%M:%SZ}" if at_us else ""
