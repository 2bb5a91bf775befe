"""What a host keeps of one kernel's files: content by digest, bounded, the longest unused first to go."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Generator
from pathlib import Path

from ringfence.sandbox import content, openat


class Store:
    """Files by digest. Nothing of it has to outlive the host: what is missing is sent again.

    Args:
        root: directory of the store; it is made.
        limit_bytes: what `prune` leaves at most.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit = limit_bytes
        self._names = itertools.count()
        self._fresh = root / "new"
        for directory in (root, self._fresh):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._fresh.iterdir():
            left.unlink()

    def path(self, digest: bytes) -> Path:
        """Where content is kept."""
        name = digest.hex()
        return self._root / name[:2] / name[2:]

    def holds(self, digest: bytes) -> bool:
        """Whether it is there; it counts as used."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def incoming(self) -> Generator[tuple[int, Path]]:
        """An empty file to fill, and then to `keep`; removed where it was not kept."""
        path = self._fresh / str(next(self._names))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield fd, path
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)

    def keep(self, path: Path, digest: bytes) -> None:
        """Make a file on the store's file system the content of this digest."""
        target = self.path(digest)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        path.rename(target)

    def harvest(self, path: Path, digest: bytes) -> None:
        """Take a file that nobody needs any more, if it has but one name; what can't be had is sent when it is needed.

        Args:
            path: a file on the store's file system whose writers have ended.
            digest: of its content.
        """
        with contextlib.suppress(OSError):
            fd = os.open(path, openat.FILE)
            try:
                facts = os.fstat(fd)
                if facts.st_nlink != 1 or not stat.S_ISREG(facts.st_mode):
                    return
                content.write_xattrs(fd, {})
                if os.geteuid() == 0:
                    os.fchown(fd, os.geteuid(), os.getegid())
                os.fchmod(fd, 0o600)
                os.utime(fd)
            finally:
                os.close(fd)
            self.keep(path, digest)

    def prune(self) -> None:
        """Forget what was not used for longest until the rest is within the limit."""
        found: list[tuple[int, int, Path]] = []
        for directory in self._root.iterdir():
            if directory != self._fresh:
                for path in directory.iterdir():
                    facts = path.lstat()
                    found.append((facts.st_mtime_ns, facts.st_blocks * 512, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size
