"""What one agent keeps: its memory and its artifacts, as bodies see them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from ringfence.kernel.journal.blobs import BlobError, Blobs
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.types import AgentKey
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.lent import ArtifactFound, MemoryFound

OUTPUT_MEDIA_TYPE = "application/octet-stream"
HELD_BYTES_MAX = 32 << 20
"""Contents that requests of one agent to models have in memory at once, before the next is read."""


class AgentMemory:
    """Reads memories for one agent."""

    def __init__(self, store: Store, key: AgentKey) -> None:
        self._store = store
        self._key = key

    async def search(
        self, space: str, query: str, tags: Sequence[str], language: str, *, limit: int, offset: int
    ) -> Sequence[MemoryFound]:
        """Find entries, best first; an empty query gives the newest. An empty space is the agent's own."""
        return await self._store.memory_search(self._key, space, query, tags, language, limit, offset)


class AgentArtifacts:
    """Keeps and reads the artifacts of one agent."""

    def __init__(self, store: Store, blobs: Blobs, key: AgentKey, branch: Callable[[], int]) -> None:
        self._store = store
        self._blobs = blobs
        self._key = key
        self._branch = branch
        self._paging = asyncio.Lock()
        self._held, self._fewer = 0, asyncio.Condition()

    async def keep(self, data: bytes) -> str:
        """Store bytes; when it returns they survive a power cut."""
        try:
            return await asyncio.to_thread(self._blobs.put, data)
        except BlobError as error:
            raise CallFailed(f"{error}; nothing was kept") from error

    async def keep_output(self, path: Path, name: str, size_bytes: int, step: int) -> str:
        """Store what a command wrote as the next version of a name."""
        try:
            ref = await asyncio.to_thread(self._blobs.put_file, path)
        except BlobError as error:
            raise CallFailed(f"the output can't be kept: {error}") from error
        found = ArtifactFound(
            name=name, version=0, ref=ref, media_type=OUTPUT_MEDIA_TYPE, size_bytes=size_bytes
        )
        await self._store.keep_artifact(self._key, found, step, self._branch())
        return ref

    async def keep_page(self, data: bytes, page: ArtifactFound, step: int) -> None:
        """Store bytes under a name that is theirs alone, where they are not kept under it already."""
        async with self._paging:
            found = await self._store.artifact(self._key, page.name, "", 0)
            if found is not None and found.ref == page.ref:
                return
            await self.keep(data)
            await self._store.keep_artifact(self._key, page, step, self._branch())

    @contextlib.asynccontextmanager
    async def room(self, size: int) -> AsyncGenerator[None]:
        """Wait until contents of so many bytes may be held in memory, and count them while the block is entered."""
        if not size:
            yield
            return
        async with self._fewer:
            # One that is longer than all of the room goes alone.
            await self._fewer.wait_for(lambda: not self._held or self._held + size <= HELD_BYTES_MAX)
            self._held += size
        try:
            yield
        finally:
            self._held -= size
            async with self._fewer:
                self._fewer.notify_all()

    async def find(self, name: str, ref: str, version: int) -> ArtifactFound | None:
        """Find an artifact of this agent."""
        return await self._store.artifact(self._key, name, ref, version)

    async def read(self, ref: str, offset: int, limit: int) -> bytes:
        """Read a part."""
        try:
            return await asyncio.to_thread(self._blobs.part, ref, offset, limit)
        except BlobError as error:
            raise CallFailed(str(error)) from error
