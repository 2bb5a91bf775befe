"""Puts paths of a program's overlay back to what was recorded of them, through the mount that the program sees.

INVARIANT: the program stands still meanwhile, and no link is followed: it made what lies there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ringfence.sandbox import content, openat
from ringfence.sandbox.overlay_read import attributes
from ringfence.sandbox.points import PointPath, SnapshotError
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.tree import Tree

_FULL: Final = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What is to stand at a path.

    Attributes:
        path: canonical.
        kind: `absent`, `file`, `directory` or `link`.
        mode: permission bits.
        mtime_ns: modification time.
        target: of a link.
        sha256: of a file's content, in hex.
        xattrs: its own attributes.
        open: gives a file's content; the caller closes it.
    """

    path: str
    kind: str
    mode: int = 0
    mtime_ns: int = 0
    target: str = ""
    sha256: str = ""
    xattrs: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    open: Callable[[], int] | None = None


def of_point(store: SnapshotStore, before: PointPath) -> Image:
    """A path as a rollback point has it."""

    def opened() -> int:
        if before.inline is None:
            return store.open_blob(before.blob)
        fd = os.memfd_create("content", os.MFD_CLOEXEC)
        content.write_all(fd, before.inline)
        return fd

    xattrs = {name: value for name, value in before.xattrs.items() if name.startswith("user.")}
    return Image(
        path=before.path,
        kind=before.kind,
        mode=before.mode,
        mtime_ns=before.mtime_ns,
        target=before.target,
        sha256=before.blob,
        xattrs=xattrs,
        open=opened,
    )


def of_tree(tree: Tree, path: str) -> Image:
    """A path as it stands in a tree.

    Raises:
        OSError: it can't be read, or is neither a file, a directory nor a link.
    """
    facts = tree.find(path)
    if facts is None:
        return Image(path=path, kind=content.ABSENT)
    kind, mode, mtime_ns = content.kind_of(facts.st_mode), stat.S_IMODE(facts.st_mode), facts.st_mtime_ns
    if kind == "link":
        return Image(path=path, kind=kind, mtime_ns=mtime_ns, target=tree.readlink(path))
    if kind not in ("file", "directory"):
        raise OSError(errno.EINVAL, f"a {kind} can't be put back", path)
    fd = tree.open(path, openat.FILE if kind == "file" else openat.DIRECTORY)
    try:
        digest = content.hash_fd(fd) if kind == "file" else ""
        xattrs = attributes(fd)
    finally:
        os.close(fd)
    return Image(
        path=path,
        kind=kind,
        mode=mode,
        mtime_ns=mtime_ns,
        sha256=digest,
        xattrs=xattrs,
        open=lambda: tree.open(path, openat.FILE),
    )


def lay(view: Path, images: Iterable[Image]) -> list[str]:
    """Make paths what they are to be. What lies in a directory that is to go, and is not named, stays with it.

    Args:
        view: the root of the tree, as the program sees it.
        images: each path once.

    Returns:
        Paths that were others.

    Raises:
        OSError: something can't be written; some of it may be.
        SnapshotError: content is not what was kept.
    """
    tree = Tree(view)
    try:
        ordered = sorted(images, key=lambda image: image.path.split("/"))
        gone = [image.path for image in reversed(ordered) if _make_room(tree, image)]
        made = [image.path for image in ordered if image.kind != content.ABSENT and _place(tree, image)]
    finally:
        tree.close()
    return sorted({*gone, *made})


def _make_room(tree: Tree, image: Image) -> bool:
    facts = tree.find(image.path)
    if facts is None:
        return False
    is_directory = stat.S_ISDIR(facts.st_mode)
    if image.kind != content.ABSENT and is_directory == (image.kind == "directory"):
        return False
    with tree.parent(image.path) as (fd, name):
        try:
            (os.rmdir if is_directory else os.unlink)(name, dir_fd=fd)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
    return True


def _place(tree: Tree, image: Image) -> bool:
    """Make one path what it is to be. False: it was, or a directory with other things in it stands in the way."""
    facts = tree.find(image.path)
    if facts is not None and (
        stat.S_ISDIR(facts.st_mode) != (image.kind == "directory") or _same(tree, image)
    ):
        return False
    with tree.parent(image.path) as (parent, name):
        owner = os.fstat(parent)
        if image.kind == "directory":
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
            fd = openat.open_child(parent, name, openat.DIRECTORY)
            try:
                _dress(fd, image, None if facts is not None else owner)
            finally:
                os.close(fd)
            return True
        staged = f".put-back-{secrets.token_hex(6)}".encode()
        try:
            _make(parent, staged, image, owner)
            os.rename(staged, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(staged, dir_fd=parent)
            raise
    return True


def _make(parent: int, staged: bytes, image: Image, owner: os.stat_result) -> None:
    if image.kind == "link":
        os.symlink(os.fsencode(image.target), staged, dir_fd=parent)
        if os.geteuid() == 0:
            os.chown(staged, owner.st_uid, owner.st_gid, dir_fd=parent, follow_symlinks=False)
        return
    assert image.open is not None  # noqa: S101 - files have content
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(staged, flags, 0o600, dir_fd=parent)
    try:
        source = image.open()
        try:
            content.copy_content(source, fd)
        finally:
            os.close(source)
        if content.hash_fd(fd) != image.sha256:
            raise SnapshotError(f"the recorded content of `{image.path}` is damaged")
        _dress(fd, image, owner)
    finally:
        os.close(fd)


def _dress(fd: int, image: Image, owner: os.stat_result | None) -> None:
    if owner is not None and os.geteuid() == 0:
        os.fchown(fd, owner.st_uid, owner.st_gid)
    content.write_xattrs(fd, image.xattrs)
    os.fchmod(fd, image.mode)
    if image.kind == "file":
        os.utime(fd, ns=(image.mtime_ns, image.mtime_ns))


def _same(tree: Tree, image: Image) -> bool:
    try:
        now = of_tree(tree, image.path)
    except OSError:
        return False
    if image.kind == "link":
        return (now.kind, now.target) == ("link", image.target)
    return (now.kind, now.mode, now.sha256, dict(now.xattrs)) == (
        image.kind,
        image.mode,
        image.sha256,
        dict(image.xattrs),
    )
