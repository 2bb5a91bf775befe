"""`object.put`: make an object of a declared resource, or another content of it."""

from __future__ import annotations

import hashlib
import io
import re
from typing import Final

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Rerun
from ringfence.syscalls.drivers.protocol import Snapshot
from ringfence.syscalls.errors import Conflict, InvalidRequest
from ringfence.syscalls.object_common import (
    CONTENT,
    DATA_BYTES_MAX,
    Target,
    change,
    content_test,
    keep,
    plan_object,
    recover_change,
)
from ringfence.syscalls.object_get import CONTENT_TYPE

METADATA_BYTES_MAX: Final = 2048
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?", re.ASCII)
_VALUE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?", re.ASCII)
_OTHERS: Final = frozenset(
    {
        *("content-type", "cache-control", "content-disposition", "content-encoding", "content-language"),
        *("storage-class", "content-length", "content-md5", "etag", "last-modified"),
    }
)


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which object, and what it becomes."""

    object: str = ""
    data: bytes = b""
    content_type: str = ""
    metadata: dict[str, str] = {}
    if_version: str = ""


class Result(msgspec.Struct, frozen=True):
    """How it stands then."""

    version: str = ""
    size_bytes: int = 0
    created: bool = False


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the resource.

    Raises:
        InvalidRequest: no object's name, too much, or metadata that no request can carry.
        NoSuchResource: no such resource.
    """
    if len(arguments.data) > DATA_BYTES_MAX:
        raise InvalidRequest(
            f"the content has {len(arguments.data)} bytes and one call carries at most {DATA_BYTES_MAX}"
        )
    _check_attributes(arguments)
    return plan_object("object.put", arguments.object, env)


def _check_attributes(arguments: Arguments) -> None:
    given = arguments.metadata
    if sum(map(len, (*given, *given.values()))) > METADATA_BYTES_MAX:
        raise InvalidRequest(f"the metadata has more than {METADATA_BYTES_MAX} bytes")
    for name, value in given.items():
        if _NAME.fullmatch(name) is None or name in _OTHERS:
            raise InvalidRequest(f"`{name[:80]}` is no name of metadata; use `a-z`, `0-9` and `-`")
        if _VALUE.fullmatch(value) is None:
            raise InvalidRequest(f"the metadata `{name}` is empty or not plain ASCII on one line")
    if arguments.content_type and _VALUE.fullmatch(arguments.content_type) is None:
        raise InvalidRequest("`content_type` is not plain ASCII on one line")


def _attributes(arguments: Arguments) -> dict[str, str]:
    return {CONTENT_TYPE: arguments.content_type or "application/octet-stream", **arguments.metadata}


async def run(call: Call, arguments: Arguments) -> Result:
    """Write behind a rollback point.

    Raises:
        SnapshotFailed: what stands there can't be kept; nothing was changed.
        Conflict: another version stands there than asked for, or others changed it meanwhile.
        CallFailed: the target refuses it, or can't be reached.
        OutcomeUnknown: nobody can tell what came of it.
    """
    target: Target = call.plan.data
    data, attributes = arguments.data, _attributes(arguments)
    before = await keep(call, target, CONTENT + hashlib.sha256(data).hexdigest())
    refuse_other(target, before, arguments.if_version)

    async def write(expect: str) -> str:
        return await target.driver.write(target.key, io.BytesIO(data), len(data), attributes, expect)

    version = await change(call, target, before, write, content_test(target, data, attributes))
    return Result(version=version, size_bytes=len(data), created=before.stat is None)


def refuse_other(target: Target, before: Snapshot, if_version: str) -> None:
    """Refuse a change of another version than the agent has seen.

    Raises:
        Conflict: another one stands there.
    """
    now = "" if before.stat is None else before.stat.version
    if if_version and if_version != now:
        raise Conflict(f"`{target.name}` is at version {now or 'none'}; nothing was changed, read it again")


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Say what became of a change that a crash cut off."""
    target: Target = plan(arguments, call.env).data
    data = arguments.data
    found = await recover_change(call, target, content_test(target, data, _attributes(arguments)))
    if isinstance(found, Rerun):
        return found
    version, before = found
    return Result(version=version, size_bytes=len(data), created=before.stat is None)
