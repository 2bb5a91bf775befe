"""Has prompts counted in a process of their own, see `llm_counter`. One for all agents, started when it is first needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from typing import Final

import msgspec
from ringfence.syscalls.errors import CallFailed, InvalidRequest
from ringfence.syscalls.llm_counter import HEAD, Answer
from ringfence.syscalls.llm_paging import Counted, Request

LONGEST_S: Final = 60.0
"""For one prompt, with the wait for those before it and the start of the process."""
_KEPT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class _Gone(Exception):
    """The process is not there any more."""


def _process(link: socket.socket) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ringfence.syscalls.llm_counter"],
        stdin=link.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd="/",
    )


class Counting:
    """The process, and the way to it. Belongs to the event loop that used it first."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def count(self, request: Request) -> Counted:
        """Count a prompt, and find what has to leave it.

        Raises:
            InvalidRequest: it holds what can't be counted.
            CallFailed: it can't be counted now.
        """
        try:
            data = msgspec.json.encode(request)
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the messages hold half of a surrogate pair, which is no text; send whole characters"
            ) from None
        try:
            async with asyncio.timeout(LONGEST_S), self._lock:
                found = await self._asked(data)
        except TimeoutError:
            raise CallFailed(
                f"the prompt was not counted within {LONGEST_S:g} s, so nothing was sent; make the call again",
                sent="no",
            ) from None
        if found.counted is None:
            raise CallFailed(f"the prompt can't be counted, so nothing was sent: {found.error}", sent="no")
        return found.counted

    async def _asked(self, data: bytes) -> Answer:
        for attempt in (1, 2):
            try:
                return await self._ask(data)
            except (_Gone, OSError, asyncio.IncompleteReadError):
                # It ends when nobody asked for a while; what ends it twice is this prompt.
                await self._end()
                if attempt == 2:  # noqa: PLR2004 - the last
                    raise CallFailed(
                        "the process that counts tokens ended, so nothing was sent; make the call again",
                        sent="no",
                    ) from None
            except BaseException:
                # An answer to somebody who has left must not become the next one's.
                await self._end()
                raise
        raise AssertionError("unreachable")

    async def _ask(self, data: bytes) -> Answer:
        if self._process is None or self._process.poll() is not None:
            await self._end()
            await self._start()
        if self._reader is None or self._writer is None:
            raise _Gone
        self._writer.write(HEAD.pack(len(data)))
        self._writer.write(data)
        await self._writer.drain()
        size = HEAD.unpack(await self._reader.readexactly(HEAD.size))[0]
        return msgspec.json.decode(await self._reader.readexactly(size), type=Answer)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.to_thread(_process, theirs)
            ours.setblocking(False)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def _end(self) -> None:
        """End the process: whatever it does, nobody waits for it."""
        process, writer = self._process, self._writer
        self._process = self._reader = self._writer = None
        if writer is not None:
            writer.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.to_thread(process.wait)

    async def close(self) -> None:
        """End the process."""
        await self._end()


_counting: dict[int, tuple[asyncio.AbstractEventLoop, Counting]] = {}


def counting() -> Counting:
    """The one of this event loop."""
    loop = asyncio.get_running_loop()
    held = _counting.get(0)
    if held is None or held[0] is not loop:
        held = _counting[0] = (loop, Counting())
    return held[1]
