"""The changes that a command of exec.run left: judged, protected, asked about, applied all or not at all."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from ringfence.policy.types import Verdict
from ringfence.sandbox import changes as overlay
from ringfence.sandbox.changes import Change, ChangesError, ChangeSet
from ringfence.sandbox.content import is_between
from ringfence.sandbox.names import shown
from ringfence.sandbox.snapshots import PointManifest, SnapshotError
from ringfence.sandbox.usage import changed
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import errors, fs_common
from ringfence.syscalls.base import Call, Effect, Env, Question
from ringfence.syscalls.redaction import Redactor, redactor_for
from ringfence.syscalls.refusals import outcome_unknown

_MOST_RECORDED = 1000
_MOST_COVERS = 256
_MOST_DIFFED = 50
_BEGUN = "begun"
_MOST_DIFF_CHARS = 64 << 10


class Record(msgspec.Struct, frozen=True):
    """What the journal keeps before anything is applied.

    Attributes:
        point: rollback point that holds the change set, and before- and after-fingerprints of every path.
        changes: the change set for people; only its size where it is very long.
        base: fingerprint of each path before.
    """

    point: str
    result: msgspec.Raw
    changes: list[tuple[str, str]]
    base: dict[str, str]
    count: int


def questions_of(changes: ChangeSet) -> list[Question]:
    """What policy has to allow: every written path as fs.write, every removed one as fs.delete."""
    questions = [Question(action="fs.write", resource=path) for path in changes.written]
    return questions + [Question(action="fs.delete", resource=path) for path in changes.removed]


async def read(call: Call, upper: Path, look: Callable[[], ChangeSet] | None = None) -> ChangeSet:
    """Read the change set.

    Args:
        call: whose it is.
        upper: the upper layer.
        look: reads it; None: it is all that differs from the live workspace.

    Raises:
        Denied: something in it never enters a workspace.
    """

    def read() -> ChangeSet:
        overlay.sync_upper(upper)
        return look() if look is not None else overlay.read_changes(upper, call.env.workspace.root)

    changes = await fs_common.in_thread(read)
    for change in changes.changes:
        _refuse_special(change)
    return changes


async def verdicts_on(call: Call, changes: ChangeSet) -> set[Verdict]:
    """Put every path of a change set to policy; one deny refuses all.

    Raises:
        Denied: a rule.
    """
    verdicts = await fs_common.judge_all(call, questions_of(changes))
    if changes.removed:
        call.raise_effect(Effect.DESTROY)
    return verdicts


def _refuse_special(change: Change) -> None:
    if change.kind == "remove":
        return
    what = f"a {change.node}" if change.node not in {"file", "directory", "link"} else ""
    if change.setid:
        what = "a file with the set-user-id or set-group-id bit"
    if what:
        raise errors.Denied(
            f"the command left {what} at `{shown(change.path)}`, which no workspace may hold; nothing was applied",
            rule="",
        )


async def protect(call: Call, upper: Path, changes: ChangeSet) -> PointManifest:
    """Take the point, with what recovery needs to apply the changes to the end."""

    def capture() -> PointManifest:
        return call.env.snapshots.capture(
            f"p{call.step}",
            call.env.workspace,
            changes.paths(),
            expect=overlay.expected(upper, changes),
            extra={"changes": changes.to_json()},
            beneath=False,
        )

    try:
        manifest = await fs_common.in_thread(capture)
    except (SnapshotError, OSError) as error:
        raise errors.SnapshotFailed(f"no rollback point, so nothing was applied: {error}") from error
    call.add_point(covers_of(manifest), "workspace", manifest.size_bytes)
    return manifest


async def admit(call: Call, upper: Path, changes: ChangeSet, manifest: PointManifest) -> None:
    """Look whether the workspace may hold what the changes make of it. The caller holds its lock.

    Raises:
        CallFailed: it may not; nothing was applied.
    """

    def look() -> None:
        call.env.meter.admit(changed(upper, changes, manifest.paths))

    try:
        await fs_common.in_thread(look)
    except WorkspaceError as error:
        raise errors.CallFailed(f"{error}; nothing was applied") from error


def covers_of(manifest: PointManifest) -> list[str]:
    """What people see that a point covers: all paths, or the outermost ones where that would be too many."""
    paths = [entry.path for entry in manifest.paths]
    if len(paths) <= _MOST_COVERS:
        return paths
    known = set(paths)
    return [path for path in paths if path.rpartition("/")[0] not in known]


def record_of(call: Call, result: msgspec.Struct, changes: ChangeSet, manifest: PointManifest) -> Record:
    """What the journal keeps of a change set before anything is applied."""
    hide = redactor_for(call.env, ())
    short = len(changes.changes) <= _MOST_RECORDED
    return Record(
        point=f"p{call.step}",
        result=msgspec.Raw(msgspec.json.encode(result)),
        changes=[(change.kind, hide.text(change.path)) for change in changes.changes] if short else [],
        base={hide.text(entry.path): entry.before for entry in manifest.paths} if short else {},
        count=len(changes.changes),
    )


async def _apply(call: Call, upper: Path, changes: ChangeSet, manifest: PointManifest) -> None:
    """Apply all, or put back what was applied.

    Raises:
        CallFailed: it could not be applied, and everything is as it was.
        OutcomeUnknown: nor could it be put back.
    """
    env = call.env
    env.snapshots.touch(manifest.point)

    try:
        await fs_common.in_thread(lambda: apply_all(env, upper, changes), effect=True)
    except ChangesError as error:
        env.meter.forget()
        try:
            await fs_common.in_thread(lambda: _put_back(env, manifest), effect=True)
        except SnapshotError as worse:
            what = (
                f"the changes were applied in part ({error}) and could not be put back ({worse}); put the rest back: "
                f"ringfence rollback {env.agent} --to {manifest.point}, or mend it by hand"
            )
            raise outcome_unknown(call, what) from worse
        raise errors.CallFailed(f"{error}; nothing was changed") from error


def apply_all(env: Env, upper: Path, changes: ChangeSet) -> None:
    """Apply a change set to the live workspace; may be run again from the start.

    Raises:
        ChangesError: it can't be applied.
    """
    _mark_begun(upper)
    overlay.apply_changes(upper, env.workspace.root, changes, uid=env.uid)


def _put_back(env: Env, manifest: PointManifest) -> None:
    for path, reason in fs_common.put_back(env, manifest).items():
        raise SnapshotError(f"`{shown(path)}`: {reason}")


def _mark_begun(upper: Path) -> None:
    """Say that the workspace is about to change: from here on its paths may be between before and after.

    It need not be durable: after a crash of the machine that lost it, a path between the two is an unknown outcome.
    """
    begun_file(upper).touch()


def begun_file(upper: Path) -> Path:
    """What lies beside an upper layer from when its changes begin to be applied."""
    return upper.parent / _BEGUN


def has_begun(call: Call) -> bool:
    """Whether the changes of a call began to be applied."""
    layer = call.env.direct
    scratch = call.env.scratch_root / f"p{call.step}" if layer is None else layer.place
    return (scratch / _BEGUN).exists()


def load(call: Call, point: str) -> PointManifest:
    """The point that holds a recorded change set.

    Raises:
        OutcomeUnknown: it can't be read or is gone.
    """
    try:
        manifest = call.env.snapshots.load(point)
    except SnapshotError as error:
        raise outcome_unknown(call, f"can't tell whether step {call.step} happened: {error}") from error
    if manifest is None:
        raise outcome_unknown(call, f"the rollback point of step {call.step} is gone")
    return manifest


def compare(call: Call, manifest: PointManifest) -> tuple[bool, bool]:
    """Whether all paths are as the command left them, and whether all are as they were. Of times alone both are said."""
    done = untouched = True
    begun = has_begun(call)
    for entry in manifest.paths:
        try:
            current = call.env.workspace.fingerprint(entry.path)
        except WorkspaceError as error:
            what = f"can't tell what became of `{shown(entry.path)}`: {error}"
            raise outcome_unknown(call, what) from error
        after = manifest.expect.get(entry.path, entry.before)
        if current not in {entry.before, after} and not (begun and is_between(current, entry.before, after)):
            name = shown(entry.path)
            what = f"`{name}` is neither as it was before the crash nor as the command left it; look at it"
            raise outcome_unknown(call, what, path=name)
        done = done and current == after
        untouched = untouched and current == entry.before
    return done, untouched


async def commit_staged(call: Call, scratch: Path, changes: ChangeSet, manifest: PointManifest) -> None:
    """Ask a person about staged changes, then apply them if the workspace is still what they were made from."""
    upper = scratch / "upper"
    await call.confirm(questions_of(changes), detail=_detail(call, changes, upper))
    async with call.env.lock():
        if await fs_common.in_thread(lambda: _in_already(call, manifest)):
            return  # an approval that a crash cut off after the changes were in
        _, untouched = await fs_common.in_thread(lambda: compare(call, manifest))
        if untouched:  # otherwise a crash left them half in, and they have to go in whole
            await admit(call, upper, changes, manifest)
        try:
            await commit(call, upper, changes, manifest)
        except ChangesError as error:
            raise errors.CallFailed(str(error)) from error


def _in_already(call: Call, manifest: PointManifest) -> bool:
    """Whether all staged changes are in. Where a crash left them half in, they are applied to the end.

    Raises:
        Conflict: a path is neither as it was nor as the command left it, and nothing was applied.
        OutcomeUnknown: the same, and a part was applied.
    """
    try:
        done, untouched = compare(call, manifest)
    except errors.OutcomeUnknown:
        if any(_changed_to(call, entry.path, entry.before, manifest) for entry in manifest.paths):
            raise
        raise errors.Conflict(
            "the workspace changed while the changes waited for approval; nothing was applied: run the command again"
        ) from None
    # Where times are all that changes, nobody can tell: they are set again.
    return done and not untouched


def _changed_to(call: Call, path: str, before: str, manifest: PointManifest) -> bool:
    after = manifest.expect.get(path, before)
    return after != before and call.env.workspace.fingerprint(path) == after


def _detail(call: Call, changes: ChangeSet, upper: Path) -> dict[str, Any]:
    """What a person is shown, and the journal keeps: every change, and a diff of short texts; without credentials."""
    hide = redactor_for(call.env, ())
    listed = changes.changes[:_MOST_RECORDED]
    parts = [_text_diff(call.env, upper, change, hide) for change in listed[:_MOST_DIFFED]]
    return {
        "command": call.plan.resource,
        "changes": hide.value([_shown_change(upper, change) for change in listed]),
        "touches": len(changes.changes),
        "diff": "".join(parts)[:_MOST_DIFF_CHARS],
    }


async def commit(call: Call, upper: Path, changes: ChangeSet, manifest: PointManifest) -> None:
    """Apply a change set behind its point, after one last look at policy and lease."""
    await call.failpoint("before_apply")
    await call.check_live()
    grows = await fs_common.in_thread(lambda: changed(upper, changes, manifest.paths))
    await _apply(call, upper, changes, manifest)
    call.env.meter.add(grows)
    await call.failpoint("after_apply")


def _shown_change(upper: Path, change: Change) -> dict[str, Any]:
    shown_change = {"kind": change.kind, "path": change.path, "node": change.node}
    target = overlay.link_target(upper, change)
    return shown_change if target is None else {**shown_change, "target": target}


def _text_diff(env: Env, upper: Path, change: Change, hide: Redactor) -> str:
    """A unified diff of one change; empty where a side is no short text."""
    if change.node != "file" and change.kind != "remove":
        return ""
    try:
        old, new = b"", b""
        if change.kind != "create":
            old = env.workspace.read(change.path, limit=_MOST_DIFF_CHARS + 1).data
        if change.kind != "remove":
            new = overlay.content_of(upper, change, _MOST_DIFF_CHARS) or b""
        if len(old) > _MOST_DIFF_CHARS:
            return ""
        # INVARIANT: each side is searched before they are compared: a diff puts a sign between the lines of one.
        sides = [hide.text(side.decode()).splitlines(keepends=True) for side in (old, new)]
    except (OSError, UnicodeDecodeError, WorkspaceError):
        return ""
    path = hide.text(change.path)
    return "".join(difflib.unified_diff(sides[0], sides[1], f"now{path}", f"then{path}"))
