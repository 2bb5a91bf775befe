"""Content-addressed files of the rollback-point store: written whole, made durable, read back."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Collection, Generator, Mapping
from pathlib import Path

from ringfence.sandbox import content, openat
from ringfence.sandbox.points import POINT_BYTES_MAX, SnapshotError
from ringfence.sandbox.regular import IrregularError, open_regular, read_regular

_MANY = 32  # from so many new blobs on, one sync of the file system is cheaper than one each


def store_error(error: OSError, place: Path) -> SnapshotError:
    """Put a failure of the store's disk into the user's words."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return SnapshotError(f"rollback store `{place}` is full; free space on its disk, then try again")
    if error.errno == errno.EROFS:
        return SnapshotError(
            f"rollback store `{place}` is read-only; mount its disk writable, then try again"
        )
    reason = (error.strerror or str(error)).lower()
    return SnapshotError(f"rollback store `{place}` can't be used: {reason}; mend it, then try again")


class BlobStore:
    """Blobs below one directory; raises OSError for its disk.

    Args:
        root: directory of the store, made by the caller.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names = itertools.count()
        self._prefix = f"{os.getpid():x}-{secrets.token_hex(4)}"

    def prepare(self) -> None:
        """Make the store's directories where they are missing: durable, and closed to others."""
        if (self._root / "tmp").is_dir() and (self._root / "blobs").is_dir():
            return
        for directory in (self._root, self._root / "blobs", self._root / "tmp"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root.chmod(0o700)
        sync_directory(self._root)
        sync_directory(self._root.parent)

    def path(self, sha256: str) -> Path:
        """Where a blob is kept."""
        return self._root / "blobs" / sha256[:2] / sha256[2:]

    @contextlib.contextmanager
    def temporary(self) -> Generator[tuple[int, Path]]:
        """An empty file for the caller to fill and rename; removed where it was not renamed."""
        path = self._root / "tmp" / f"{self._prefix}-{next(self._names):x}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield fd, path
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)

    def holds(self, sha256: str, size: int) -> bool:
        """Whether a blob is there, whole and right: it is read and hashed."""
        try:
            fd = open_regular(self.path(sha256))
        except (FileNotFoundError, IrregularError):
            return False
        try:
            return os.fstat(fd).st_size == size and content.hash_fd(fd) == sha256
        finally:
            os.close(fd)

    def all(self) -> list[tuple[str, Path]]:
        """Every blob that is there: its hash and its file."""
        found = (self._root / "blobs").glob("??/*")
        return [(path.parent.name + path.name, path) for path in found]

    def sync(self) -> None:
        """Make everything on the store's file system durable."""
        fd = os.open(self._root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            openat.sync_filesystem(fd)
        finally:
            os.close(fd)

    def open(self, sha256: str) -> int:
        """Open a blob for reading; the caller closes it."""
        return open_regular(self.path(sha256))


class Batch:
    """The blobs of one point. Nothing of it counts before `finish` returned."""

    def __init__(self, store: BlobStore, expected: int) -> None:
        self._store = store
        self._together = expected >= _MANY
        self._directories: set[Path] = set()
        self._blobs: dict[str, int] = {}

    def add(self, source: int, sha256: str) -> None:
        """Keep an open file's content.

        Args:
            source: descriptor of the file.
            sha256: hash of its content, as the caller read it.
        """
        size = os.fstat(source).st_size
        target = self._store.path(sha256)
        known = self._blobs.setdefault(sha256, size)
        if known != size:
            raise SnapshotError("a file changed while it was captured; try again when nothing writes to it")
        # A kernel may have died before a blob of its reached the disk, so a known blob's directory is synced too.
        self._directories |= {target.parent, target.parent.parent}
        if self._store.holds(sha256, size):
            return
        target.parent.mkdir(mode=0o700, exist_ok=True)
        with self._store.temporary() as (fd, path):
            content.copy_content(source, fd)
            if not self._together:
                os.fsync(fd)
            path.rename(target)

    def finish(self) -> None:
        """Make all durable, then read all back.

        Raises:
            SnapshotError: something else came back than was put in.
        """
        if self._together:
            self._store.sync()
        else:
            for directory in sorted(self._directories):
                sync_directory(directory)
        for sha256, size in self._blobs.items():
            if not self._store.holds(sha256, size):
                raise SnapshotError(
                    f"blob `{sha256[:12]}` of the rollback store reads back wrong; check its disk"
                )


class Underway:
    """The paths of a restore that has begun and never came to its end: they may be between two states.

    Args:
        blobs: where the file is made.
        file: keeps them.
    """

    def __init__(self, blobs: BlobStore, file: Path) -> None:
        self._blobs = blobs
        self._file = file

    def paths(self) -> frozenset[str]:
        """These paths."""
        return frozenset(self._read()[0])

    def modes(self) -> dict[str, int]:
        """Bits of directories that were opened for it, as they were before."""
        return self._read()[1]

    def _read(self) -> tuple[list[str], dict[str, int]]:
        try:
            found: list[str | dict[str, int]] = json.loads(read_regular(self._file, POINT_BYTES_MAX, b"]"))
            modes = [one for one in found if isinstance(one, dict)]  # none in a file of an earlier release
            return [one for one in found if isinstance(one, str)], modes[0] if modes else {}
        except FileNotFoundError:
            return [], {}
        except (IrregularError, ValueError, TypeError) as error:
            raise SnapshotError(
                f"nobody knows which paths a restore that was cut off had touched: `{self._file}` is damaged; "
                "restore the points directory from a backup"
            ) from error

    def begin(self, paths: Collection[str], modes: Mapping[str, int]) -> None:
        """Remember what is about to be touched, and the bits of directories that are about to be opened. Durable on return."""
        if not paths and not modes:
            return
        self._blobs.prepare()
        said = [*sorted(paths), dict(modes)]
        with self._blobs.temporary() as (fd, path):
            content.write_all(fd, json.dumps(said).encode("ascii"))
            os.fsync(fd)
            path.rename(self._file)
        sync_directory(self._file.parent)

    def end(self) -> None:
        """All of it is as it should be."""
        self._file.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()
