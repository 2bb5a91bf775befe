"""fs.read: a part of a file, or all of it. The hot path: no lock and, for small files, no thread."""

from __future__ import annotations

import asyncio

import msgspec
from ringfence.sandbox.openat import Opened
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import errors, fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.payload import SMALL, Room, exactly

_DIRECT = 64 << 10  # bytes that are read in the event loop itself
_AT_ONCE = 2 << 10  # bytes whose result surely stays in the journal
_MOST = 16 << 20  # bytes of one call
_AROUND = 256  # bytes of a result beside its data


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of fs.read."""

    path: str = ""
    offset: int = 0
    limit: int = 0


class Result(msgspec.Struct, frozen=True):
    """Result of fs.read."""

    data: bytes = b""
    size_bytes: int = 0
    version: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Resolve the path; policy decides on what it really names."""
    if arguments.offset < 0 or arguments.limit < 0:
        raise errors.InvalidRequest("`offset` and `limit` can't be negative; give 0 or more")
    path = fs_common.resolve(env, arguments.path)
    return Plan(resource=path, questions=(Question(action="fs.read", resource=path),))


def room(call: Call, arguments: Arguments) -> Room:
    """The part of the file that is asked for."""
    try:
        size = call.env.workspace.stat(call.plan.resource).size_bytes
    except WorkspaceError:
        return SMALL
    return exactly(min(max(0, size - arguments.offset), arguments.limit or _MOST, _MOST) + _AROUND)


def plan_at_once(arguments: Arguments, env: Env) -> Plan:
    """Plan, and keep open what `run_at_once` reads: one system call finds the name of a path and opens it."""
    if arguments.offset < 0 or arguments.limit < 0:
        return plan(arguments, env)
    try:
        path, opened = env.workspace.canonical_open(arguments.path)
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    return Plan(resource=path, questions=(Question(action="fs.read", resource=path),), data=opened)


def run_at_once(call: Call, arguments: Arguments) -> Result | None:
    """Read a small file."""
    return _read(call, arguments, _AT_ONCE, call.plan.data)


async def run(call: Call, arguments: Arguments) -> Result:
    """Read."""
    return _read(call, arguments, _DIRECT) or await asyncio.to_thread(_read_all, call, arguments)


def _read(
    call: Call, arguments: Arguments, only_below: int | None, opened: Opened | None = None
) -> Result | None:
    path, offset, limit = call.plan.resource, arguments.offset, arguments.limit
    try:
        found = call.env.workspace.read_within(
            path, offset, limit, max_bytes=_MOST, only_below=only_below, opened=opened, as_agent=True
        )
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    if found is None:
        return None
    return Result(data=found.data, size_bytes=found.size_bytes, version=found.version)


def _read_all(call: Call, arguments: Arguments) -> Result:
    found = _read(call, arguments, None)
    if found is None:
        raise errors.Internal(f"`{call.plan.resource}` could not be read; report this")
    return found
