"""fs.write: a file's whole content, old or new, all or nothing."""

from __future__ import annotations

import hashlib

import msgspec
from ringfence.sandbox import content
from ringfence.sandbox.snapshots import PointManifest
from ringfence.sandbox.usage import written
from ringfence.syscalls import errors, fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question, Rerun
from ringfence.syscalls.fs_common import Change

_NEW_FILE_MODE = 0o644
_MOST_MODE = 0o777


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of fs.write."""

    path: str = ""
    data: bytes = b""
    mode: int = 0


class Result(msgspec.Struct, frozen=True):
    """Result of fs.write."""

    size_bytes: int = 0
    version: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Resolve the path, which need not exist."""
    if not 0 <= arguments.mode <= _MOST_MODE:
        raise errors.InvalidRequest(
            f"mode `{arguments.mode:o}` is not between 0 and 777 (octal); give permission bits only"
        )
    path = fs_common.resolve(env, arguments.path)
    return Plan(resource=path, questions=(Question(action="fs.write", resource=path),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Write behind a rollback point."""
    env, path = call.env, call.plan.resource
    mode = arguments.mode or _NEW_FILE_MODE

    def prepare() -> Change:
        fs_common.resolve_again(env, arguments.path, path)
        old = env.workspace.existing_file(path)
        parents = fs_common.new_parents(env, path)
        bits = mode if old is None else old.mode & ~content.SET_ID
        digest = hashlib.sha256(arguments.data).hexdigest()
        return Change(
            paths=[*parents, path],
            expect=fs_common.expect_file(parents, bits, digest),
            effect=lambda: env.workspace.write(path, arguments.data, mode),
            grows=written(old, len(arguments.data), len(parents)),
            extra={"path": path},
        )

    async with env.lock():
        size, version = await fs_common.protected(call, prepare)
    return Result(size_bytes=size, version=version)


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Say what became of a write that a crash cut off."""
    env = call.env

    def finish(manifest: PointManifest) -> None:
        env.workspace.write(manifest.extra["path"], arguments.data, arguments.mode or _NEW_FILE_MODE)

    settled = await fs_common.settle(call, finish)
    if isinstance(settled, Rerun):
        return settled
    size, version = await fs_common.in_thread(lambda: env.workspace.version(settled.extra["path"]))
    return Result(size_bytes=size, version=version)
