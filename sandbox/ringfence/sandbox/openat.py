"""Opening beneath a directory so that no link, mount trick or rename leads out of it.

One system call decides and opens, so there is nothing between a check and its use. Kernels without `openat2`, or
with a filter in front of it, get a walk that opens each component relative to the one before and follows no link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE = _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS
_RENAME_NOREPLACE = 1
_LONGEST = 4000  # bytes one system call takes; PATH_MAX is 4096 with its end
_ATTEMPTS = 64

PATH = os.O_PATH | os.O_CLOEXEC
"""Flags for a handle on a file or directory; ELOOP for a link."""
LOOK = PATH | os.O_NOFOLLOW
"""Flags for a handle on whatever stands there, a link included."""
FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""Flags for reading; non-blocking, so that a pipe in the way can't hold the caller."""
DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY
"""Flags for a directory to list, to change and to sync."""


class Opened:
    """A descriptor that is closed with the last reference to it, if not before.

    Attributes:
        fd: the descriptor; -1: closed.
        facts: of what it leads to, as they were when it was opened.
    """

    __slots__ = ("facts", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.facts = os.fstat(fd)

    def detach(self) -> int:
        """Hand the descriptor out; the caller closes it."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        """Close it. May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)
_openat2_call = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", _libc))
_renameat2_call = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    use_errno=True,
)(("renameat2", _libc))
_syncfs_call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, use_errno=True)(("syncfs", _libc))
_hows: dict[int, tuple[_OpenHow, int]] = {}


def _failure(code: int, path: bytes) -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(path))


def _openat2(root_fd: int, relative: bytes, flags: int) -> int:
    how = _hows.get(flags)
    if how is None:
        record = _OpenHow(flags=flags, mode=0, resolve=_RESOLVE)
        # The record is kept with its address, which the kernel only reads: safe to share between threads.
        how = _hows[flags] = (record, ctypes.addressof(record))
    for _ in range(_ATTEMPTS):
        fd = _openat2_call(_OPENAT2, root_fd, relative, how[1], 24)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in {errno.EINTR, errno.EAGAIN}:
            raise _failure(code, relative)
    raise _failure(errno.EAGAIN, relative)


def _has_openat2() -> bool:
    root = os.open("/", PATH | os.O_DIRECTORY)
    try:
        os.close(_openat2(root, b".", PATH))
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(root)


def _is_link(name: bytes, dir_fd: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _open_one(dir_fd: int, name: bytes, flags: int, whole: bytes) -> int:
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP} and _is_link(name, dir_fd):
            raise _failure(errno.ELOOP, whole) from None
        raise _failure(error.errno or errno.EIO, whole) from None
    # A handle on a link is handed out only to those who asked for what stands there.
    if flags & os.O_PATH and not flags & os.O_NOFOLLOW and stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise _failure(errno.ELOOP, whole)
    return fd


def open_walk(root_fd: int, relative: bytes, flags: int) -> int:
    """Do what `open_beneath` does, one component at a time.

    Args:
        root_fd: directory to stay beneath.
        relative: path without `..`, `.` for the directory itself.
        flags: as for `os.open`, without creation.

    Raises:
        OSError: as `open_beneath`.
    """
    *parents, last = relative.split(b"/")
    if b".." in parents or last == b"..":
        raise _failure(errno.EXDEV, relative)
    here = root_fd
    try:
        for name in parents:
            step = _open_one(here, name, LOOK | os.O_DIRECTORY, relative)
            if here != root_fd:
                os.close(here)
            here = step
        return _open_one(here, last, flags, relative)
    finally:
        if here != root_fd:
            os.close(here)


_open = _openat2 if _has_openat2() else open_walk


def open_beneath(root_fd: int, relative: bytes, flags: int) -> int:
    """Open a path that exists beneath a directory, following no link at all.

    Args:
        root_fd: directory to stay beneath.
        relative: path without `..`, `.` for the directory itself.
        flags: as for `os.open`, without creation.

    Returns:
        A file descriptor; the caller closes it.

    Raises:
        OSError: ELOOP where a component is a link, ENOENT, ENOTDIR, EACCES and so on.
    """
    if len(relative) <= _LONGEST:
        return _open(root_fd, relative, flags)
    here = root_fd
    rest = relative
    try:
        while len(rest) > _LONGEST:
            cut = rest.rfind(b"/", 0, _LONGEST)
            if cut < 0:
                raise _failure(errno.ENAMETOOLONG, relative)
            step = _open(here, rest[:cut], PATH | os.O_DIRECTORY)
            if here != root_fd:
                os.close(here)
            here, rest = step, rest[cut + 1 :]
        return _open(here, rest, flags)
    finally:
        if here != root_fd:
            os.close(here)


def open_child(dir_fd: int, name: bytes, flags: int) -> int:
    """Open what stands in a directory itself, following no link: a third of the time that `open_beneath` takes.

    Args:
        dir_fd: the directory.
        name: one component, neither `..` nor with a slash in it.
        flags: as for `os.open`, without creation.

    Raises:
        OSError: a link stands there, or nothing, and so on.
    """
    if name == b".." or b"/" in name:
        raise _failure(errno.EXDEV, name)
    return os.open(name, flags | os.O_NOFOLLOW, dir_fd=dir_fd)


def rename_new(source_fd: int, source: bytes, target_fd: int, target: bytes) -> None:
    """Rename without ever replacing what stands at the target.

    Args:
        source_fd: directory of the source.
        source: name in it.
        target_fd: directory of the target.
        target: name in it.

    Raises:
        OSError: EEXIST where the target exists; otherwise as rename.
    """
    if _renameat2_call(source_fd, source, target_fd, target, _RENAME_NOREPLACE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise _failure(code, target)
    # EINVAL also says that a directory was moved below itself, which plain rename repeats below.
    if stat.S_ISDIR(os.stat(source, dir_fd=source_fd, follow_symlinks=False).st_mode):
        os.mkdir(target, 0o700, dir_fd=target_fd)
        try:
            os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
        except OSError:
            os.rmdir(target, dir_fd=target_fd)
            raise
        return
    os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
    os.unlink(source, dir_fd=source_fd)


def sync_filesystem(fd: int) -> None:
    """Make everything on the file system of `fd` durable: cheaper than one fsync each for many files.

    Raises:
        OSError: something could not be written.
    """
    if _syncfs_call(fd) != 0:
        raise _failure(ctypes.get_errno(), b"")


def chmod_handle(handle: int, mode: int) -> None:
    """Change the permission bits of what an `O_PATH` handle holds, which fchmod refuses to do.

    Raises:
        OSError: not the owner, and so on.
    """
    # The handle's own name in /proc reaches exactly this inode.
    Path(f"/proc/self/fd/{handle}").chmod(mode)
