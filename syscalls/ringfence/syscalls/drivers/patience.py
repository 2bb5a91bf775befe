"""A driver whose every answer is waited for so long and no longer: one that hangs would hold its call, or a rollback, for ever."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, BinaryIO, Final, TypeVar

from ringfence.syscalls.drivers.protocol import DriverError, ObjectDriver, Page, Snapshot, Stat

T = TypeVar("T")

BYTES_PER_S: Final = 256 << 10
"""Content that has to be read or written before an answer may take as long as it does at this speed."""


class Patient:
    """Does what another driver does, within time limits.

    Attributes:
        inner: that driver.

    Args:
        inner: the driver.
        timeout_s: longest wait for an answer that is no content, and for the next piece of content.
    """

    def __init__(self, inner: ObjectDriver, timeout_s: float) -> None:
        self.inner = inner
        self._timeout_s = timeout_s

    @property
    def identity(self) -> str:
        """Which target it is; empty where the driver doesn't say."""
        return str(getattr(self.inner, "identity", ""))

    async def describe(self, key: str) -> Stat | None:
        """See `Driver`."""
        return await self._within(self.inner.describe(key))

    async def list(self, prefix: str, after: str, limit: int) -> Page:
        """See `ObjectDriver`."""
        return await self._within(self.inner.list(prefix, after, limit))

    async def read(self, key: str, version: str, start: int, length: int) -> AsyncIterator[bytes]:
        """See `ObjectDriver`."""
        pieces = aiter(self.inner.read(key, version, start, length))
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise self._silent(self._timeout_s) from None
            yield piece

    async def snapshot(self, key: str, into: BinaryIO, most: int) -> Snapshot:
        """See `Driver`. It may take as long as content comes."""
        work = asyncio.ensure_future(self.inner.snapshot(key, into, most))
        size = -1
        try:
            while True:
                await asyncio.wait([work], timeout=self._timeout_s)
                if work.done():
                    return await work
                grown = os.fstat(into.fileno()).st_size
                if grown <= size:
                    raise self._silent(self._timeout_s)
                size = grown
        finally:
            work.cancel()

    async def verify(self, snapshot: Snapshot) -> bool:
        """See `Driver`."""
        return await self._within(self.inner.verify(snapshot), _size_of(snapshot))

    async def restore(self, snapshot: Snapshot, content: BinaryIO | None, expect: str) -> str:
        """See `Driver`."""
        return await self._within(
            self.inner.restore(snapshot, content, expect), _size_of(snapshot), sent=True
        )

    async def write(
        self, key: str, content: BinaryIO, size: int, attributes: Mapping[str, str], expect: str
    ) -> str:
        """See `ObjectDriver`."""
        return await self._within(self.inner.write(key, content, size, attributes, expect), size, sent=True)

    async def remove(self, key: str, expect: str) -> None:
        """See `ObjectDriver`."""
        await self._within(self.inner.remove(key, expect), sent=True)

    async def close(self) -> None:
        """See `ObjectDriver`."""
        await self.inner.close()

    async def _within(self, work: Coroutine[Any, Any, T], size: int = 0, *, sent: bool = False) -> T:
        # A driver may look at the thing before it does what it is asked to.
        limit = self._timeout_s + (self._timeout_s + size / BYTES_PER_S if size else 0)
        try:
            async with asyncio.timeout(limit):
                return await work
        except TimeoutError:
            raise self._silent(limit, sent=sent) from None

    @staticmethod
    def _silent(seconds: float, *, sent: bool = False) -> DriverError:
        return DriverError(f"it gave no answer within {seconds:g} s", sent=sent)


def _size_of(snapshot: Snapshot) -> int:
    return 0 if snapshot.stat is None else snapshot.stat.size
