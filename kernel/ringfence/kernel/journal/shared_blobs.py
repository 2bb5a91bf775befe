"""Artifacts that several nodes share: kept here and in a depot, and brought from there where they are not here."""

from __future__ import annotations

import hashlib
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ringfence.kernel.journal.blobs import BlobError, Blobs
from ringfence.sandbox.depot import Depot, DepotError

KNOWN_MAX: Final = 65_536
"""Artifacts that are known to be in the depot; beyond it all are forgotten, and put there again when they are kept again."""


class SharedBlobs(Blobs):
    """Artifacts in the directory of this node and in a depot. One that is not in both is not kept.

    Args:
        root: directory on this node.
        depot: what the nodes share.

    Raises:
        BlobError: the directory can't be made.
    """

    def __init__(self, root: Path, depot: Depot) -> None:
        super().__init__(root)
        self._depot = depot
        self._shared: set[str] = set()

    def _keep(self, chunks: Iterable[bytes | memoryview]) -> str:
        ref = super()._keep(chunks)
        if ref not in self._shared:
            try:
                self._depot.put(_name(ref), self._path(ref))
            except DepotError as error:
                raise BlobError(f"an artifact can't be kept: {error}") from error
            if len(self._shared) >= KNOWN_MAX:
                self._shared.clear()
            self._shared.add(ref)
        return ref

    def _read(self, ref: str) -> Iterator[bytes]:
        path = self._path(ref)
        if not path.exists():
            self._bring(ref, path)
        return super()._read(ref)

    def _bring(self, ref: str, path: Path) -> None:
        """Write a local copy, if it unpacks to what the reference names; leave nothing where there is none."""
        fresh = path.parent.parent / "fresh" / secrets.token_hex(8)
        digest, unpacker = hashlib.sha256(), zlib.decompressobj()
        try:
            found = self._depot.chunks(_name(ref))
            if found is None:
                return
            with fresh.open("xb") as file:
                for packed in found:
                    file.write(packed)
                    digest.update(unpacker.decompress(packed))
                digest.update(unpacker.flush())
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != ref or not unpacker.eof:
                raise BlobError(
                    f"artifact `{ref}` is damaged in the shared store `{self._depot.place}`: restore it"
                )
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh.replace(path)
        except (DepotError, OSError, zlib.error) as error:
            raise BlobError(f"artifact `{ref}` can't be brought from the shared store: {error}") from error
        finally:
            fresh.unlink(missing_ok=True)


def _name(ref: str) -> str:
    return f"artifacts/{ref[:2]}/{ref[2:]}"
