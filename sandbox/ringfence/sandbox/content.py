"""Content of files by descriptor: reading, hashing, copying with holes, extended attributes, fingerprints."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

CHUNK = 1 << 20
ABSENT = "absent"
"""Fingerprint of a path where nothing stands."""
SET_ID = stat.S_ISUID | stat.S_ISGID
"""Bits that no content which an agent chose may carry: whoever runs it would become the file's owner."""
_ACCESS_LISTS = ("system.posix_acl_access", "system.posix_acl_default")
_CAPABILITY = "security.capability"
_EXTENTS_MAX = 1024
_OWNER = stat.S_IRWXU
_NO_HOLES = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
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


def file_fingerprint(mode: int, sha256: str, xattrs: Mapping[str, bytes]) -> str:
    """Fingerprint of a regular file with these permission bits, this content hash (hex) and these `user.*` attributes."""
    return f"file:{stat.S_IMODE(mode):04o}:{sha256}{_attributes_part(xattrs)}"


def directory_fingerprint(mode: int, xattrs: Mapping[str, bytes]) -> str:
    """Fingerprint of a directory with these permission bits and these `user.*` attributes."""
    return f"directory:{stat.S_IMODE(mode):04o}{_attributes_part(xattrs)}"


def _attributes_part(xattrs: Mapping[str, bytes]) -> str:
    """A hash of the `user.*` attributes; empty where there are none. Others are not what a call leaves, so they don't count."""
    own = sorted((os.fsencode(name), value) for name, value in xattrs.items() if name.startswith("user."))
    if not own:
        return ""
    digest = hashlib.sha256()
    for part in (part for pair in own for part in pair):
        digest.update(len(part).to_bytes(8, "big") + part)
    return f":{digest.hexdigest()[:32]}"


def is_between(current: str, before: str, after: str) -> bool:
    """Whether a path can be like this while it is brought from one state to the other, and neither is reached.

    Directories are opened up for their owner and get their bits and attributes last; and what is no directory goes before a
    directory takes its place.
    """
    kinds = [print_.partition(":")[0] for print_ in (before, after)]
    if current == ABSENT:
        return ABSENT not in kinds and kinds.count("directory") == 1
    kind, _, rest = current.partition(":")
    if kind != "directory" or kind not in kinds:
        return False
    bits = {int(p.split(":")[1], 8) for p in (before, after) if p.startswith("directory:")}
    return int(rest.partition(":")[0], 8) in bits | {bit | _OWNER for bit in bits} | {_OWNER}


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


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            position = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            if error.errno not in _NO_HOLES:
                raise
            start, position = position, size
        yield start, position


def data_of(fd: int, size: int) -> tuple[tuple[int, int], ...] | None:
    """Where a file holds data, as pairs of start and end; the rest are holes. None: in too many places to say."""
    found = tuple(islice(_data(fd, size), _EXTENTS_MAX + 1))
    return found if len(found) <= _EXTENTS_MAX else None


def copy_content(source: int, target: int, data: Iterable[tuple[int, int]] | None = None) -> None:
    """Copy a file's content into an empty file, by reflink where the file system can, holes kept as holes.

    Args:
        source: descriptor to read.
        target: descriptor to write.
        data: as `data_of` gives it, where holes are to be elsewhere than in `source`: what lies between reads as zeros there.

    Raises:
        OSError: ENOSPC and so on.
    """
    size = os.fstat(source).st_size
    for start, end in _data(source, size) if data is None else data:
        _copy_range(source, target, start, end)
    os.ftruncate(target, size)


def read_xattrs(fd: int, *, lists: bool = False, exact: bool = False) -> dict[str, bytes]:
    """Read the attributes of an open file or directory; none where the file system has none.

    Args:
        fd: the file or directory.
        lists: POSIX access lists too, beside `user.*`.
        exact: whatever a rollback has to bring back: these, and for root the capabilities of a program.
    """
    try:
        names = os.listxattr(fd)
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return {}
        raise
    return {name: os.getxattr(fd, name) for name in sorted(names) if _is_kept(name, lists or exact, exact)}


def _is_kept(name: str, lists: bool, exact: bool) -> bool:
    if name == _CAPABILITY:
        return exact and os.geteuid() == 0
    return name.startswith("user.") or (lists and name in _ACCESS_LISTS)


def write_xattrs(fd: int, wanted: Mapping[str, bytes], *, exact: bool = False) -> None:
    """Make the attributes exactly those wanted; set permission bits afterwards, which an access list moves.

    Args:
        fd: the file or directory.
        wanted: what it shall have.
        exact: what `read_xattrs` calls exact; otherwise only `user.*` is taken away.

    Raises:
        OSError: the file system can't hold them.
    """
    have = read_xattrs(fd, exact=exact)
    for name in have.keys() - wanted.keys():
        os.removexattr(fd, name)
    for name, value in wanted.items():
        if have.get(name) != value:
            os.setxattr(fd, name, value)


def remove_file(path: Path) -> int:
    """Remove a file that may be gone already; returns its bytes."""
    try:
        size = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size
