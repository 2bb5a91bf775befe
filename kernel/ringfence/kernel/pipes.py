"""Reading ends of pipes on the event loop."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import uvloop

LIMIT: Final = 1 << 16
"""Bytes that wait for a reader before the writer has to."""


class _End:
    """A descriptor as event loops take it: something with a number, and a way to close it.

    INVARIANT: a descriptor is closed once. uvloop closes its number by itself, and after that the object that it came with;
    closed a second time, the number may be that of a file that another thread has opened meanwhile.
    """

    def __init__(self, fd: int, *, ours: bool) -> None:
        self._fd = fd
        self._ours = ours

    def fileno(self) -> int:
        """The number."""
        return self._fd

    def close(self) -> None:
        """Close it, unless the loop does. May be called twice."""
        if self._ours:
            self._ours = False
            os.close(self._fd)


async def reader_of(read_fd: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """Read a pipe on the running loop.

    Args:
        read_fd: its reading end; it belongs to the transport from here on.

    Returns:
        What to read from, and what to close afterwards.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LIMIT)
    end = _End(read_fd, ours=not isinstance(loop, uvloop.Loop))
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), end)
    return reader, transport
