"""An agent's own output, kept in bounded files: the newest part and the part before it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ringfence.kernel.pipes import reader_of

LOG_BYTES_MAX = 8 << 20
"""Size at which a log is turned over. Two files are kept, so at most twice this is on disk for a stream."""

_CHUNK = 1 << 16


class LogPump:
    """Copies one stream of one sandbox into its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._older = path.with_suffix(".1.log")
        self._changed = asyncio.Condition()
        self._ended = False

    async def run(self, read_fd: int) -> None:
        """Copy until the writers are gone. Takes ownership of `read_fd`."""
        reader, transport = await reader_of(read_fd)
        self._ended = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        try:
            while data := await reader.read(_CHUNK):
                if file.tell() + len(data) > LOG_BYTES_MAX:
                    file.close()
                    self.path.replace(self._older)
                    file = self.path.open("ab")
                file.write(data)
                file.flush()
                async with self._changed:
                    self._changed.notify_all()
        finally:
            file.close()
            transport.close()
            async with self._changed:
                self._ended = True
                self._changed.notify_all()

    async def read(self) -> AsyncIterator[bytes]:
        """Everything kept so far, oldest first."""
        for path in (self._older, self.path):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue
            with file:
                while data := file.read(_CHUNK):
                    yield data

    def tail(self, limit: int = 2000) -> str:
        """The last part, for the error of a failed agent."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - limit))
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    async def follow(self, over: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Everything kept, then what comes, until it is `over`: no program writes any more, and none will."""
        position = 0
        async for data in self.read():
            yield data
        if self.path.exists():
            position = self.path.stat().st_size
        while True:
            size = self.path.stat().st_size if self.path.exists() else 0
            if size < position:
                position = 0
            if size > position:
                with self.path.open("rb") as file:
                    file.seek(position)
                    data = file.read(_CHUNK)
                position += len(data)
                yield data
                continue
            if over():
                return
            try:
                async with asyncio.timeout(0.5), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                continue
