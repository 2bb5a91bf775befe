"""fs.read: a part of a file, or all of it. The hot path: no lock and, for small files, no thread."""

from __future__ import annotations

import asyncio

import msgspec
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import errors, fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question

_DIRECT = 64 << 10  # bytes that are read in the event loop itself
_MOST = 16 << 20  # bytes of one call


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


async def run(call: Call, arguments: Arguments) -> Result:
    """Read."""
    workspace = call.env.workspace
    path, offset, limit = call.plan.resource, arguments.offset, arguments.limit
    try:
        found = workspace.read_within(path, offset, limit, max_bytes=_MOST, only_below=_DIRECT)
        if found is None:
            found = await asyncio.to_thread(workspace.read, path, offset, limit, max_bytes=_MOST)
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    return Result(data=found.data, size_bytes=found.size_bytes, version=found.version)
