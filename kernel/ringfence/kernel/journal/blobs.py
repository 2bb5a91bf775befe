"""Artifacts: large results by the hash of their content, compressed, in a directory."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import os
import re
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.kernel.journal.lately import Lately

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

CHUNK = 1 << 20
_LEVEL = 1
_REF = re.compile(r"[0-9a-f]{64}")
_ABANDONED_S = 3600.0


class BlobError(Exception):
    """An artifact can't be kept or given back. `str()` is one line that says which and why."""


class Blobs:
    """A store of immutable bytes. Safe for several threads and processes at once.

    The reference of an artifact is the SHA-256 of its bytes, in hex: the same bytes are kept once.

    Args:
        root: its directory, created with mode 0700 when it isn't there.

    Raises:
        BlobError: the directory can't be made.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fresh = root / "fresh"
        self._lately, self._removing = Lately(), threading.Lock()
        with _named("the artifact store can't be opened", root):
            self._fresh.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.chmod(0o700)
            _remove_abandoned(self._fresh)

    def put(self, data: bytes) -> str:
        """Keeps bytes and returns their reference. When it returns they survive a power cut.

        Raises:
            BlobError: they can't be kept; nothing is.
        """
        view = memoryview(data)
        return self._keep(view[start : start + CHUNK] for start in range(0, len(view), CHUNK))

    def put_file(self, path: Path) -> str:
        """Keeps the content of a file, in bounded memory, and returns its reference.

        Raises:
            BlobError: it can't be read or kept; nothing is.
        """
        with _named(f"`{path}` can't be kept as an artifact", self._root), path.open("rb") as source:
            return self._keep(iter(lambda: source.read(CHUNK), b""))

    def get(self, ref: str) -> bytes:
        """Gives an artifact back, verified against its reference.

        Raises:
            BlobError: there is none, or its bytes have changed.
        """
        return b"".join(self._read(ref))

    def part(self, ref: str, offset: int, limit: int) -> bytes:
        """Gives a part of an artifact, in bounded memory. All of it is read and verified, whatever the part.

        Raises:
            BlobError: there is none, or its bytes have changed.
        """
        part = bytearray()
        at = 0
        for piece in self._read(ref):
            if at < offset + limit and at + len(piece) > offset:
                part += piece[max(0, offset - at) : offset + limit - at]
            at += len(piece)
        return bytes(part)

    def chunks(self, ref: str) -> Iterator[bytes]:
        """Gives an artifact back in pieces; only when the last one came without an error are all of them right.

        Raises:
            BlobError: there is none, or its bytes have changed; while iterating.
        """
        return self._read(ref)

    def size(self, ref: str) -> int:
        """Length of an artifact in bytes. Reads all of it.

        Raises:
            BlobError: there is none, or its bytes have changed.
        """
        return sum(len(piece) for piece in self._read(ref))

    def has(self, ref: str) -> bool:
        """Whether an artifact is there and its bytes are the ones that were kept. Reads all of it."""
        try:
            for _ in self._read(ref):
                pass
        except BlobError:
            return False
        return True

    # -- what nobody needs ----------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Begin a look at what nobody needs: what is put from now on, or was since the look before, is not removed by it."""
        with self._removing:
            self._lately.turn()

    def older(self, before: float, after: str, limit: int) -> list[str]:
        """List artifacts whose bytes were written before a time, those after a reference, in order.

        Raises:
            BlobError: the directory can't be read.
        """
        with _named("the artifact store can't be read", self._root):
            return heapq.nsmallest(limit, self._older(before, after))

    def _older(self, before: float, after: str) -> Iterator[str]:
        for path in self._root.glob("??/*"):
            ref = path.parent.name + path.name
            if _REF.fullmatch(ref) and ref > after and path.stat().st_mtime < before:
                yield ref

    def remove(self, ref: str, *, dry: bool = False) -> int:
        """Remove an artifact that nothing names, unless it was put lately; with `dry` only say what that would free.

        Returns:
            Bytes of the disk; 0: it stays, or there was none.

        Raises:
            BlobError: it can't be removed.
        """
        path = self._path(ref)
        with self._removing, _named("an artifact can't be removed", self._root):
            if ref in self._lately or not path.exists():
                return 0
            size = path.stat().st_size
            if not dry:
                path.unlink()
        return size

    def _path(self, ref: str) -> Path:
        if _REF.fullmatch(ref) is None:
            raise BlobError(f"`{ref[:80]}` is not the reference of an artifact")
        return self._root / ref[:2] / ref[2:]

    def _keep(self, chunks: Iterable[bytes | memoryview]) -> str:
        with _named("an artifact can't be kept", self._root):
            handle, name = tempfile.mkstemp(dir=self._fresh)
            temporary = Path(name)
            try:
                with os.fdopen(handle, "wb", buffering=CHUNK) as output:
                    digest = hashlib.sha256()
                    packer = zlib.compressobj(_LEVEL)
                    for chunk in chunks:
                        digest.update(chunk)
                        output.write(packer.compress(chunk))
                    output.write(packer.flush())
                    output.flush()
                    os.fsync(output.fileno())
                ref = digest.hexdigest()
                path = self._path(ref)
                # INVARIANT: once this is noted nobody removes it; if it was removed just before, it is not there below.
                with self._removing:
                    self._lately.add(ref)
                if path.parent.exists() and self.has(ref):
                    temporary.unlink()
                else:
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            # Also for one that was there: whoever put it may have died before it came this far.
            _fsync_directory(path.parent)
            _fsync_directory(self._root)
        return ref

    def _read(self, ref: str) -> Iterator[bytes]:
        """The bytes of an artifact; the last piece comes only if all of them are right."""
        path = self._path(ref)
        digest = hashlib.sha256()
        unpacker = zlib.decompressobj()
        changed = BlobError(f"artifact `{ref}` has changed on disk: restore `{path}` from a backup")
        with _named(f"artifact `{ref}` can't be read", self._root), path.open("rb") as source:
            while packed := source.read(CHUNK):
                # What repeats itself unpacks to a thousand times its size: a piece at a time.
                while packed:
                    try:
                        piece = unpacker.decompress(packed, CHUNK)
                    except zlib.error:
                        raise changed from None
                    packed = unpacker.unconsumed_tail
                    digest.update(piece)
                    yield piece
            while piece := unpacker.decompress(b"", CHUNK):
                digest.update(piece)
                yield piece
        if not unpacker.eof or unpacker.unused_data or digest.hexdigest() != ref:
            raise changed


@contextlib.contextmanager
def _named(what: str, root: Path) -> Generator[None]:
    """Turns a failed file operation into the store's error."""
    try:
        yield
    except FileNotFoundError as error:
        raise BlobError(f"{what}: `{error.filename}` does not exist") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BlobError(f"{what}: no space is left on the file system of `{root}`: free some") from error
        raise BlobError(f"{what}: {(error.strerror or str(error)).lower()} (`{root}`)") from error


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_abandoned(directory: Path) -> None:
    """Removes what writers that died left half-written. Younger files may have a living writer."""
    limit = time.time() - _ABANDONED_S
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < limit:
                    Path(entry.path).unlink()
