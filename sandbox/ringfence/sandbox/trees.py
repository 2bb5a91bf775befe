"""Whole trees in and out: copying a directory of this host, and tar archives."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ringfence.sandbox import content, openat
from ringfence.sandbox.names import WORKSPACE, BadNameError, normalise, parent, shown
from ringfence.sandbox.records import WorkspaceError, workspace_error
from ringfence.sandbox.tree import Tree

_BLOCK = 512
MOST_TAR_BYTES = 64 << 30
"""Most bytes of content one archive may unpack to."""


def copy_tree(
    source: Path, destination: Path, *, skip: Callable[[str], bool] = lambda _: False, uid: int | None = None
) -> None:
    """Copy a directory: files, directories and links, with modes and times. Durable on return.

    Nothing is hard-linked: two names of one file become two files. Links are copied as they are written and never followed.

    Args:
        source: directory on this host.
        destination: directory on this host; missing or empty.
        skip: whether to leave out a path, given as `/workspace/…`; a directory with all beneath it.
        uid: host uid (and gid) of the copies; None: the kernel's own.

    Raises:
        WorkspaceError: a device, socket or pipe in the way, something unreadable, or no space.
    """
    top = source.resolve()
    if top == destination.resolve() or top in destination.resolve().parents:
        raise WorkspaceError(
            "InvalidRequest", f"`{destination}` lies inside `{source}`; copy to another place"
        )
    try:
        destination.mkdir(parents=True, exist_ok=True)
        if any(destination.iterdir()):
            raise WorkspaceError("Conflict", f"`{destination}` is not empty; remove what is in it first")
        old = Tree(top)
        new = Tree(destination, uid=uid)
    except OSError as error:
        raise _at(error, str(error.filename or source)) from error
    try:
        _copy_directory(old, new, skip)
        openat.sync_filesystem(new.fd)
    except OSError as error:
        raise _at(error, str(error.filename or source)) from error
    finally:
        old.close()
        new.close()


def _at(error: OSError, place: str) -> WorkspaceError:
    if error.errno == errno.ENOENT:
        return WorkspaceError("NoSuchResource", f"`{shown(place)}` does not exist; check the path")
    return workspace_error(error, place)


def _copy_directory(old: Tree, new: Tree, skip: Callable[[str], bool]) -> None:
    made: list[tuple[str, os.stat_result]] = [(WORKSPACE, os.fstat(old.fd))]
    pending = [WORKSPACE]
    while pending:
        here = pending.pop()
        source = old.open(here, openat.DIRECTORY)
        target = new.open(here, openat.DIRECTORY)
        try:
            with os.scandir(source) as entries:
                names = sorted(entry.name for entry in entries)
            for name in names:
                path = f"{here}/{name}"
                if skip(path):
                    continue
                facts = os.stat(name, dir_fd=source, follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    os.mkdir(name, 0o700, dir_fd=target)
                    made.append((path, facts))
                    pending.append(path)
                else:
                    _copy_entry(source, target, name, facts, new, path)
        finally:
            os.close(source)
            os.close(target)
    for path, facts in reversed(made):
        fd = new.open(path, openat.DIRECTORY)
        try:
            _dress(fd, facts, new)
        finally:
            os.close(fd)


def _copy_entry(source: int, target: int, name: str, facts: os.stat_result, new: Tree, path: str) -> None:
    if stat.S_ISLNK(facts.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        _own_link(target, name, new.uid)
        os.utime(name, ns=(facts.st_mtime_ns, facts.st_mtime_ns), dir_fd=target, follow_symlinks=False)
        return
    if not stat.S_ISREG(facts.st_mode):
        what = shown(path[len(WORKSPACE) + 1 :])
        raise WorkspaceError(
            "InvalidRequest",
            f"`{what}` is a device, socket or pipe; a workspace holds files, directories and links",
        )
    old_fd = os.open(name, openat.FILE, dir_fd=source)
    try:
        new_fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            content.copy_content(old_fd, new_fd)
            content.write_xattrs(new_fd, content.read_xattrs(old_fd))
            _dress(new_fd, facts, new)
        finally:
            os.close(new_fd)
    finally:
        os.close(old_fd)


def _own_link(directory: int, name: str, uid: int | None) -> None:
    if uid is not None:
        os.chown(name, uid, uid, dir_fd=directory, follow_symlinks=False)


def _dress(fd: int, facts: os.stat_result, new: Tree) -> None:
    new.own(fd)
    # Setuid and setgid bits have no business in a workspace.
    os.fchmod(fd, stat.S_IMODE(facts.st_mode) & ~(stat.S_ISUID | stat.S_ISGID))
    os.utime(fd, ns=(facts.st_mtime_ns, facts.st_mtime_ns))


def extract_tar(
    source: IO[bytes] | Path, destination: Path, *, uid: int | None = None, max_bytes: int = MOST_TAR_BYTES
) -> None:
    """Unpack an archive (plain, gzip, bzip2 or xz) beneath a directory. Durable on return.

    Args:
        source: stream or file.
        destination: directory on this host; made when missing.
        uid: host uid (and gid) of what is made; None: the kernel's own.
        max_bytes: most bytes of content.

    Raises:
        WorkspaceError: not an archive, a name that leads out, a device, a hard link to nothing, a name given twice, or too
            much. A part may have been unpacked.
    """
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            tree = stack.enter_context(contextlib.closing(Tree(destination, uid=uid)))
            stream = stack.enter_context(source.open("rb")) if isinstance(source, Path) else source
            with tarfile.open(fileobj=stream, mode="r|*", errorlevel=1) as archive:
                _extract_all(archive, tree, max_bytes)
            openat.sync_filesystem(tree.fd)
    except tarfile.TarError as error:
        detail = str(error).lower()
        raise WorkspaceError("InvalidRequest", f"not a whole tar archive: {detail}; send it again") from error
    except BadNameError as error:
        raise WorkspaceError("InvalidRequest", f"in the archive, {error}") from error
    except OSError as error:
        raise _at(error, str(error.filename or destination)) from error


def _extract_all(archive: tarfile.TarFile, tree: Tree, left: int) -> None:
    directories: list[tuple[str, int, int]] = []
    limit = left
    for member in archive:
        left -= member.size if member.isreg() else 0
        if left < 0:
            raise WorkspaceError("NoSpace", f"the archive unpacks to more than {limit} bytes; send less")
        _extract(archive, member, tree, directories)
    # Bits and times of directories come last, since they may forbid what comes into them.
    for path, mode, mtime_ns in reversed(directories):
        _finish_directory(tree, path, mode, mtime_ns)


def _extract(
    archive: tarfile.TarFile, member: tarfile.TarInfo, tree: Tree, times: list[tuple[str, int, int]]
) -> None:
    if member.name.startswith("/"):
        raise BadNameError(f"path `{shown(member.name)}` is absolute; pack it relative")
    path = normalise(member.name)
    mtime_ns = int(float(member.mtime) * 1_000_000_000)
    if path == WORKSPACE and not member.isdir():
        raise BadNameError(f"path `{shown(member.name)}` names no file; pack it again")
    tree.make_parents(path)
    if member.isdir():
        if path != WORKSPACE:
            tree.make_directory(path)
        times.append((path, member.mode & 0o777, mtime_ns))
    elif member.issym():
        with tree.parent(path) as (fd, name):
            os.symlink(member.linkname, name, dir_fd=fd)
            _own_link(fd, os.fsdecode(name), tree.uid)
            os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=fd, follow_symlinks=False)
    elif member.isreg():
        stream = archive.extractfile(member)
        _extract_file(tree, path, member.mode & 0o777, mtime_ns, stream)
    elif member.islnk():
        fd = tree.open(normalise(member.linkname), openat.FILE)
        with os.fdopen(fd, "rb") as stream:
            _extract_file(tree, path, member.mode & 0o777, mtime_ns, stream)
    else:
        raise BadNameError(f"`{shown(member.name)}` is a device or pipe; leave it out")


def _extract_file(tree: Tree, path: str, mode: int, mtime_ns: int, stream: IO[bytes] | None) -> None:
    if tree.find(path) is not None:
        raise BadNameError(f"`{shown(path)}` comes twice; pack it again")
    fd, name = tree.temporary()
    try:
        while stream is not None and (data := stream.read(content.CHUNK)):
            content.write_all(fd, data)
        tree.own(fd)
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        tree.place(name, path, sync=False)
    except BaseException:
        tree.drop(name)
        raise
    finally:
        os.close(fd)


def _finish_directory(tree: Tree, path: str, mode: int, mtime_ns: int) -> None:
    fd = tree.open(path, openat.DIRECTORY)
    try:
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(fd)


def make_tar(root: Path, sub: str = WORKSPACE) -> Iterator[bytes]:
    """Pack a part of a workspace, links as links, owners left out.

    Args:
        root: live directory on this host.
        sub: canonical path. A directory's content is named relative to it, a single file by its name.

    Yields:
        Pieces of a pax archive, at most 1 MiB each.

    Raises:
        WorkspaceError: not there.
    """
    tree = Tree(root)
    try:
        facts = tree.lstat(sub)
        top = sub if stat.S_ISDIR(facts.st_mode) else parent(sub)
        pending = [sub]
        while pending:
            path = pending.pop()
            facts = tree.lstat(path)
            if path != top:
                yield from _pack(tree, path, path[len(top) + 1 :], facts)
            if stat.S_ISDIR(facts.st_mode):
                fd = tree.open(path, openat.DIRECTORY)
                try:
                    with os.scandir(fd) as entries:
                        pending.extend(sorted((f"{path}/{entry.name}" for entry in entries), reverse=True))
                finally:
                    os.close(fd)
        yield bytes(2 * _BLOCK)
    except OSError as error:
        raise workspace_error(error, str(error.filename or sub)) from error
    finally:
        tree.close()


def _pack(tree: Tree, path: str, name: str, facts: os.stat_result) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(facts.st_mode)
    info.mtime = facts.st_mtime_ns / 1_000_000_000
    if stat.S_ISDIR(facts.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(facts.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = tree.readlink(path)
    elif stat.S_ISREG(facts.st_mode):
        yield from _pack_file(tree, path, info)
        return
    else:
        return
    yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _pack_file(tree: Tree, path: str, info: tarfile.TarInfo) -> Iterator[bytes]:
    fd = tree.open(path, openat.FILE)
    try:
        info.size = os.fstat(fd).st_size
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        offset = 0
        while offset < info.size:
            data = os.pread(fd, min(content.CHUNK, info.size - offset), offset)
            if not data:
                raise OSError(errno.EIO, "file became shorter while it was packed", path)
            offset += len(data)
            yield data
        if info.size % _BLOCK:
            yield bytes(_BLOCK - info.size % _BLOCK)
    finally:
        os.close(fd)
