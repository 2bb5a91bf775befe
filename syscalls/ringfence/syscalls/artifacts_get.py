"""`artifacts.get`: read an artifact of the agent, or a part of it."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from ringfence.syscalls.artifacts_put import check_name
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.errors import InvalidRequest, NoSuchResource

PART_BYTES_MAX: Final = 4 << 20
"""What one answer carries: as base64 it still fits into a frame."""
_REF: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which artifact, and which part of it."""

    name: str = ""
    ref: str = ""
    version: int = 0
    offset: int = 0
    limit: int = 0


class Result(msgspec.Struct, frozen=True):
    """The part, and what it is a part of."""

    data: bytes
    size_bytes: int
    name: str
    version: int
    ref: str
    media_type: str


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the arguments.

    Raises:
        InvalidRequest: neither or both of name and reference, or a bound out of range.
    """
    del env
    if bool(arguments.name) == bool(arguments.ref):
        raise InvalidRequest("an artifact is found by `name` or by `ref`; give one of them")
    if arguments.ref:
        if _REF.fullmatch(arguments.ref) is None:
            raise InvalidRequest(
                f"`{arguments.ref[:100]}` is no reference of an artifact; it has 64 hex digits"
            )
        if arguments.version:
            raise InvalidRequest("a reference names one content; leave `version` out")
    else:
        check_name(arguments.name)
    for what, value in (
        ("version", arguments.version),
        ("offset", arguments.offset),
        ("limit", arguments.limit),
    ):
        if value < 0:
            raise InvalidRequest(f"`{what}` is {value}; it can't be negative")
    return _plan(arguments.name or arguments.ref)


async def locate(arguments: Arguments, env: Env) -> Plan | None:
    """The plan with the artifact's name where only its reference is given: rules speak of names.

    Raises:
        NoSuchResource: the agent has no such artifact.
    """
    if not arguments.ref:
        return None
    found = await env.artifacts.find("", arguments.ref, 0)
    if found is None:
        raise NoSuchResource(f"this agent has no artifact with the reference `{arguments.ref}`")
    return _plan(found.name)


def _plan(name: str) -> Plan:
    return Plan(resource=name, questions=(Question(action="artifacts.get", resource=name),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Read.

    Raises:
        NoSuchResource: the agent has no such artifact.
    """
    found = await call.env.artifacts.find(arguments.name, arguments.ref, arguments.version)
    if found is None:
        version = f" in version {arguments.version}" if arguments.version else ""
        raise NoSuchResource(f"this agent has no artifact `{arguments.name or arguments.ref}`{version}")
    if found.tainted:
        call.taint(f"version {found.version} of the artifact `{found.name}`, which was kept under a taint")
    limit = min(arguments.limit or PART_BYTES_MAX, PART_BYTES_MAX)
    data = await call.env.artifacts.read(found.ref, arguments.offset, limit)
    return Result(
        data=data,
        size_bytes=found.size_bytes,
        name=found.name,
        version=found.version,
        ref=found.ref,
        media_type=found.media_type,
    )
