"""Content of files by descriptor: reading, hashing, copying with holes, extended attributes, fingerprints."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping

CHUNK = 1 << 20
ABSENT = "absent"
"""Fingerprint of a path where nothing stands."""
SET_ID = stat.S_ISUID | stat.S_ISGID
"""Bits that no content which an agent chose may carry: whoever runs it would become the file's owner."""
_NO_XATTRS = {errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EACCES}
_NO_COPY_RANGE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO}


def kind_of(mode: int) -> str:
    """Name the kind of a path by its st_mode: `file`, `directory`, `link` or `other`."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"


def version_of(facts: os.stat_result) -> str:
    """Name the version of a file's content: no inode is changed in place, so its identity and time tell."""
    return f"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"


def file_fingerprint(mode: int, sha256: str) -> str:
    """Fingerprint of a regular file with these permission bits and this content hash (hex)."""
    return f"file:{stat.S_IMODE(mode):04o}:{sha256}"


def directory_fingerprint(mode: int) -> str:
    """Fingerprint of a directory with these permission bits."""
    return f"directory:{stat.S_IMODE(mode):04o}"


def link_fingerprint(target: str) -> str:
    """Fingerprint of a link with this target."""
    return f"link:{hashlib.sha256(os.fsencode(target)).hexdigest()}"


def other_fingerprint(mode: int) -> str:
    """Fingerprint of a device, socket or pipe."""
    return f"other:{stat.S_IFMT(mode):o}:{stat.S_IMODE(mode):04o}"


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte.

    Raises:
        OSError: ENOSPC and so on; a part may have been written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_range(fd: int, offset: int, size: int) -> bytes:
    """Read up to `size` bytes from `offset`, fewer only at the end of the file."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    have = len(data)
    while have < size and (data := os.pread(fd, min(size - have, CHUNK), offset + have)):
        parts.append(data)
        have += len(data)
    return b"".join(parts)


def hash_fd(fd: int, tail: bytes = b"") -> str:
    """SHA-256 in hex of a file's content from its start, and of `tail` behind it."""
    digest = hashlib.sha256()
    offset = 0
    while data := os.pread(fd, CHUNK, offset):
        digest.update(data)
        offset += len(data)
    digest.update(tail)
    return digest.hexdigest()


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    os.lseek(target, start, os.SEEK_SET)
    while start < end:
        try:
            done = os.copy_file_range(source, target, end - start, start)
        except OSError as error:
            if error.errno not in _NO_COPY_RANGE:
                raise
            data = os.pread(source, min(CHUNK, end - start), start)
            write_all(target, data)
            done = len(data)
        if done == 0:
            return
        start += done


def copy_content(source: int, target: int) -> None:
    """Copy a file's content into an empty file, by reflink where the file system can, holes kept as holes.

    Raises:
        OSError: ENOSPC and so on.
    """
    facts = os.fstat(source)
    size = facts.st_size
    if facts.st_blocks * 512 >= size:
        _copy_range(source, target, 0, size)
    else:
        position = 0
        while position < size:
            try:
                start = os.lseek(source, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            position = os.lseek(source, start, os.SEEK_HOLE)
            _copy_range(source, target, start, position)
    os.ftruncate(target, size)


def read_xattrs(fd: int) -> dict[str, bytes]:
    """Read the `user.*` attributes of an open file or directory; none where the file system has none."""
    try:
        names = os.listxattr(fd)
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return {}
        raise
    return {name: os.getxattr(fd, name) for name in sorted(names) if name.startswith("user.")}


def write_xattrs(fd: int, wanted: Mapping[str, bytes]) -> None:
    """Make the `user.*` attributes exactly those wanted.

    Raises:
        OSError: the file system can't hold them.
    """
    have = read_xattrs(fd)
    for name in have.keys() - wanted.keys():
        os.removexattr(fd, name)
    for name, value in wanted.items():
        if have.get(name) != value:
            os.setxattr(fd, name, value)
