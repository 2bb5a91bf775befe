"""fs.move: another name for a file, a link, or a directory with all beneath it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
from ringfence.sandbox import content
from ringfence.sandbox.names import WORKSPACE, beneath
from ringfence.sandbox.snapshots import PointManifest, PointPath
from ringfence.sandbox.usage import Usage
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import errors, fs_common
from ringfence.syscalls.base import Call, Env, Plan, Question, Rerun
from ringfence.syscalls.fs_common import Change
from ringfence.syscalls.payload import Room, exactly


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of fs.move."""

    path: str = ""
    to: str = ""


class Result(msgspec.Struct, frozen=True):
    """Result of fs.move."""

    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """What a plan found: the canonical target, and the paths it asked about."""

    to: str
    asked: frozenset[str]


def plan(arguments: Arguments, env: Env) -> Plan:
    """Resolve both paths up to their last names, and ask about everything that would move.

    A file that the agent may not read must not be moved to where it may, so reading is asked for too.
    """
    source = fs_common.resolve(env, arguments.path, follow=False)
    target = fs_common.resolve(env, arguments.to, follow=False)
    if WORKSPACE in {source, target}:
        raise errors.InvalidRequest("the workspace itself can't be moved or replaced; name what is in it")
    if beneath(target, source):
        raise errors.InvalidRequest(
            f"`{source}` can't be moved to itself or below itself; choose another target"
        )
    try:
        found = list(islice(_moved(env, source), fs_common.FIRST_QUESTIONS))
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    questions = tuple(
        question for path, directory in found for question in _ask(path, directory, source, target)
    )
    moved = _Moved(to=target, asked=frozenset(path for path, _ in found))
    return Plan(resource=source, questions=questions, data=moved)


def room(call: Call, arguments: Arguments) -> Room:
    """The path, with what JSON may make of it."""
    del arguments
    return exactly(64 + 6 * len(call.plan.data.to.encode("utf-8", "replace")))


def _moved(env: Env, source: str) -> Iterator[tuple[str, bool]]:
    directory = env.workspace.stat(source).kind == "directory"
    yield source, directory
    if directory:
        yield from env.workspace.names(source)


def _ask(path: str, directory: bool, source: str, target: str) -> list[Question]:
    questions = [
        Question(action="fs.move", resource=path),
        Question(action="fs.write", resource=target + path[len(source) :]),
    ]
    if not directory:
        questions.append(Question(action="fs.read", resource=path))
    return questions


async def run(call: Call, arguments: Arguments) -> Result:
    """Move behind a rollback point."""
    env, source = call.env, call.plan.resource
    moved: _Moved = call.plan.data

    def prepare() -> Change:
        fs_common.resolve_again(env, arguments.path, source, follow=False)
        fs_common.resolve_again(env, arguments.to, moved.to, follow=False)
        if env.workspace.fingerprint(moved.to) != content.ABSENT:
            raise WorkspaceError(
                "Conflict", f"`{moved.to}` exists already; remove it first or choose another name"
            )
        parents = fs_common.new_parents(env, moved.to)
        names = [path for path, _ in _moved(env, source)]
        targets = [moved.to + path[len(source) :] for path in names]
        return Change(
            paths=[*parents, *names, *targets],
            expect=lambda entries: _expected(entries, parents, source, moved.to),
            effect=lambda: env.workspace.move(source, moved.to),
            grows=Usage(entries=len(parents)),
            extra={"path": source, "to": moved.to},
        )

    async with env.lock():
        try:
            names = await fs_common.in_thread(lambda: list(_moved(env, source)))
        except WorkspaceError as error:
            raise fs_common.refusal(error) from error
        # INVARIANT: every path that moves was judged, also one that came after the plan was made.
        late = [each for each in names if each[0] not in moved.asked]
        await fs_common.require_all(
            call,
            [question for path, directory in late for question in _ask(path, directory, source, moved.to)],
        )
        await fs_common.protected(call, prepare)
    return Result(path=moved.to)


def _expected(
    entries: Sequence[PointPath], parents: Mapping[str, str], source: str, target: str
) -> Mapping[str, str]:
    expect = dict(parents)
    for entry in entries:
        if beneath(entry.path, source):
            expect[entry.path] = content.ABSENT
            expect[target + entry.path[len(source) :]] = entry.before
    return expect


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Say what became of a move that a crash cut off."""
    del arguments  # the point holds the paths
    env = call.env

    def finish(manifest: PointManifest) -> None:
        source, target = manifest.extra["path"], manifest.extra["to"]
        # Where the file system can't rename without replacing, a file has both names for an instant.
        if env.workspace.fingerprint(target) == content.ABSENT:
            env.workspace.move(source, target)
        else:
            env.workspace.delete(source, recursive=False)

    settled = await fs_common.settle(call, finish)
    return settled if isinstance(settled, Rerun) else Result(path=settled.extra["to"])
