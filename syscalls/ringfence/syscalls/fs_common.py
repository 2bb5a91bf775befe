"""What the fs.* bodies share: refusals, the order of a protected change, and what recovery makes of one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from ringfence.policy.types import Verdict
from ringfence.sandbox import content
from ringfence.sandbox.content import is_between
from ringfence.sandbox.names import parent, shown
from ringfence.sandbox.records import PathInfo
from ringfence.sandbox.snapshots import PointManifest, PointPath, SnapshotError
from ringfence.sandbox.usage import Usage, removed
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import errors
from ringfence.syscalls.base import Call, Env, Question, Rerun
from ringfence.syscalls.refusals import outcome_unknown

T = TypeVar("T")

FIRST_QUESTIONS = 20_000
"""Paths beneath a directory that a plan asks about; `run` asks about the rest under the workspace's lock."""
_MOST_COVERS = 256  # paths that the journal names for one point
_BATCH = 256  # questions between two turns of the event loop


class FileInfo(msgspec.Struct, frozen=True):
    """One path, as `FileInfo` of the protocol."""

    path: str = ""
    kind: str = ""
    size_bytes: int = 0
    mode: int = 0
    modified_at: str = ""
    target: str = ""


class SearchMatch(msgspec.Struct, frozen=True):
    """One hit, as `SearchMatch` of the protocol."""

    path: str = ""
    line: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the workspace that is about to run.

    Attributes:
        paths: canonical paths whose before-images are taken.
        expect: fingerprint each is expected to have afterwards, or how to find it from the before-images.
        effect: does it; returns what the result is made of.
        beneath: whether a directory among the paths stands for all beneath it.
        grows: what it makes of the size of the workspace; None: all of the paths go.
        extra: kept in the point for recovery.
    """

    paths: Sequence[str]
    expect: Mapping[str, str] | Callable[[Sequence[PointPath]], Mapping[str, str]]
    effect: Callable[[], Any]
    grows: Usage | None
    beneath: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


_REASONS: dict[str, type[errors.SyscallError]] = {
    "InvalidRequest": errors.InvalidRequest,
    "NoSuchResource": errors.NoSuchResource,
    "Conflict": errors.Conflict,
    "NoSpace": errors.CallFailed,
    "Failed": errors.CallFailed,
    "Internal": errors.Internal,
}


def refusal(error: WorkspaceError) -> errors.SyscallError:
    """Turn the workspace's error into the syscall's: the one place where that is decided."""
    return _REASONS.get(error.reason, errors.Internal)(str(error))


def resolve(env: Env, path: str, *, follow: bool = True) -> str:
    """Give the canonical path, or raise the syscall's error."""
    try:
        return env.workspace.canonical(path, follow=follow)
    except WorkspaceError as error:
        raise refusal(error) from error


def resolve_again(env: Env, path: str, decided: str, *, follow: bool = True) -> None:
    """Make sure, under the workspace's lock, that a path still is the one that was decided on.

    Raises:
        Conflict: it resolves to another path now.
    """
    now = resolve(env, path, follow=follow)
    if now != decided:
        raise errors.Conflict(
            f"`{shown(path)}` resolved to `{shown(decided)}` and is `{shown(now)}` now; call again"
        )


def is_sayable(path: str) -> bool:
    """Whether a path can be put into a message: names that are not UTF-8 can't."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def file_info(info: PathInfo) -> FileInfo:
    """Put a path's facts into the protocol's form."""
    seconds, nanos = divmod(info.modified_ns, 1_000_000_000)
    try:
        moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        modified_at = f"{moment}.{nanos // 1000:06d}Z"
    except (OverflowError, ValueError, OSError):  # a time that no calendar has
        modified_at = ""
    target = info.target.encode("utf-8", "replace").decode()
    return FileInfo(
        path=info.path,
        kind=info.kind,
        size_bytes=info.size_bytes,
        mode=info.mode,
        modified_at=modified_at,
        target=target,
    )


async def in_thread(function: Callable[[], T], *, effect: bool = False) -> T:
    """Run blocking work in a thread and never leave it running behind: a cancelled caller waits for its end.

    Args:
        function: the work.
        effect: it changes the world: then its result counts even when the caller was cancelled meanwhile, because the
            record must say what happened.
    """
    future = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if effect:
            return future.result()
        future.exception()
        raise


async def visible_only(env: Env, action: str, paths: Sequence[str]) -> list[str]:
    """Those paths that policy lets the agent see, without holding the event loop for long."""
    seen: list[str] = []
    for number, path in enumerate(paths, 1):
        if is_sayable(path) and env.visible(action, path):
            seen.append(path)
        if number % _BATCH == 0:
            await asyncio.sleep(0)
    return seen


async def require_all(call: Call, questions: Sequence[Question]) -> None:
    """`call.require` in pieces, without holding the event loop for long."""
    for start in range(0, len(questions), _BATCH):
        await call.require(questions[start : start + _BATCH])
        await asyncio.sleep(0)


async def judge_all(call: Call, questions: Sequence[Question]) -> set[Verdict]:
    """`call.judge` in pieces, without holding the event loop for long.

    Raises:
        Denied: the first deny.
    """
    verdicts: set[Verdict] = set()
    for start in range(0, len(questions), _BATCH):
        part = questions[start : start + _BATCH]
        found = await call.judge(part)
        if Verdict.DENY in found:
            await _refuse(call, part[list(found).index(Verdict.DENY)])
            await call.require(part)
        verdicts.update(found)
        await asyncio.sleep(0)
    return verdicts


async def _refuse(call: Call, question: Question) -> None:
    """Raise what one question is denied for, and say which it was.

    Raises:
        Denied: a rule.
    """
    try:
        await call.require([question])
    except errors.SyscallError as error:
        error.metadata |= {"action": question.action, "path": shown(str(question.resource))}
        raise


async def protected(call: Call, prepare: Callable[[], Change]) -> Any:
    """Run a change behind its rollback point. The caller holds the workspace's lock.

    Args:
        call: the call in flight.
        prepare: looks at the workspace and says what will be done; runs in a thread.

    Returns:
        What the change's effect returned.

    Raises:
        SnapshotFailed: no verified point; nothing changed.
        SyscallError: the workspace refuses; nothing changed.
    """

    def capture() -> tuple[Change, PointManifest]:
        change = prepare()
        if change.grows is not None:
            call.env.meter.admit(change.grows)
        store = call.env.snapshots
        manifest = store.capture(
            f"p{call.step}",
            call.env.workspace,
            change.paths,
            expect=change.expect,
            extra=change.extra,
            beneath=change.beneath,
        )
        return change, manifest

    try:
        change, manifest = await in_thread(capture)
    except WorkspaceError as error:
        raise refusal(error) from error
    except SnapshotError as error:
        raise errors.SnapshotFailed(f"no rollback point, so nothing was changed: {error}") from error
    call.add_point(_covers(manifest), "workspace", manifest.size_bytes)
    await call.failpoint("before_effect")
    await call.check_live()
    try:
        done = await in_thread(change.effect, effect=True)
    except WorkspaceError as error:
        call.env.meter.forget()
        await _undo_part(call, manifest, error)
        raise refusal(error) from error
    call.env.meter.add(removed(manifest.paths) if change.grows is None else change.grows)
    await call.failpoint("after_effect")
    return done


async def _undo_part(call: Call, manifest: PointManifest, error: WorkspaceError) -> None:
    """Put back what a change that failed in the middle had done, such as directories made for a file that found no room.

    Raises:
        OutcomeUnknown: it can't be put back.
    """
    try:
        await in_thread(lambda: put_back(call.env, manifest), effect=True)
    except SnapshotError as worse:
        what = (
            f"the change failed in the middle ({error}) and could not be put back ({worse}); put the rest back: "
            f"ringfence rollback {call.env.agent} --to {manifest.point}, or mend it by hand"
        )
        raise outcome_unknown(call, what) from worse


def put_back(env: Env, manifest: PointManifest) -> Mapping[str, str]:
    """Bring all paths of a point back, also those that an effect left between two states.

    Returns:
        Those that others changed meanwhile, which stay, each with the reason.

    Raises:
        SnapshotError: they can't be brought back.
    """
    restored = env.snapshots.plan_restore(env.workspace, [manifest.point], torn=True)
    if restored.items:
        env.snapshots.restore(env.workspace, restored.items)
    return restored.reasons


async def settle(call: Call, finish: Callable[[PointManifest], None]) -> PointManifest | Rerun:
    """Find out, after a crash, whether a protected change happened, and finish one that happened in part.

    Args:
        call: the call in flight; its rollback point says what was and what should be.
        finish: completes the change when every path is as it was or as it should be; runs in a thread.

    Returns:
        The point when the change is done, `RERUN` when nothing of it happened.

    Raises:
        OutcomeUnknown: a path is neither as it was nor as it should be, or the point is damaged.
    """
    env = call.env
    try:
        manifest = await in_thread(lambda: env.snapshots.load(f"p{call.step}"))
    except SnapshotError as error:
        raise outcome_unknown(call, f"can't tell whether step {call.step} happened: {error}") from error
    if manifest is None:
        return Rerun.RERUN
    async with env.lock():
        try:
            done, untouched = await in_thread(lambda: _compare(call, manifest))
            if untouched and not done:
                return Rerun.RERUN
            env.snapshots.touch(manifest.point)
            if not done:
                await call.check_live()
                env.meter.forget()
                await in_thread(lambda: finish(manifest), effect=True)
                done, _ = await in_thread(lambda: _compare(call, manifest))
                if not done:
                    raise outcome_unknown(call, f"step {call.step} could not be finished")
        except WorkspaceError as error:
            raise outcome_unknown(call, f"can't tell whether step {call.step} happened: {error}") from error
    call.add_point(_covers(manifest), "workspace", manifest.size_bytes)
    return manifest


def _covers(manifest: PointManifest) -> list[str]:
    """What people see that a point covers: all paths, or the outermost ones where that would be too many."""
    paths = [entry.path for entry in manifest.paths]
    if len(paths) <= _MOST_COVERS:
        return paths
    known = set(paths)
    return [path for path in paths if parent(path) not in known]


def _compare(call: Call, manifest: PointManifest) -> tuple[bool, bool]:
    """Whether all paths are as they should be, and whether all are as they were."""
    done = untouched = True
    for entry in manifest.paths:
        current = call.env.workspace.fingerprint(entry.path)
        expected = manifest.expect.get(entry.path, entry.before)
        if current not in {expected, entry.before} and not is_between(current, entry.before, expected):
            name = shown(entry.path)
            what = f"`{name}` is neither as it was before the crash nor as the call would have left it; look at it"
            raise outcome_unknown(call, what, path=name)
        done = done and current == expected
        untouched = untouched and current == entry.before
    return done, untouched


def new_parents(env: Env, path: str) -> dict[str, str]:
    """The directories that writing to a path would make, with the fingerprint they will have."""
    made = content.directory_fingerprint(0o755, {})
    return dict.fromkeys(env.workspace.missing_parents(path), made)


def expect_file(
    parents: Mapping[str, str], mode: int, digest: str
) -> Callable[[Sequence[PointPath]], Mapping[str, str]]:
    """What a file that is written will be, the last of the paths, which keeps its attributes, and what the directories made for it."""
    return lambda entries: {
        **parents,
        entries[-1].path: content.file_fingerprint(mode, digest, entries[-1].xattrs),
    }
