"""Opening files of a store that somebody may have put something else in place of: a pipe, a link, a device, a vast hole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ringfence.sandbox import openat

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV})
"""What opening says of a link, a socket, and a device that nothing drives."""


class IrregularError(OSError):
    """What stands in a file's place can't be what was kept there; `strerror` is what it is instead."""


def open_regular(path: Path) -> int:
    """Open a file for reading; it never waits and follows no link as the last name. The caller closes it.

    Raises:
        IrregularError: something else than a regular file stands there.
        OSError: it can't be opened.
    """
    try:
        fd = os.open(path, openat.FILE)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _irregular(path, path.lstat().st_mode) from error
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    raise _irregular(path, mode)


def read_regular(path: Path, most: int, end: bytes = b"") -> bytes:
    """Read a whole file.

    Args:
        path: the file.
        most: bytes that it may have.
        end: what it has to end with; looked at first, so that a vast hole is never read.

    Raises:
        IrregularError: no regular file, too large, or it ends otherwise.
        OSError: it can't be read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise IrregularError(errno.EFBIG, f"it has {size} bytes, more than the {most} that one may have")
        if os.pread(file.fileno(), len(end), max(0, size - len(end))) != end:
            raise IrregularError(errno.EINVAL, "it is cut short, or something else was written over it")
        return file.read(size)


def _irregular(path: Path, mode: int) -> IrregularError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return IrregularError(errno.EINVAL, f"{kind} stands in the place of its file", str(path))
