"""fs.list: the entries of one directory, without those that policy withholds."""

from __future__ import annotations

import msgspec
from ringfence.sandbox.names import WORKSPACE
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.fs_common import FileInfo


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of fs.list. An empty path is the workspace."""

    path: str = ""


class Result(msgspec.Struct, frozen=True):
    """Result of fs.list."""

    entries: list[FileInfo] = []
    withheld: int = 0


def plan(arguments: Arguments, env: Env) -> Plan:
    """Resolve the directory."""
    path = fs_common.resolve(env, arguments.path or WORKSPACE)
    return Plan(resource=path, questions=(Question(action="fs.list", resource=path),))


async def run(call: Call, arguments: Arguments) -> Result:
    """List."""
    del arguments  # the plan holds the resolved path
    try:
        found = await fs_common.in_thread(lambda: call.env.workspace.list(call.plan.resource, as_agent=True))
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    visible = set(await fs_common.visible_only(call.env, "fs.list", [info.path for info in found]))
    entries = [fs_common.file_info(info) for info in found if info.path in visible]
    return Result(entries=entries, withheld=len(found) - len(entries))
