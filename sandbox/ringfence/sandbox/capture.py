"""Taking the before-image of one path, and its fingerprint."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ringfence.sandbox import content, openat, points
from ringfence.sandbox.blobs import Batch, sha256_of
from ringfence.sandbox.names import WORKSPACE, parent, shown
from ringfence.sandbox.points import PointPath, SnapshotError
from ringfence.sandbox.records import workspace_error
from ringfence.sandbox.tree import Tree

if TYPE_CHECKING:
    from ringfence.sandbox.workspace import Workspace

_INLINE_FILE = 8 << 10  # files up to this many bytes are kept in the manifest: one fsync less


def expand(workspace: Workspace, paths: Sequence[str], *, beneath: bool) -> Iterator[str]:
    """Give each path once, and behind a directory all that is beneath it if that is wanted.

    Raises:
        WorkspaceError: a directory can't be read.
    """
    seen: set[str] = set()
    for path in paths:
        facts = workspace.tree.find(path) if beneath else None
        inside = workspace.names(path) if facts is not None and stat.S_ISDIR(facts.st_mode) else ()
        for found in (path, *(name for name, _ in inside)):
            if found not in seen:
                seen.add(found)
                yield found


def capture_path(tree: Tree, path: str, batch: Batch, room: int) -> PointPath:
    """Take the before-image of one path, its content into `batch` or, when small, into the image itself.

    Args:
        tree: the live workspace.
        path: canonical path; for a directory only itself is taken.
        batch: blobs of this point.
        room: bytes that the images may still hold themselves.

    Raises:
        SnapshotError: it is a device, socket or pipe.
        WorkspaceError: it can't be read.
        OSError: the store's disk.
    """
    try:
        entry = _node(tree, path)
        if entry.kind not in {"file", "directory"}:
            return entry
        fd = tree.open(path, openat.DIRECTORY if entry.kind == "directory" else openat.FILE)
    except OSError as error:
        raise workspace_error(error, path) from error
    try:
        entry = dataclasses.replace(entry, xattrs=content.read_xattrs(fd, exact=True))
        if entry.kind == "directory":
            before = content.directory_fingerprint(entry.mode, entry.xattrs)
            return dataclasses.replace(entry, before=before)
        return _with_content(entry, fd, batch, room)
    finally:
        os.close(fd)


def capture_directory(tree: Tree, path: str) -> PointPath:
    """Take the image of a directory itself.

    Raises:
        OSError: it is none, or can't be read.
    """
    fd = tree.open(path, openat.DIRECTORY)
    try:
        entry = _node(tree, path)
        xattrs = content.read_xattrs(fd, exact=True)
        before = content.directory_fingerprint(entry.mode, xattrs)
        return dataclasses.replace(entry, before=before, xattrs=xattrs)
    finally:
        os.close(fd)


def _node(tree: Tree, path: str) -> PointPath:
    facts = tree.find(path)
    if facts is None:
        return points.absent(path)
    entry = PointPath(
        path=path,
        before="",
        kind=content.kind_of(facts.st_mode),
        mode=stat.S_IMODE(facts.st_mode),
        uid=facts.st_uid,
        gid=facts.st_gid,
        mtime_ns=facts.st_mtime_ns,
    )
    if entry.kind == "link":
        target = tree.readlink(path)
        return dataclasses.replace(entry, before=content.link_fingerprint(target), target=target)
    if entry.kind == "other":
        raise SnapshotError(
            f"`{shown(path)}` is a device, socket or pipe, which can't be brought back; remove it"
        )
    return entry


def _with_content(entry: PointPath, fd: int, batch: Batch, room: int) -> PointPath:
    facts = os.fstat(fd)
    size = facts.st_size
    data = content.data_of(fd, size)
    # What has holes is kept as a file, where they stay holes.
    whole = data == (((0, size),) if size else ())
    inline = content.read_range(fd, 0, size) if whole and size <= min(_INLINE_FILE, room) else None
    sha256 = content.hash_fd(fd) if inline is None else sha256_of(inline)
    if inline is None:
        batch.add(fd, sha256)
    return dataclasses.replace(
        entry,
        before=content.file_fingerprint(entry.mode, sha256, entry.xattrs),
        size=size,
        blob=sha256,
        inline=inline,
        data=data if inline is None else None,
        links=facts.st_nlink,
        inode=facts.st_ino,
    )


def parent_times(tree: Tree, paths: Iterable[str]) -> dict[str, int]:
    """Times of the directories around some paths, which their change will move.

    Raises:
        OSError: one can't be looked at.
    """
    times: dict[str, int] = {}
    for directory in sorted({parent(path) for path in paths if path != WORKSPACE}):
        facts = tree.find(directory)
        if facts is not None:
            times[directory] = facts.st_mtime_ns
    return times


def fingerprint_of(tree: Tree, path: str) -> str:
    """As `WorkspaceReader.fingerprint`.

    Raises:
        OSError: it can't be read.
    """
    facts = tree.find(path)
    if facts is None:
        return content.ABSENT
    if stat.S_ISLNK(facts.st_mode):
        return content.link_fingerprint(tree.readlink(path))
    directory = stat.S_ISDIR(facts.st_mode)
    if not directory and not stat.S_ISREG(facts.st_mode):
        return content.other_fingerprint(facts.st_mode)
    try:
        fd = tree.open(path, openat.DIRECTORY if directory else openat.FILE)
    except PermissionError:
        if not directory:
            raise
        return content.directory_fingerprint(facts.st_mode, {})  # not even its owner may look
    try:
        xattrs = content.read_xattrs(fd)
        if directory:
            return content.directory_fingerprint(facts.st_mode, xattrs)
        return content.file_fingerprint(facts.st_mode, content.hash_fd(fd), xattrs)
    finally:
        os.close(fd)
