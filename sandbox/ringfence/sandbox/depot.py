"""A depot: named immutable bytes that several nodes can read, such as a shared directory or a bucket.

Everything is read back and compared as it is put. Raises DepotError for whatever fails: nobody goes on as if it were there.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

from ringfence.sandbox.points import POINT_BYTES_MAX
from ringfence.sandbox.regular import open_regular

CHUNK: Final = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


class DepotError(Exception):
    """The depot can't be used, or gives back something else; `str()` is one line that says what to do."""


class Depot(Protocol):
    """What several nodes share."""

    @property
    def place(self) -> str:
        """Where it is, for people; without credentials."""
        ...

    def put(self, name: str, source: bytes | Path) -> None:
        """Keep bytes, or a file's, under a name. Durable and read back on return.

        Raises:
            DepotError: they are not kept for sure.
        """
        ...

    def chunks(self, name: str) -> Iterator[bytes] | None:
        """Read what was kept, in pieces; None where there is nothing of that name.

        Raises:
            DepotError: it can't be read; also while iterating.
        """
        ...

    def names(self, prefix: str) -> list[str]:
        """Names below a directory, sorted.

        Raises:
            DepotError: they can't be listed.
        """
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Forget names; those that are not there are passed over.

        Raises:
            DepotError: they can't be removed.
        """
        ...


def read(depot: Depot, name: str) -> bytes | None:
    """All of what was kept under a name; None where there is nothing.

    Raises:
        DepotError: it can't be read.
    """
    found = depot.chunks(name)
    if found is None:
        return None
    pieces: list[bytes] = []
    left = POINT_BYTES_MAX
    for piece in found:
        left -= len(piece)
        if left < 0:
            raise DepotError(
                f"`{name}` in the shared store `{depot.place}` is damaged: it has more than {POINT_BYTES_MAX} bytes"
            )
        pieces.append(piece)
    return b"".join(pieces)


def fetch(depot: Depot, name: str, sha256: str, target: Path) -> bool:
    """Write what was kept under a name into a new file, if its bytes hash to `sha256`. Durable on return.

    Returns:
        False: there is nothing of that name.

    Raises:
        DepotError: it can't be read, or is something else.
        OSError: the file can't be written.
    """
    found = depot.chunks(name)
    if found is None:
        return False
    fresh = target.with_name(f".{secrets.token_hex(8)}")
    digest = hashlib.sha256()
    try:
        with fresh.open("xb") as file:
            for piece in found:
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != sha256:
            raise DepotError(f"`{name}` in the shared store `{depot.place}` is damaged: its hash differs")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return True


def check_name(name: str) -> str:
    """Refuse a name that could lead anywhere else.

    Raises:
        DepotError: it could.
    """
    if _NAME.fullmatch(name) is None:
        raise DepotError(f"`{name[:80]}` is no name in a shared store")
    return name


def hash_of(pieces: Iterable[bytes]) -> str:
    """SHA-256 in hex."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def pieces_of(source: bytes | Path) -> Iterator[bytes]:
    """Bytes, or a file's, in pieces."""
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as file:
        while piece := file.read(CHUNK):
            yield piece


class DirectoryDepot:
    """A depot in a directory that every node mounts.

    Args:
        root: the directory; it has to be there, so that a missing mount is never taken for an empty depot.

    Raises:
        DepotError: it is not there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        if not root.is_dir():
            raise DepotError(f"the shared store `{root}` is no directory; mount it, or make it")

    @property
    def place(self) -> str:
        """The directory."""
        return str(self._root)

    def put(self, name: str, source: bytes | Path) -> None:
        """Keep bytes, or a file's, under a name. Durable and read back on return."""
        target = self._root / check_name(name)
        fresh = self._root / f".{os.getpid():x}-{secrets.token_hex(8)}"
        try:
            self._require()
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with fresh.open("xb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    for piece in pieces_of(source):
                        file.write(piece)
                    file.flush()
                    os.fsync(file.fileno())
                fresh.replace(target)
            finally:
                fresh.unlink(missing_ok=True)
            for directory in _up_to(target.parent, self._root):
                _sync(directory)
            if hash_of(pieces_of(target)) != hash_of(pieces_of(source)):
                raise DepotError(
                    f"`{name}` in the shared store `{self.place}` reads back wrong; check its disk"
                )
        except OSError as error:
            raise self._failed(error) from error

    def chunks(self, name: str) -> Iterator[bytes] | None:
        """Read what was kept, in pieces; None where there is nothing of that name."""
        try:
            self._require()
            file = os.fdopen(open_regular(self._root / check_name(name)), "rb")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(error) from error

        def pieces() -> Iterator[bytes]:
            with file:
                try:
                    while piece := file.read(CHUNK):
                        yield piece
                except OSError as error:
                    raise self._failed(error) from error

        return pieces()

    def names(self, prefix: str) -> list[str]:
        """Names below a directory, sorted."""
        try:
            self._require()
            found = (self._root / check_name(prefix)).rglob("*")
            return sorted(str(path.relative_to(self._root)) for path in found if path.is_file())
        except OSError as error:
            raise self._failed(error) from error

    def remove(self, names: Iterable[str]) -> None:
        """Forget names; those that are not there are passed over."""
        try:
            for name in names:
                (self._root / check_name(name)).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error) from error

    def _require(self) -> None:
        if not self._root.is_dir():
            raise DepotError(f"the shared store `{self._root}` is away; mount it again")

    def _failed(self, error: OSError) -> DepotError:
        reason = (error.strerror or str(error)).lower()
        return DepotError(f"the shared store `{self.place}` can't be used: {reason}; mend it, then try again")


def _up_to(directory: Path, root: Path) -> Iterator[Path]:
    while True:
        yield directory
        if directory == root:
            return
        directory = directory.parent


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
