"""fs.append: more content at the end of a file, all or nothing."""

from __future__ import annotations

import hashlib

import msgspec
from ringfence.sandbox import content
from ringfence.sandbox.snapshots import PointManifest
from ringfence.sandbox.usage import written
from ringfence.syscalls import fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question, Rerun
from ringfence.syscalls.fs_common import Change

_NEW_FILE_MODE = 0o644


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of fs.append."""

    path: str = ""
    data: bytes = b""


class Result(msgspec.Struct, frozen=True):
    """Result of fs.append."""

    size_bytes: int = 0
    version: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Resolve the path, which need not exist."""
    path = fs_common.resolve(env, arguments.path)
    return Plan(resource=path, questions=(Question(action="fs.append", resource=path),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Append behind a rollback point."""
    env, path = call.env, call.plan.resource

    def prepare() -> Change:
        fs_common.resolve_again(env, arguments.path, path)
        old = env.workspace.existing_file(path)
        parents = fs_common.new_parents(env, path)
        size = len(arguments.data) + (0 if old is None else old.size_bytes)
        bits = _NEW_FILE_MODE if old is None else old.mode & ~content.SET_ID
        if old is None:
            digest = hashlib.sha256(arguments.data).hexdigest()
        else:
            digest = env.workspace.content_hash(path, arguments.data)
        return Change(
            paths=[*parents, path],
            expect=fs_common.expect_file(parents, bits, digest),
            effect=lambda: env.workspace.append(path, arguments.data),
            grows=written(old, size, len(parents)),
            extra={"path": path},
        )

    async with env.lock():
        size, version = await fs_common.protected(call, prepare)
    return Result(size_bytes=size, version=version)


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Say what became of an append that a crash cut off."""
    env = call.env

    def finish(manifest: PointManifest) -> None:
        # Only the directories above can be there in part: the file itself is as it was.
        env.workspace.append(manifest.extra["path"], arguments.data)

    settled = await fs_common.settle(call, finish)
    if isinstance(settled, Rerun):
        return settled
    size, version = await fs_common.in_thread(lambda: env.workspace.version(settled.extra["path"]))
    return Result(size_bytes=size, version=version)
