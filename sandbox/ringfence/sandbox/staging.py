"""What a rollback brings back, made whole beside the workspace before anything in it is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Sequence

from ringfence.sandbox import content, openat
from ringfence.sandbox.blobs import BlobStore
from ringfence.sandbox.names import shown
from ringfence.sandbox.points import PointPath, SnapshotError
from ringfence.sandbox.tree import Tree
from ringfence.sandbox.workspace import Workspace


class Staging:
    """Files and links, whole and dressed, beside the workspace. What was one file under several names becomes one again.

    Args:
        workspace: where they will go.
        blobs: content.
        sync: make each durable; otherwise the caller does, all at once.
    """

    def __init__(self, workspace: Workspace, blobs: BlobStore, *, sync: bool) -> None:
        self.names: dict[str, bytes] = {}
        self._workspace = workspace
        self._tree = workspace.tree
        self._blobs = blobs
        self._sync = sync
        self._groups: dict[tuple[int, str, int], bytes] = {}
        self._named: dict[int, list[str]] | None = None

    def add(self, images: Sequence[PointPath]) -> None:
        """Make what stood at some paths, files and links, under names in `names`.

        Raises:
            SnapshotError: a copy came out wrong.
            OSError: the disk.
        """
        # One that is the last of several names by the time of its own point is alone there, but not in an older one.
        several = {before.inode for before in images if before.links > 1}
        for before in images:
            if before.kind == "link":
                name = self._link(before)
            elif before.inode in several:
                name = self._one_of_several(before)
            else:
                name = _stage_file(self._tree, self._blobs, before, sync=self._sync)
            self.names[before.path] = name

    def _one_of_several(self, before: PointPath) -> bytes:
        # A number alone is no proof: it may be another file's by now.
        key = (before.inode, before.before, before.mtime_ns)
        known = self._groups.get(key)
        name = self._survivor(before) if known is None else self._tree.another_name(known)
        if name is None:
            name = _stage_file(self._tree, self._blobs, before, sync=self._sync)
        self._groups.setdefault(key, name)
        return name

    def clear(self) -> None:
        """Remove what was not used."""
        for name in self.names.values():
            self._tree.drop(name)

    def _link(self, before: PointPath) -> bytes:
        name = self._tree.temporary_name()
        os.symlink(os.fsencode(before.target), name, dir_fd=self._tree.staging_fd)
        if os.geteuid() == 0:
            os.chown(name, before.uid, before.gid, dir_fd=self._tree.staging_fd, follow_symlinks=False)
        times = (before.mtime_ns, before.mtime_ns)
        os.utime(name, ns=times, dir_fd=self._tree.staging_fd, follow_symlinks=False)
        return name

    def _survivor(self, before: PointPath) -> bytes | None:
        """Another name that the very file still has; None: there is none, or it was changed."""
        if self._named is None:
            # The whole tree is read, for files of several names only.
            self._named = {}
            for path, directory in self._workspace.names():
                facts = None if directory else self._tree.find(path)
                if facts is not None and stat.S_ISREG(facts.st_mode):
                    self._named.setdefault(facts.st_ino, []).append(path)
        for path in self._named.get(before.inode, ()):
            if self._workspace.fingerprint(path) == before.before and same_facts(
                self._tree, dataclasses.replace(before, path=path)
            ):
                return self._tree.stage_name_of(path)
        return None


def _stage_file(tree: Tree, blobs: BlobStore, before: PointPath, *, sync: bool) -> bytes:
    fd, name = tree.temporary()
    try:
        if before.inline is not None:
            content.write_all(fd, before.inline)
        else:
            _copy_blob(blobs, before, fd)
        whole = content.hash_fd(fd) == before.blob
        dress(fd, before)
        if sync:
            os.fsync(fd)
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


def _copy_blob(blobs: BlobStore, before: PointPath, fd: int) -> None:
    source = blobs.open(before.blob)
    try:
        content.copy_content(source, fd, before.data)
    finally:
        os.close(source)


def dress(fd: int, before: PointPath) -> None:
    """Give an open file or directory its owner, attributes, bits and time.

    Raises:
        OSError: the file system can't hold them.
    """
    if os.geteuid() == 0:
        os.fchown(fd, before.uid, before.gid)
    elif os.fstat(fd).st_gid != before.gid:
        with contextlib.suppress(PermissionError):  # a group that the kernel's user is not in
            os.fchown(fd, -1, before.gid)
    content.write_xattrs(fd, before.xattrs, exact=True)
    os.fchmod(fd, before.mode)
    os.utime(fd, ns=(before.mtime_ns, before.mtime_ns))


def same_facts(tree: Tree, before: PointPath) -> bool:
    """Whether what the fingerprint leaves out is as it was too: owner, time, attributes, and other names."""
    facts = tree.find(before.path)
    if facts is None:
        return before.kind == content.ABSENT
    if before.kind == content.ABSENT or facts.st_mtime_ns != before.mtime_ns:
        return False
    if os.geteuid() == 0 and (facts.st_uid, facts.st_gid) != (before.uid, before.gid):
        return False
    if before.kind == "link":
        return True
    if before.links > 1 and facts.st_ino != before.inode and facts.st_nlink != before.links:
        return False
    fd = tree.open(before.path, openat.DIRECTORY if before.kind == "directory" else openat.FILE)
    try:
        return content.read_xattrs(fd, exact=True) == before.xattrs
    finally:
        os.close(fd)
