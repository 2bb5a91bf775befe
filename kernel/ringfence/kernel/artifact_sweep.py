"""Removes bytes of artifacts that nothing names any more: no artifact, no row of the journal, no archived part, no import's origin.

INVARIANT: what a row names that is committed, or that a call under way may still commit, stays. Bytes are looked for first; who
names them is looked up after that; what was put meanwhile, or not long before, is left alone.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ringfence.kernel.core import Core

BATCH: Final = 20_000
"""Artifacts that one look goes over."""

REST_S: Final = 86_400.0
"""After a look over all of them: who names them is asked of all rows there are."""

_REF: Final = re.compile(rb"[0-9a-f]{64}")


@dataclass(slots=True, kw_only=True)
class Swept:
    """What one look removed, or would."""

    artifacts: int = 0
    size_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class ArtifactSweep:
    """Looks of one kernel at the bytes in its data directory.

    Attributes:
        origins: where imported agents keep the chains they came with.
    """

    core: Core
    origins: Path
    _after: str = ""
    _rest_until: float = 0.0

    async def look(self, age_s: float, *, dry: bool, whole: bool) -> Swept:
        """Remove what is so old and named by nothing.

        Args:
            age_s: in seconds.
            dry: only say what would go.
            whole: go over all of them, and not only over the next part.

        Raises:
            JournalError: the database is away, or an archived part can't be read: who knows what it names.
            BlobError: the bytes can't be listed or removed.
        """
        done = Swept()
        while time.monotonic() >= self._rest_until:
            self.core.blobs.turn()
            limit = time.time() - age_s
            found = await asyncio.to_thread(self.core.blobs.older, limit, self._after, BATCH)
            for ref in sorted(await self._free(set(found))):
                # A kernel that was taken over from has no say in what its successor keeps.
                if self.core.lease.expired:
                    return done
                freed = await asyncio.to_thread(self.core.blobs.remove, ref, dry=dry)
                done.artifacts += freed > 0
                done.size_bytes += freed
            self._after = found[-1] if len(found) == BATCH else ""
            if not self._after:
                self._rest_until = time.monotonic() + REST_S
            if not whole:
                break
        return done

    async def _free(self, found: set[str]) -> set[str]:
        """Those that nobody names. The database is asked before the archive: rows only move from there to here."""
        store = self.core.store
        left = found - await store.kept_blobs(found) if found else set[str]()
        chains = await store.chains() if left else []
        for chain in chains:
            left -= await store.named_blobs(chain, left) if left else set[str]()
        for chain in chains:
            for segment in await store.segments(chain) if left else ():
                if segment.pruned_at is None:
                    for row in await store.rows_of(segment):
                        left -= _refs(row.body)
        return await asyncio.to_thread(self._not_of_origins, left) if left else left

    def _not_of_origins(self, left: set[str]) -> set[str]:
        for path in self.origins.glob("*/journal.jsonl"):
            with path.open("rb") as file:
                for line in file:
                    left -= _refs(line)
        return left


def _refs(text: bytes) -> set[str]:
    """Whatever looks like a reference counts as one."""
    return {ref.decode() for ref in _REF.findall(text)} if b"artifact" in text else set()
