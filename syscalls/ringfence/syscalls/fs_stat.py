"""fs.stat: the facts of one path, a link itself included."""

from __future__ import annotations

import msgspec
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.fs_common import FileInfo


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of fs.stat."""

    path: str = ""


class Result(msgspec.Struct, frozen=True):
    """Result of fs.stat."""

    info: FileInfo


def plan(arguments: Arguments, env: Env) -> Plan:
    """Resolve the path up to its last name."""
    path = fs_common.resolve(env, arguments.path, follow=False)
    return Plan(resource=path, questions=(Question(action="fs.stat", resource=path),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Describe."""
    del arguments  # the plan holds the resolved path
    try:
        return Result(info=fs_common.file_info(call.env.workspace.stat(call.plan.resource, as_agent=True)))
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
