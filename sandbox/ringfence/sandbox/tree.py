"""A directory tree by descriptor: opening, staging, placing and removing beneath its root.

INVARIANT: no inode of the tree is changed in place. Content is staged in a directory beside the root, on its
file system and out of every sandbox's sight, made durable there, and renamed into place.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Collection, Generator
from pathlib import Path

from ringfence.sandbox import openat
from ringfence.sandbox.credentials import AgentRights
from ringfence.sandbox.names import WORKSPACE, ancestors, parent, relative
from ringfence.sandbox.openat import Opened

_DIRECTORY_MODE = 0o755
_DEEPEST = 64
SYNC_ONE_BY_ONE = 64
"""With more files or directories than this it is cheaper to make the whole file system durable."""
_OWN_DEEPEST = 1
"""Directories on the way to a file that are looked at one by one; with more of them it is cheaper to take the agent's rights."""


class Tree:
    """Descriptor-level work on paths below `/workspace`; raises OSError, never follows a link.

    Args:
        root: directory on this host.
        uid: host uid (and gid) that new files get; None: the kernel's own.
    """

    def __init__(self, root: Path, *, uid: int | None = None) -> None:
        self._root = os.fspath(root)
        self.uid = uid
        self.rights = AgentRights(uid)
        self._temporary_fd = -1
        self._names = itertools.count()
        self._prefix = f"{os.getpid():x}-{secrets.token_hex(4)}"
        self.fd = -1
        self.fd = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)

    def close(self) -> None:
        """Give the descriptors back. May be called twice."""
        for fd in (self.fd, self._temporary_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._temporary_fd = -1

    def __del__(self) -> None:
        self.close()

    @property
    def root(self) -> Path:
        """Its directory on this host."""
        return Path(self._root)

    def gone(self) -> bool:
        """Whether the directory was removed, moved away or replaced since it was opened."""
        try:
            there = self.root.stat(follow_symlinks=False)
        except OSError:
            return True
        return not os.path.samestat(there, os.fstat(self.fd))

    @property
    def staging(self) -> Path:
        """The directory beside the root where content is staged."""
        return self.root.parent / f".tmp-{self.root.name}"

    @property
    def staging_fd(self) -> int:
        """Descriptor of `staging`, which is made when first needed."""
        if self._temporary_fd < 0:
            with contextlib.suppress(FileExistsError):
                self.staging.mkdir(mode=0o700)
            self._temporary_fd = os.open(self.staging, openat.DIRECTORY)
        return self._temporary_fd

    def open(self, path: str, flags: int) -> int:
        """Open a canonical path; the caller closes the descriptor."""
        return openat.open_beneath(self.fd, relative(path), flags)

    def open_as_agent(self, path: str, flags: int) -> int:
        """Open a canonical path if the agent itself could; the caller closes the descriptor."""
        if flags == openat.FILE:
            return self.open_file_as_agent(path).detach()
        with self.rights:
            return openat.open_beneath(self.fd, relative(path), flags)

    def open_file_as_agent(self, path: str) -> Opened:
        """Open a canonical path for reading if the agent itself could."""
        if self.rights.uid is not None:
            opened = self._open_own(relative(path), self.rights.uid)
            if opened is not None:
                return opened
        with self.rights:
            return Opened(openat.open_beneath(self.fd, relative(path), openat.FILE))

    def _open_own(self, path: bytes, uid: int) -> Opened | None:
        """Open a regular file that is the agent's own, in directories of its own, without taking its rights: at half of what that takes.

        INVARIANT: no less strict than those rights. Whoever owns a file or directory has what the owner's bits say: Linux
        looks at nothing else then, be it groups, access lists or other bits. And each directory is looked at by the very
        descriptor that leads on, so that nothing can be put in its place meanwhile.

        Returns:
            The file; None: the agent's rights have to be taken, to open it or to learn why it can't be.
        """
        *above, name = path.split(b"/")
        if len(above) > _OWN_DEEPEST:
            return None
        here = self.fd
        try:
            for step in above:
                if not _owner_may(os.fstat(here), uid, stat.S_IXUSR):
                    return None
                deeper = openat.open_child(here, step, openat.LOOK | os.O_DIRECTORY)
                if here != self.fd:
                    os.close(here)
                here = deeper
            if not _owner_may(os.fstat(here), uid, stat.S_IXUSR):
                return None
            opened = Opened(openat.open_child(here, name, openat.FILE))
        except OSError:
            return None
        finally:
            if here != self.fd:
                os.close(here)
        own = stat.S_ISREG(opened.facts.st_mode) and _owner_may(opened.facts, uid, stat.S_IRUSR)
        return opened if own else None

    def lstat(self, path: str, *, as_agent: bool = False) -> os.stat_result:
        """Facts of what stands at a path, a link itself included."""
        fd = (self.open_as_agent if as_agent else self.open)(path, openat.LOOK)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def find(self, path: str) -> os.stat_result | None:
        """`lstat`, or None where nothing can stand: a missing path, or one behind a file or a link."""
        try:
            return self.lstat(path)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                return None
            raise

    def readlink(self, path: str) -> str:
        """Where a link points, as written in it."""
        fd = self.open(path, openat.LOOK)
        try:
            return os.fsdecode(os.readlink(b"", dir_fd=fd))
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def parent(self, path: str) -> Generator[tuple[int, bytes]]:
        """Open the directory of a path: yields its descriptor and the last name."""
        if path == WORKSPACE:
            raise OSError(errno.EBUSY, "the root of a workspace can't be replaced", path)
        fd = self.open(parent(path), openat.DIRECTORY)
        try:
            yield fd, os.fsencode(path.rpartition("/")[2])
        finally:
            os.close(fd)

    def missing_parents(self, path: str) -> list[str]:
        """Directories above a path that do not exist yet, outermost first."""
        above = ancestors(path)
        missing: list[str] = []
        while above and self.find(above[-1]) is None:
            missing.append(above.pop())
        return missing[::-1]

    def make_directory(self, path: str, mode: int = _DIRECTORY_MODE, *, sync: bool = True) -> None:
        """Make one directory, in one step with its owner and bits; content with one that is there already.

        Args:
            path: canonical path.
            mode: permission bits, the owner's own among them.
            sync: make it durable.
        """
        if self.find(path) is not None:
            return
        staged = self.temporary_name()
        os.mkdir(staged, 0o700, dir_fd=self.staging_fd)
        try:
            self._dress_directory(self.staging_fd, staged, mode)
            with self.parent(path) as (fd, name):
                openat.rename_new(self.staging_fd, staged, fd, name)
                if sync:
                    os.fsync(fd)
        except FileExistsError:
            self.drop(staged)
        except BaseException:
            self.drop(staged)
            raise

    def _dress_directory(self, parent_fd: int, name: bytes, mode: int) -> None:
        made = os.open(name, openat.DIRECTORY, dir_fd=parent_fd)
        try:
            self.own(made)
            os.fchmod(made, mode)
        finally:
            os.close(made)

    def make_parents(self, path: str) -> None:
        """Make the missing directories above a path, 0755."""
        for directory in self.missing_parents(path):
            self.make_directory(directory)

    def own(self, fd: int) -> None:
        """Give an open file to the agent's uid."""
        if self.uid is not None:
            os.fchown(fd, self.uid, self.uid)

    def temporary_name(self) -> bytes:
        """A fresh name in the staging directory."""
        return f"{self._prefix}-{next(self._names):x}".encode()

    def temporary(self) -> tuple[int, bytes]:
        """Make an empty file in the staging directory; returns its descriptor and name."""
        name = self.temporary_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self.staging_fd), name

    def place(self, name: bytes, path: str, *, sync: bool = True) -> None:
        """Rename a staged file or link over a path that is absent, a file or a link; durable on return."""
        with self.parent(path) as (fd, last):
            os.rename(name, last, src_dir_fd=self.staging_fd, dst_dir_fd=fd)
            if sync:
                os.fsync(fd)

    def another_name(self, name: bytes) -> bytes:
        """Give something staged another name in the staging directory."""
        other = self.temporary_name()
        os.link(name, other, src_dir_fd=self.staging_fd, dst_dir_fd=self.staging_fd, follow_symlinks=False)
        return other

    def stage_name_of(self, path: str) -> bytes:
        """Give a file of the tree another name in the staging directory."""
        other = self.temporary_name()
        with self.parent(path) as (fd, name):
            os.link(name, other, src_dir_fd=fd, dst_dir_fd=self.staging_fd, follow_symlinks=False)
        return other

    def sync_directories(self, paths: Collection[str]) -> None:
        """Make names, bits and times in some directories durable; those that are gone are passed over."""
        if len(paths) > SYNC_ONE_BY_ONE:
            openat.sync_filesystem(self.fd)
            return
        for path in sorted(paths):
            try:
                fd = self.open(path, openat.DIRECTORY)
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                    continue
                if error.errno != errno.EACCES:
                    raise
                # Its bits keep even its owner from listing it.
                openat.sync_filesystem(self.fd)
                continue
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Rename beneath the root, never replacing; durable on return."""
        with self.parent(source) as (source_fd, old), self.parent(target) as (target_fd, new):
            openat.rename_new(source_fd, old, target_fd, new)
            os.fsync(target_fd)
            os.fsync(source_fd)

    def remove(self, path: str, *, sync: bool = True) -> None:
        """Remove one file, link or empty directory."""
        with self.parent(path) as (fd, name):
            _remove_entry(fd, name)
            if sync:
                os.fsync(fd)

    def remove_tree(self, path: str) -> None:
        """Remove a directory with all beneath it: it vanishes in one step, then its content is freed."""
        name = self.temporary_name()
        try:
            with self.parent(path) as (fd, last):
                os.rename(last, name, src_dir_fd=fd, dst_dir_fd=self.staging_fd)
                os.fsync(fd)
        except OSError as error:
            # A directory that its owner may not write can't change its parent; then it goes entry by entry.
            if error.errno not in {errno.EACCES, errno.EPERM, errno.EXDEV}:
                raise
            with self.parent(path) as (fd, last):
                purge(fd, last)
                os.fsync(fd)
            return
        purge(self.staging_fd, name)

    def drop(self, name: bytes) -> None:
        """Remove something staged, if it is still there."""
        with contextlib.suppress(FileNotFoundError):
            purge(self.staging_fd, name)

    def sweep(self) -> None:
        """Remove what a crash left in the staging directory. Only while nobody else works on this tree."""
        if self.staging.exists():
            with os.scandir(self.staging_fd) as entries:
                left = [os.fsencode(entry.name) for entry in entries]
            for name in left:
                self.drop(name)


def _owner_may(facts: os.stat_result, uid: int, bit: int) -> bool:
    """Whether something is a uid's own, and its mode has this bit of its owner's."""
    return facts.st_uid == uid and bool(facts.st_mode & bit)


def _remove_entry(fd: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=fd)


def _list_for_removal(fd: int, name: bytes) -> tuple[int, list[os.DirEntry[str]]]:
    """Open a directory that is about to go, with its bits out of the way."""
    try:
        here = os.open(name, openat.DIRECTORY, dir_fd=fd)
    except PermissionError:
        _open_up(fd, name)
        here = os.open(name, openat.DIRECTORY, dir_fd=fd)
    if os.fstat(here).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        with contextlib.suppress(OSError):
            os.fchmod(here, 0o700)
    try:
        with os.scandir(here) as entries:
            return here, list(entries)
    except BaseException:
        os.close(here)
        raise


def _open_up(fd: int, name: bytes) -> None:
    handle = os.open(name, openat.LOOK | os.O_DIRECTORY, dir_fd=fd)
    try:
        openat.chmod_handle(handle, 0o700)
    finally:
        os.close(handle)


def purge(fd: int, name: bytes) -> None:
    """Remove whatever stands at a name of an open directory, all beneath it included, following no link.

    Raises:
        OSError: something can't be removed; a part is gone.
    """
    # What lies too deep for one descriptor a level is lifted up here and becomes a top of its own.
    tops = [name]
    while tops:
        _purge(fd, fd, tops.pop(), tops, 0)


def _purge(top_fd: int, fd: int, name: bytes, tops: list[bytes], depth: int) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except IsADirectoryError:
        pass
    else:
        return
    here, entries = _list_for_removal(fd, name)
    try:
        for entry in entries:
            child = os.fsencode(entry.name)
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(child, dir_fd=here)
            elif depth < _DEEPEST:
                _purge(top_fd, here, child, tops, depth + 1)
            else:
                lifted = f".{secrets.token_hex(8)}".encode()
                os.rename(child, lifted, src_dir_fd=here, dst_dir_fd=top_fd)
                tops.append(lifted)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=fd)
