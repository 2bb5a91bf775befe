"""Small points of one agent, one behind the other in files that were laid out before: each costs one flush of its data.

A file of its own costs a flush of the file, one of its name, and the blocks that the file system writes for both. Here an entry goes
over zeros that are on the disk already, so that nothing but its own sectors has to be written. What a crash tore off is told from what
went bad afterwards: an entry holds no zero byte behind its first sector, so a sector of zeros in it was never written.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ringfence.sandbox import content
from ringfence.sandbox.blobs import BlobStore, sync_directory
from ringfence.sandbox.points import SnapshotError
from ringfence.sandbox.regular import open_regular, read_regular

ENTRY_MAX: Final = 32 << 10
"""Longest text that is kept here; a longer one has a file of its own, whose flushes count less beside it."""

_SECTOR: Final = 512
_FILE_FIRST, _FILE_MAX = 64 << 10, 1 << 20
_FILE_MAGIC, _ENTRY_MAGIC = b"RFLOG001", b"RFPOINT1"
_FILE: Final = struct.Struct("<8sII")  # its size, and a checksum
_ENTRY: Final = struct.Struct("<8sIIQ128s")  # length and checksum of the text, when it was taken, the point
_SUM: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Where a point is: its file's number, the offset of its header, and the length of its text; `whole` as it was read last."""

    point: str
    file: int
    at: int
    length: int
    taken_ns: int
    whole: bool

    @property
    def end(self) -> int:
        return self.at + _padded(_HEADER_BYTES + self.length)


@dataclass(slots=True, kw_only=True)
class _File:
    """One file: what tells it from another in its place, where the next entry goes, and whether one may."""

    inode: int
    size: int
    end: int
    open: bool


@dataclass(slots=True)
class _Scan:
    """What was found in a file.

    Attributes:
        entries: in their order; of one that is not whole, what its header says.
        end: behind the last sector that holds anything.
        clean: nothing but zeros follows the last whole entry.
        lost: sectors that hold something, or should, of which nobody knows whose it was.
    """

    entries: list[_Entry] = field(default_factory=list[_Entry])
    end: int = _SECTOR
    clean: bool = True
    lost: list[int] = field(default_factory=list[int])


_HEADER_BYTES: Final = _ENTRY.size + _SUM.size


class PointLog:
    """The log of one store. Raises OSError for its disk.

    Args:
        root: directory of the store.
        blobs: where files are made.
    """

    def __init__(self, root: Path, blobs: BlobStore) -> None:
        self._root = root / "log"
        self._blobs = blobs
        self._lock = threading.Lock()
        self._index: dict[str, _Entry] = {}
        self._files: dict[int, _File] = {}
        self._lost = ""
        self._seen: tuple[int, int] | None = None

    def append(self, point: str, text: bytes) -> None:
        """Keep a point; one of the same id is replaced. Durable and read back on return.

        Args:
            point: id.
            text: that of its manifest, at most `ENTRY_MAX` bytes and without a zero byte.

        Raises:
            SnapshotError: it reads back wrong.
        """
        taken_ns = time.time_ns()
        data = _entry_bytes(point, text, taken_ns)
        with self._lock:
            self._catch_up()
            number, file = self._room(len(data))
            fd = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # INVARIANT: after any failure nothing is written behind what is there, so that only the last entry can be torn.
                file.open = False
                if os.fstat(fd).st_ino != file.inode:
                    raise SnapshotError(f"somebody exchanged `{self._path(number)}`; try again")
                _write_at(fd, data, file.end)
                os.fdatasync(fd)
                if os.pread(fd, len(data), file.end) != data:
                    raise SnapshotError(
                        f"rollback point `{point}` reads back wrong; check the disk, then try again"
                    )
                file.open = True
            finally:
                os.close(fd)
            self._index[point] = _Entry(
                point=point, file=number, at=file.end, length=len(text), taken_ns=taken_ns, whole=True
            )
            file.end += len(data)

    def text(self, point: str) -> bytes | None:
        """The text of a point; None where there is none.

        Raises:
            SnapshotError: it is damaged, or what is damaged may have been this point.
        """
        with self._lock:
            self._catch_up()
            entry = self._index.get(point)
            if entry is None:
                if self._lost:
                    raise SnapshotError(
                        f"nobody knows whether there is a rollback point `{point}`: `{self._lost}` is damaged; "
                        "restore the points directory from a backup"
                    )
                return None
            fd = open_regular(self._path(entry.file))
            try:
                data = content.read_range(fd, entry.at, _HEADER_BYTES + entry.length)
            finally:
                os.close(fd)
        found = _header(data, 0)
        if found is None or found[0] != point or not _is_whole(data, 0, *found[1:3]):
            raise SnapshotError(
                f"rollback point `{point}` is damaged: its checksum differs, so it was changed or cut short; "
                "restore the points directory from a backup"
            )
        return data[_HEADER_BYTES:]

    def points(self) -> list[str]:
        """Ids of all points, also of damaged ones."""
        with self._lock:
            self._catch_up()
            return list(self._index)

    def taken(self, point: str) -> tuple[float, int] | None:
        """When a point was taken, in seconds since the epoch, and the bytes that it takes on the disk; None where there is none."""
        with self._lock:
            self._catch_up()
            entry = self._index.get(point)
        return None if entry is None else (entry.taken_ns / 1e9, entry.end - entry.at)

    def remove(self, gone: Collection[str]) -> int:
        """Remove points, durably; gives the bytes that were freed."""
        with self._lock:
            self._catch_up()
            freed = 0
            for number in {self._index[point].file for point in gone if point in self._index}:
                freed += self._without(number, gone)
            self._seen = None
            return freed

    def _without(self, number: int, gone: Collection[str]) -> int:
        """Write a file anew without some points, and without those that later entries replaced."""
        path, file = self._path(number), self._files[number]
        data = read_regular(path, _FILE_MAX)
        if not _is_right(data):
            return 0
        found = _scan(data, number)
        spans = [
            (entry.at, entry.end)
            for entry in found.entries
            if entry.point not in gone and (not entry.whole or self._index.get(entry.point) == entry)
        ]
        # What nobody can read stays as it is: it may be told one day what it was.
        spans += [(at, at + _SECTOR) for at in found.lost]
        if not spans:
            path.unlink()
            sync_directory(self._root)
            return file.size
        kept = b"".join(data[start:end] for start, end in sorted(spans))
        last = number == max(self._files) and file.open
        size = file.size if last else _SECTOR + len(kept)
        self._make(path, size, kept)
        return file.size - size

    def _path(self, number: int) -> Path:
        return self._root / f"{number:06d}"

    def _room(self, size: int) -> tuple[int, _File]:
        """The file that the next entry goes to, and what is known of it; made where there is none with so much room."""
        last = max(self._files, default=0)
        file = self._files.get(last)
        if file is not None and file.open and file.end + size <= file.size:
            return last, file
        number = last + 1
        if not self._root.is_dir():
            self._root.mkdir(mode=0o700)
            sync_directory(self._root.parent)
        laid = min(_FILE_FIRST << min(last, 8), _FILE_MAX)
        inode = self._make(self._path(number), laid)
        file = self._files[number] = _File(inode=inode, size=laid, end=_SECTOR, open=True)
        self._seen = self._signature()
        return number, file

    def _make(self, path: Path, size: int, kept: bytes = b"") -> int:
        """Lay out a file, zeros and all, under its name; durable on return. Gives its inode."""
        with self._blobs.temporary() as (fd, made):
            content.write_all(fd, (_file_head(size) + kept).ljust(size, b"\0"))
            os.fsync(fd)
            inode = os.fstat(fd).st_ino
            made.rename(path)
        sync_directory(self._root)
        return inode

    def _signature(self) -> tuple[int, int] | None:
        try:
            facts = self._root.stat()
        except FileNotFoundError:
            return (0, 0)
        return facts.st_ino, facts.st_mtime_ns

    def _catch_up(self) -> None:
        """Read what is there, where it is not known: at first, when files came or went, and when another process wrote behind the last entry."""
        now = self._signature()
        if now == self._seen and not self._grown():
            return
        self._index, self._files, self._lost = {}, {}, ""
        names = sorted(entry.name for entry in os.scandir(self._root)) if now != (0, 0) else []
        for number in sorted(int(name) for name in names if name.isdigit()):
            self._read(number)
        self._seen = now

    def _grown(self) -> bool:
        last = max(self._files, default=0)
        if not last or not self._files[last].open:
            return False
        fd = open_regular(self._path(last))
        try:
            return bool(os.pread(fd, _SECTOR, self._files[last].end).strip(b"\0"))
        finally:
            os.close(fd)

    def _read(self, number: int) -> None:
        path = self._path(number)
        data = read_regular(path, _FILE_MAX)
        found = _scan(data, number)
        right = _is_right(data)
        if found.lost or not right:
            self._lost = str(path)
        self._index.update((entry.point, entry) for entry in found.entries)
        self._files[number] = _File(
            inode=path.stat().st_ino, size=len(data), end=found.end, open=right and found.clean
        )


def _file_head(size: int) -> bytes:
    return _FILE.pack(_FILE_MAGIC, size, zlib.crc32(size.to_bytes(4, "little"))).ljust(_SECTOR, b"\0")


def _is_right(data: bytes) -> bool:
    """Whether a file begins as it was laid out, and is as long."""
    return data[:_SECTOR] == _file_head(len(data))


def _scan(data: bytes, number: int) -> _Scan:
    """Find the entries of a file.

    INVARIANT: entries are written one by one, each only when the one before is on the disk. So what isn't whole is torn only where
    no whole one follows and a sector of it is missing; all else was damaged afterwards.
    """
    found, last = _Scan(), len(data.rstrip(b"\0"))
    at = whole = _SECTOR
    broken: list[_Entry] = []  # behind the last whole entry
    stray: list[int] = []
    while at < last:
        header = _header(data, at)
        if header is None:
            stray.append(at)
            at += _SECTOR
            continue
        point, length, checksum, taken_ns = header
        sound = _is_whole(data, at, length, checksum)
        entry = _Entry(point=point, file=number, at=at, length=length, taken_ns=taken_ns, whole=sound)
        if sound:
            found.entries += [*broken, entry]
            found.lost += stray
            broken, stray = [], []
            whole = entry.end
        else:
            broken.append(entry)
        at = entry.end
    found.end, found.clean = whole, last <= whole
    if not found.clean and not _torn(data, whole, last, broken):
        found.entries += broken
        found.lost += stray
    return found


def _torn(data: bytes, start: int, last: int, broken: list[_Entry]) -> bool:
    """Whether a crash came between the sectors of the one entry that begins at `start`."""
    if not data[start : start + _SECTOR].strip(b"\0"):
        return last <= start + _padded(_HEADER_BYTES + ENTRY_MAX)
    if not (len(broken) == 1 and broken[0].at == start):
        return False
    end = start + _HEADER_BYTES + broken[0].length
    return last <= end and any(
        not data[at : min(at + _SECTOR, end)].strip(b"\0") for at in range(start + _SECTOR, end, _SECTOR)
    )


def _header(data: bytes, at: int) -> tuple[str, int, int, int] | None:
    """Point, length, checksum and time of an entry; None where none begins."""
    if data[at : at + len(_ENTRY_MAGIC)] != _ENTRY_MAGIC or len(data) < at + _HEADER_BYTES:
        return None
    (own,) = _SUM.unpack_from(data, at + _ENTRY.size)
    if zlib.crc32(data[at : at + _ENTRY.size]) != own:
        return None
    _, length, checksum, taken_ns, point = _ENTRY.unpack_from(data, at)
    return point.rstrip(b"\0").decode("ascii", "replace"), length, checksum, taken_ns


def _is_whole(data: bytes, at: int, length: int, checksum: int) -> bool:
    text = data[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
    return len(text) == length and zlib.crc32(text) == checksum


def _entry_bytes(point: str, text: bytes, taken_ns: int) -> bytes:
    head = _ENTRY.pack(_ENTRY_MAGIC, len(text), zlib.crc32(text), taken_ns, point.encode("ascii"))
    data = head + _SUM.pack(zlib.crc32(head)) + text
    return data.ljust(_padded(len(data)), b"\0")


def _padded(size: int) -> int:
    return -(-size // _SECTOR) * _SECTOR


def _write_at(fd: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, at)
        rest, at = rest[done:], at + done


_logs: Final[weakref.WeakValueDictionary[Path, PointLog]] = weakref.WeakValueDictionary()
_making: Final = threading.Lock()


def log_of(root: Path, blobs: BlobStore) -> PointLog:
    """The log of a store: one for all who have the store open in this process."""
    with _making:
        place = root.absolute()
        found = _logs.get(place)
        if found is None:
            found = _logs[place] = PointLog(root, blobs)
        return found
