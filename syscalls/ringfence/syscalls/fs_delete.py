"""fs.delete: a file or link, or a directory with all beneath it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec
from ringfence.sandbox import content
from ringfence.sandbox.names import WORKSPACE, shown
from ringfence.sandbox.snapshots import PointManifest
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import errors, fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question, Rerun
from ringfence.syscalls.fs_common import Change
from ringfence.syscalls.refusals import outcome_unknown


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of fs.delete."""

    path: str = ""
    recursive: bool = False


class Result(msgspec.Struct, frozen=True):
    """Result of fs.delete."""

    removed: int = 0


def plan(arguments: Arguments, env: Env) -> Plan:
    """Resolve the path up to its last name, and ask about everything that would go."""
    path = fs_common.resolve(env, arguments.path, follow=False)
    if path == WORKSPACE:
        raise errors.InvalidRequest("the workspace itself can't be removed; name what is in it")
    try:
        doomed = list(islice(_doomed(env, path, recursive=arguments.recursive), fs_common.FIRST_QUESTIONS))
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    questions = tuple(Question(action="fs.delete", resource=each) for each in doomed)
    return Plan(resource=path, questions=questions, data=frozenset(doomed))


def _doomed(env: Env, path: str, *, recursive: bool) -> Iterator[str]:
    directory = env.workspace.stat(path).kind == "directory"
    if directory and not recursive:
        raise WorkspaceError("InvalidRequest", f"`{shown(path)}` is a directory; ask for recursive removal")
    yield path
    if directory:
        for name, _ in env.workspace.names(path):
            yield name


async def run(call: Call, arguments: Arguments) -> Result:
    """Delete behind a rollback point."""
    env, path = call.env, call.plan.resource
    asked: frozenset[str] = call.plan.data
    async with env.lock():
        try:
            doomed = await fs_common.in_thread(
                lambda: list(_doomed(env, path, recursive=arguments.recursive))
            )
        except WorkspaceError as error:
            raise fs_common.refusal(error) from error
        # INVARIANT: every path that goes was judged, also one that came after the plan was made.
        late = [Question(action="fs.delete", resource=each) for each in doomed if each not in asked]
        await fs_common.require_all(call, late)

        def prepare() -> Change:
            fs_common.resolve_again(env, arguments.path, path, follow=False)
            return Change(
                paths=doomed,
                expect=dict.fromkeys(doomed, content.ABSENT),
                effect=lambda: env.workspace.delete(path, arguments.recursive),
                grows=None,
            )

        return Result(removed=await fs_common.protected(call, prepare))


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Say what became of a removal that a crash cut off."""
    del arguments  # the point holds the paths
    settled = await fs_common.settle(call, lambda manifest: _finish(call, manifest))
    return settled if isinstance(settled, Rerun) else Result(removed=len(settled.paths))


def _finish(call: Call, manifest: PointManifest) -> None:
    """Remove what is left, and only what the point holds."""
    env = call.env
    known = {entry.path for entry in manifest.paths}
    left = [entry for entry in manifest.paths if env.workspace.fingerprint(entry.path) != content.ABSENT]
    for entry in left:
        if entry.kind == "directory":
            for name, _ in env.workspace.names(entry.path):
                if name not in known:
                    what = f"`{shown(name)}` came after the crash into a directory that was being removed; look at it"
                    raise outcome_unknown(call, what, path=shown(name))
    env.workspace.remove_each([entry.path for entry in reversed(left)])
