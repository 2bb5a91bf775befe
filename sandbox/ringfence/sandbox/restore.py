"""Bringing paths back: what it would do, and doing it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ringfence.sandbox import content, openat
from ringfence.sandbox.blobs import BlobStore, Underway
from ringfence.sandbox.capture import capture_directory
from ringfence.sandbox.names import WORKSPACE, beneath, parent, shown
from ringfence.sandbox.points import PointManifest, PointPath, RestoreItem, RestorePlan, SnapshotError
from ringfence.sandbox.staging import Staging, dress, same_facts
from ringfence.sandbox.tree import SYNC_ONE_BY_ONE, Tree
from ringfence.sandbox.workspace import Workspace

Torn = Callable[[str], bool]

_BETWEEN = "changed by something else between two of these calls; go back to a later step to have that"


@dataclasses.dataclass(slots=True)
class _Merged:
    """Several points' view of one path: the oldest before-image, and the states the newest call may have left.

    `others`: whether somebody else changed it between two of the calls.
    """

    before: PointPath
    accepted: frozenset[str]
    others: bool = False

    def is_between(self, current: str) -> bool:
        return any(content.is_between(current, self.before.before, state) for state in self.accepted)


def _merge(manifests: Sequence[PointManifest], path: str | None) -> tuple[dict[str, _Merged], dict[str, int]]:
    """Collapse points in order from the newest; also the oldest known times of the directories around the paths."""
    merged: dict[str, _Merged] = {}
    times: dict[str, int] = {}
    for manifest in manifests:
        for entry in manifest.paths:
            if path is not None and not beneath(entry.path, path):
                continue
            above = parent(entry.path)
            if above in manifest.parents:
                times[above] = manifest.parents[above]
                around = merged.get(above)
                if around is not None and around.before.kind == "directory":
                    # A newer point holds the directory itself, with the time that this older call had moved.
                    around.before = dataclasses.replace(around.before, mtime_ns=times[above])
            known = merged.get(entry.path)
            # The call may have been refused after its point was taken: then its before-image still stands.
            left = frozenset({manifest.expect.get(entry.path, entry.before), entry.before})
            if known is None:
                merged[entry.path] = _Merged(entry, left)
            else:
                known.others = known.others or known.before.before not in left
                known.before = entry
    return merged, times


def plan(
    workspace: Workspace, manifests: Sequence[PointManifest], path: str | None, torn: Torn
) -> RestorePlan:
    """Plan as `SnapshotStore.plan_restore` says, over manifests in order from the newest.

    Args:
        workspace: where the paths are.
        manifests: of points that were taken.
        path: canonical path; only it and what lies beneath.
        torn: whether a path may have been left between two states by an apply or a restore that was cut off.

    Raises:
        WorkspaceError: the workspace can't be read.
    """
    merged, times = _merge(manifests, path)
    reasons: dict[str, str] = {}
    unchanged: list[str] = []
    items: dict[str, RestoreItem] = {}
    kinds: dict[str, str] = {}
    for name in sorted(merged, key=lambda each: each.split("/")):
        view = merged[name]
        current = workspace.fingerprint(name)
        kinds[name] = current.partition(":")[0] if view.before.kind == content.ABSENT else view.before.kind
        if current == view.before.before:
            if same_facts(workspace.tree, view.before):
                unchanged.append(name)
                continue
        elif current not in view.accepted and not (torn(name) and view.is_between(current)):
            reasons[name] = "changed by something else since"
            continue
        elif view.others:
            reasons[name] = _BETWEEN
            continue
        items[name] = RestoreItem(
            path=name,
            action=_action(view.before, current),
            current=current,
            before=view.before,
            parent_mtime_ns=times.get(parent(name)),
        )
    _drop_blocked(workspace, items, reasons)
    for item in _times_alone(workspace, unchanged, times):
        if item.path not in merged:
            items[item.path], kinds[item.path] = item, "directory"
    return RestorePlan(
        items=tuple(sorted(items.values(), key=lambda item: item.path.split("/"))),
        conflicts=tuple(sorted(reasons, key=lambda each: each.split("/"))),
        unchanged=tuple(unchanged),
        reasons=reasons,
        kinds=kinds,
    )


def _times_alone(
    workspace: Workspace, unchanged: Sequence[str], times: Mapping[str, int]
) -> Iterator[RestoreItem]:
    """Directories that have nothing else to come back but their time: what was done in them was undone by itself."""
    for directory in {parent(name) for name in unchanged} & times.keys():
        facts = workspace.tree.find(directory)
        if facts is None or not stat.S_ISDIR(facts.st_mode) or facts.st_mtime_ns == times[directory]:
            continue
        now = capture_directory(workspace.tree, directory)
        before = dataclasses.replace(now, mtime_ns=times[directory])
        yield RestoreItem(path=directory, action="restore", current=now.before, before=before)


def _action(before: PointPath, current: str) -> str:
    if before.kind == content.ABSENT:
        return "remove"
    return "create" if current == content.ABSENT else "restore"


def _drop_blocked(workspace: Workspace, items: dict[str, RestoreItem], reasons: dict[str, str]) -> None:
    """Turn items into conflicts that would need others' files gone, or a directory that others took away."""
    for name in sorted(items, key=lambda each: each.count("/"), reverse=True):
        item = items[name]
        if item.before.kind == "directory" or not item.current.startswith("directory:"):
            continue
        stays = [info.path for info in workspace.list(name) if _stays(items.get(info.path))]
        if stays:
            reasons[name] = f"holds `{shown(stays[0])}`, which something else made or changed"
            del items[name]
    for name in sorted(items, key=lambda each: each.count("/")):
        above = parent(name)
        if items[name].before.kind == content.ABSENT or above == "":
            continue
        facts = workspace.tree.find(above)
        ready = facts is not None and stat.S_ISDIR(facts.st_mode)
        coming = items.get(above)
        if coming.before.kind == "directory" if coming is not None else ready:
            continue
        reasons[name] = f"its directory `{shown(above)}` was removed or replaced by something else"
        del items[name]


def _stays(item: RestoreItem | None) -> bool:
    return item is None or item.before.kind != content.ABSENT


def run(workspace: Workspace, blobs: BlobStore, items: Sequence[RestoreItem], underway: Underway) -> None:
    """Restore as `SnapshotStore.restore` says; the items' content is verified already.

    Args:
        workspace: where the paths are.
        blobs: content.
        items: what to do.
        underway: remembers what is being touched.

    Raises:
        SnapshotError: a path changed since the plan; nothing was touched.
        OSError: the disk.
    """
    tree = workspace.tree
    cut_off = underway.paths()
    going = {item.path for item in items if item.before.kind == content.ABSENT}
    for item in items:
        current = workspace.fingerprint(item.path)
        if current.startswith("directory:") and item.before.kind != "directory":
            # INVARIANT: a directory goes with nothing in it that the plan doesn't know: no point has that.
            for info in workspace.list(item.path):
                if info.path not in going:
                    raise _changed(info.path)
        if current in {item.current, item.before.before}:
            continue
        if not (item.path in cut_off and content.is_between(current, item.before.before, item.current)):
            raise _changed(item.path)
    with contextlib.ExitStack() as stack:
        one_by_one = len(items) <= SYNC_ONE_BY_ONE
        staging = Staging(workspace, blobs, sync=one_by_one)
        stack.callback(staging.clear)
        staging.add([item.before for item in items if item.before.kind in {"file", "link"}])
        if staging.names and not one_by_one:
            openat.sync_filesystem(tree.staging_fd)
        torn = {item.path for item in items if item.current != item.before.before}
        unlocked = _Unlocked(tree, underway.modes())
        modes = unlocked.needed(parent(item.path) for item in items if item.path != WORKSPACE)
        underway.begin(cut_off | torn, modes)
        stack.callback(unlocked.lock)
        _apply(tree, items, staging.names, unlocked)
    touched = {parent(item.path) for item in items} - {""}
    tree.sync_directories(touched | {item.path for item in items if item.before.kind == "directory"})
    underway.end()


def _changed(path: str) -> SnapshotError:
    return SnapshotError(f"`{shown(path)}` changed since the plan was made; plan the rollback again")


def settle(workspace: Workspace, underway: Underway) -> None:
    """Give directories their bits back that a restore which was cut off had opened: nothing else of it is left.

    Raises:
        SnapshotError: nobody knows what it had touched.
        OSError: the disk.
    """
    modes = underway.modes()
    if modes or underway.paths():
        _Unlocked(workspace.tree, modes).lock()
        underway.end()


class _Unlocked:
    """Directories made writable for a while, for a kernel that is not root.

    Args:
        tree: where they are.
        before: bits of those that a restore which was cut off had opened.
    """

    def __init__(self, tree: Tree, before: Mapping[str, int]) -> None:
        self._tree = tree
        self._modes = {name: mode for name, mode in before.items() if self._now(name) == mode | stat.S_IRWXU}

    def _now(self, directory: str) -> int | None:
        facts = self._tree.find(directory)
        return None if facts is None or not stat.S_ISDIR(facts.st_mode) else stat.S_IMODE(facts.st_mode)

    def needed(self, directories: Iterable[str]) -> dict[str, int]:
        """Bits of all that are open, or have to be opened for a change in these."""
        found = dict(self._modes)
        for directory in set(directories):
            mode = self._now(directory)
            if mode is not None and os.geteuid() != 0 and mode & stat.S_IRWXU != stat.S_IRWXU:
                found.setdefault(directory, mode)
        return found

    def unlock(self, directory: str) -> None:
        for name, mode in self.needed([directory]).items():
            if name == directory and name not in self._modes:
                self._modes[name] = mode
                self._set(name, mode | stat.S_IRWXU)

    def lock(self) -> None:
        while self._modes:
            directory, mode = self._modes.popitem()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._set(directory, mode)

    def forget(self, directory: str) -> None:
        self._modes.pop(directory, None)

    def _set(self, directory: str, mode: int) -> None:
        handle = self._tree.open(directory, openat.LOOK | os.O_DIRECTORY)
        try:
            openat.chmod_handle(handle, mode)
        finally:
            os.close(handle)


def _apply(
    tree: Tree, items: Sequence[RestoreItem], staged: Mapping[str, bytes], unlocked: _Unlocked
) -> None:
    """Remove what is in the way from the deepest up, then make and place from the top down, then dress directories."""
    top_down = sorted(items, key=lambda item: item.path.split("/"))
    for item in top_down:
        if item.path != WORKSPACE:
            unlocked.unlock(parent(item.path))
    for item in reversed(top_down):
        if _in_the_way(tree, item):
            tree.remove(item.path, sync=False)
            unlocked.forget(item.path)
    for item in top_down:
        if item.before.kind == "directory" and tree.find(item.path) is None:
            tree.make_directory(item.path, 0o700, sync=False)
        elif item.path in staged:
            tree.place(staged[item.path], item.path, sync=False)
    unlocked.lock()
    _set_directories(tree, top_down)


def _in_the_way(tree: Tree, item: RestoreItem) -> bool:
    facts = tree.find(item.path)
    if facts is None:
        return False
    if item.before.kind == content.ABSENT:
        return True
    # A file or link is replaced by the rename itself; only a directory has to go first, or make room for none.
    return stat.S_ISDIR(facts.st_mode) != (item.before.kind == "directory")


def _set_directories(tree: Tree, top_down: Sequence[RestoreItem]) -> None:
    times: dict[str, int] = {}
    for item in top_down:
        if item.parent_mtime_ns is not None:
            times[parent(item.path)] = item.parent_mtime_ns
    directories = {item.path: item.before for item in top_down if item.before.kind == "directory"}
    for path in sorted({*times, *directories}, key=lambda each: each.count("/"), reverse=True):
        try:
            fd = tree.open(path, openat.DIRECTORY)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                continue
            raise
        try:
            if path in directories:
                dress(fd, directories[path])
            else:
                os.utime(fd, ns=(times[path], times[path]))
        finally:
            os.close(fd)
