"""The part of the store about artifacts' bytes: who names them."""

from __future__ import annotations

from collections.abc import Collection

from ringfence.kernel.journal.store_base import StoreBase


class BlobStore(StoreBase):
    """Every method may raise Unavailable."""

    async def kept_blobs(self, refs: Collection[str]) -> set[str]:
        """Find which of these references an artifact of any agent has."""
        rows = await self._tuples("blobs.kept", {"refs": list(refs)})
        return {str(row[0]) for row in rows}

    async def named_blobs(self, chain: int, refs: Collection[str]) -> set[str]:
        """Find which of these references stand in what the database has of a chain."""
        rows = await self._tuples("blobs.named", {"chain": chain, "refs": list(refs)})
        return {str(row[0]) for row in rows}
