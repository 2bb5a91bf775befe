"""fs.search: files below a directory by name and content, without those that the agent may not read."""

from __future__ import annotations

import threading

import msgspec
from ringfence.sandbox.names import WORKSPACE
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import errors, fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.fs_common import SearchMatch


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of fs.search. An empty path is the workspace."""

    path: str = ""
    glob: str = ""
    text: str = ""
    limit: int = 0


class Result(msgspec.Struct, frozen=True):
    """Result of fs.search."""

    matches: list[SearchMatch] = []
    withheld: int = 0
    truncated: bool = False


def plan(arguments: Arguments, env: Env) -> Plan:
    """Resolve the directory."""
    if arguments.limit < 0:
        raise errors.InvalidRequest("`limit` can't be negative; give 0 or more")
    path = fs_common.resolve(env, arguments.path or WORKSPACE)
    return Plan(resource=path, questions=(Question(action="fs.search", resource=path),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Search. Policy is asked in the event loop, between finding the names and reading the files."""
    workspace, path = call.env.workspace, call.plan.resource
    stopped = threading.Event()
    try:
        names = await fs_common.in_thread(lambda: workspace.find(path, arguments.glob, stop=stopped.is_set))
        visible = frozenset(await fs_common.visible_only(call.env, "fs.read", names))
        matches, withheld, truncated = await fs_common.in_thread(
            lambda: workspace.search(
                path,
                arguments.glob,
                arguments.text,
                arguments.limit,
                visible.__contains__,
                stop=stopped.is_set,
            )
        )
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    finally:
        stopped.set()
    return Result(
        matches=[SearchMatch(path=match.path, line=match.line, text=match.text) for match in matches],
        withheld=withheld,
        truncated=truncated,
    )
