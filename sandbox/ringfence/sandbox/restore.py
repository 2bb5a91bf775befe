"""Bringing paths back: what it would do, and doing it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Callable, Generator, Mapping, Sequence

from ringfence.sandbox import content, openat
from ringfence.sandbox.blobs import BlobStore
from ringfence.sandbox.names import WORKSPACE, beneath, parent, shown
from ringfence.sandbox.points import PointManifest, PointPath, RestoreItem, RestorePlan, SnapshotError
from ringfence.sandbox.tree import Tree
from ringfence.sandbox.workspace import Workspace


@dataclasses.dataclass(slots=True)
class _Merged:
    """Several points' view of one path: the oldest before-image, and the states the newest call may have left."""

    before: PointPath
    accepted: frozenset[str]


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
            if known is None:
                # The newest call may have been refused after its point was taken: then its before-image still stands.
                after = manifest.expect.get(entry.path, entry.before)
                merged[entry.path] = _Merged(entry, frozenset({after, entry.before}))
            else:
                known.before = entry
    return merged, times


def plan(workspace: Workspace, manifests: Sequence[PointManifest], path: str | None) -> RestorePlan:
    """Plan as `SnapshotStore.plan_restore` says, over manifests in order from the newest.

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
            if _same_facts(workspace.tree, view.before):
                unchanged.append(name)
                continue
        elif current not in view.accepted:
            reasons[name] = "changed by something else since"
            continue
        items[name] = RestoreItem(
            path=name,
            action=_action(view.before, current),
            current=current,
            before=view.before,
            parent_mtime_ns=times.get(parent(name)),
        )
    _drop_blocked(workspace, items, reasons)
    return RestorePlan(
        items=tuple(items.values()),
        conflicts=tuple(sorted(reasons, key=lambda each: each.split("/"))),
        unchanged=tuple(unchanged),
        reasons=reasons,
        kinds=kinds,
    )


def _action(before: PointPath, current: str) -> str:
    if before.kind == content.ABSENT:
        return "remove"
    return "create" if current == content.ABSENT else "restore"


def _same_facts(tree: Tree, before: PointPath) -> bool:
    """Whether what the fingerprint leaves out is as it was too."""
    facts = tree.find(before.path)
    if facts is None:
        return before.kind == content.ABSENT
    if before.kind == content.ABSENT or facts.st_mtime_ns != before.mtime_ns:
        return False
    if os.geteuid() == 0 and (facts.st_uid, facts.st_gid) != (before.uid, before.gid):
        return False
    if before.kind == "link":
        return True
    fd = tree.open(before.path, openat.DIRECTORY if before.kind == "directory" else openat.FILE)
    try:
        return content.read_xattrs(fd) == before.xattrs
    finally:
        os.close(fd)


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


def run(
    tree: Tree, fingerprint: Callable[[str], str], blobs: BlobStore, items: Sequence[RestoreItem]
) -> None:
    """Restore as `SnapshotStore.restore` says; the items' content is verified already.

    Raises:
        SnapshotError: a path changed since the plan; nothing was touched.
        OSError: the disk.
    """
    for item in items:
        if fingerprint(item.path) not in {item.current, item.before.before}:
            raise SnapshotError(
                f"`{shown(item.path)}` changed since the plan was made; plan the rollback again"
            )
    with contextlib.ExitStack() as stack:
        staged = {
            item.path: stack.enter_context(_staged(tree, blobs, item.before))
            for item in items
            if _has_node(item)
        }
        if staged:
            openat.sync_filesystem(tree.staging_fd)
        unlocked = _Unlocked(tree)
        stack.callback(unlocked.lock)
        _apply(tree, items, staged, unlocked)
    openat.sync_filesystem(tree.fd)


def _has_node(item: RestoreItem) -> bool:
    return item.before.kind in {"file", "link"}


@contextlib.contextmanager
def _staged(tree: Tree, blobs: BlobStore, before: PointPath) -> Generator[bytes]:
    """Make a file or link, whole and dressed, beside the workspace."""
    if before.kind == "link":
        name = tree.temporary_name()
        os.symlink(os.fsencode(before.target), name, dir_fd=tree.staging_fd)
        if os.geteuid() == 0:
            os.chown(name, before.uid, before.gid, dir_fd=tree.staging_fd, follow_symlinks=False)
        times = (before.mtime_ns, before.mtime_ns)
        os.utime(name, ns=times, dir_fd=tree.staging_fd, follow_symlinks=False)
    else:
        name = _stage_file(tree, blobs, before)
    try:
        yield name
    finally:
        tree.drop(name)


def _stage_file(tree: Tree, blobs: BlobStore, before: PointPath) -> bytes:
    fd, name = tree.temporary()
    try:
        if before.inline is not None:
            content.write_all(fd, before.inline)
        else:
            _copy_blob(blobs, before.blob, fd)
        whole = content.hash_fd(fd) == before.blob
        _dress(fd, before)
    except BaseException:
        tree.drop(name)
        raise
    finally:
        os.close(fd)
    if not whole:
        tree.drop(name)
        raise SnapshotError(
            f"the copy of `{shown(before.path)}` came out wrong; check the disk, then try again"
        )
    return name


def _copy_blob(blobs: BlobStore, sha256: str, fd: int) -> None:
    source = blobs.open(sha256)
    try:
        content.copy_content(source, fd)
    finally:
        os.close(source)


def _dress(fd: int, before: PointPath) -> None:
    if os.geteuid() == 0:
        os.fchown(fd, before.uid, before.gid)
    content.write_xattrs(fd, before.xattrs)
    os.fchmod(fd, before.mode)
    os.utime(fd, ns=(before.mtime_ns, before.mtime_ns))


class _Unlocked:
    """Directories made writable for a while, for a kernel that is not root."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._modes: dict[str, int] = {}

    def unlock(self, directory: str) -> None:
        facts = self._tree.find(directory)
        if facts is None or not stat.S_ISDIR(facts.st_mode) or os.geteuid() == 0:
            return
        if facts.st_mode & stat.S_IRWXU == stat.S_IRWXU:
            return
        self._modes.setdefault(directory, stat.S_IMODE(facts.st_mode))
        self._set(directory, stat.S_IMODE(facts.st_mode) | stat.S_IRWXU)

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
            tree.make_directory(item.path, 0o700)
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
                _dress(fd, directories[path])
            else:
                os.utime(fd, ns=(times[path], times[path]))
        finally:
            os.close(fd)
