"""`object.get`: an object of a declared resource, or a part of it."""

from __future__ import annotations

import asyncio

import msgspec
from ringfence.syscalls.base import Call, Env, Plan
from ringfence.syscalls.drivers.protocol import Changed, DriverError, Stat
from ringfence.syscalls.errors import CallFailed, Conflict, InvalidRequest, NoSuchResource
from ringfence.syscalls.object_common import DATA_BYTES_MAX, Target, failed, plan_object, within
from ringfence.syscalls.object_list import moment
from ringfence.syscalls.payload import Room
from ringfence.syscalls.redaction import redactor_for

CONTENT_TYPE = "Content-Type"
_AROUND = 4 << 10


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which object, and which part of it."""

    object: str = ""
    offset: int = 0
    limit: int = 0
    if_version: str = ""


class Result(msgspec.Struct, frozen=True):
    """The part, and what it is a part of."""

    data: bytes = b""
    size_bytes: int = 0
    version: str = ""
    content_type: str = ""
    metadata: dict[str, str] = {}
    modified_at: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the resource.

    Raises:
        InvalidRequest: no object's name, or a negative bound.
        NoSuchResource: no such resource.
    """
    if arguments.offset < 0 or arguments.limit < 0:
        raise InvalidRequest("`offset` and `limit` can't be negative; give 0 or more")
    return plan_object("object.get", arguments.object, env)


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del call
    return Room(most=min(arguments.limit or DATA_BYTES_MAX, DATA_BYTES_MAX) + _AROUND, least=1)


async def run(call: Call, arguments: Arguments) -> Result:
    """Read.

    Raises:
        NoSuchResource: there is no such object.
        Conflict: it has another version than asked for.
        CallFailed: the target can't be asked.
    """
    target: Target = call.plan.data
    stat = await within(call, target, target.driver.describe(target.key))
    if stat is None:
        raise NoSuchResource(f"there is no object `{target.name}`")
    if arguments.if_version and arguments.if_version != stat.version:
        raise Conflict(f"`{target.name}` is at version {stat.version}; begin anew")
    length = max(0, min(arguments.limit or DATA_BYTES_MAX, DATA_BYTES_MAX, stat.size - arguments.offset))
    try:
        data = await _read(call, target, stat, arguments.offset, length)
    except Changed as error:
        raise Conflict(f"`{target.name}` changed while it was read: {error}; read it again") from None
    except DriverError as error:
        raise failed(call, target, error) from None
    if target.resource.untrusted:
        call.taint(f"the resource `{target.resource.name}`")
    hide = redactor_for(call.env, target.resource.secrets)
    return Result(
        data=await asyncio.to_thread(hide.body, data),
        size_bytes=stat.size,
        version=stat.version,
        content_type=hide.text(stat.attributes.get(CONTENT_TYPE, "")),
        metadata={name: hide.text(value) for name, value in stat.attributes.items() if name != CONTENT_TYPE},
        modified_at=moment(stat.modified_us),
    )


async def _read(call: Call, target: Target, stat: Stat, offset: int, length: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(max(call.deadline_s, 0.001)):
            async for piece in target.driver.read(target.key, stat.version, offset, length):
                parts.append(piece)
                size += len(piece)
                call.receiving(size)
    except TimeoutError:
        raise CallFailed(f"`{target.resource.name}` did not answer in time", sent="no") from None
    return b"".join(parts)[:length]
