"""Counted messages between two processes, each once and in order, over one connection after another."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from ringfence.sandbox.remote import wire

UNSEEN_BYTES_MAX = 1 << 20
"""What may be on its way or kept for the next connection; a sender waits above it."""
_TELL_EVERY_BYTES = 128 << 10
_TELL_EVERY_MESSAGES = 128


class SessionLostError(Exception):
    """The other side, or what it knew of this session, is gone. The message says why."""


class Session:
    """One side of a session.

    Memory is bounded: at most `UNSEEN_BYTES_MAX` and a message for each waiting sender are kept until the other side has them.

    Args:
        handle: called for each message received; it must not block. A `WireError` of its ends the session.
    """

    def __init__(self, handle: Callable[[wire.Counted], None]) -> None:
        self.received = 0
        self.lost: SessionLostError | None = None
        self.connected = False
        self._handle = handle
        self._waiting: deque[bytes] = deque()
        self._unseen: deque[bytes] = deque()
        self._seen_there = 0
        self._bytes = 0
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._heard = 0.0
        self._told = 0
        self._untold_bytes = 0

    async def send(self, message: wire.Counted) -> None:
        """Send, now or over the next connection; waits while too much is unseen.

        Raises:
            SessionLostError: there will be no next connection.
            WireError: the message is too large; the session goes on.
        """
        frame = wire.encode(message)
        while self.lost is None and self._bytes > UNSEEN_BYTES_MAX:
            self._room.clear()
            await self._room.wait()
        if self.lost is not None:
            raise self.lost
        self._waiting.append(frame)
        self._bytes += len(frame)
        self._more.set()

    def lose(self, why: str) -> None:
        """Give the session up: every sender is told."""
        if self.lost is None:
            self.lost = SessionLostError(why)
            self._waiting.clear()
            self._unseen.clear()
            self._room.set()
            self._more.set()

    async def run(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        received_there: int,
        silence_s: float,
    ) -> str:
        """Use a connection until it ends.

        Args:
            reader: of the connection.
            writer: of the connection; it is closed on return.
            received_there: how many messages of this side the other has had.
            silence_s: the other side is given up when nothing was heard of it for so long.

        Returns:
            Why it ended; `lost` is set where the session can't go on.
        """
        try:
            self._seen(received_there)
        except wire.WireError as error:
            self.lose(str(error))
            writer.transport.abort()
            return str(error)
        self._waiting.extendleft(reversed(self._unseen))
        self._unseen.clear()
        self._more.set()
        self._heard = asyncio.get_running_loop().time()
        self.connected = True
        work = (self._write(writer), self._read(reader, writer), self._beat(writer, silence_s))
        tasks = [asyncio.create_task(part) for part in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.connected = False
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            writer.transport.abort()
        return self._reason(ended)

    def _reason(self, ended: list[BaseException | str]) -> str:
        for one in ended:
            if isinstance(one, wire.WireError):
                self.lose(str(one))
                return str(one)
        for one in ended:
            if isinstance(one, str):
                return one
            if isinstance(one, asyncio.IncompleteReadError):
                return "the connection was closed"
            if isinstance(one, OSError):
                return one.strerror or str(one)
            if not isinstance(one, asyncio.CancelledError):
                raise one
        return "the connection was closed"

    async def _write(self, writer: asyncio.StreamWriter) -> str:
        while self.lost is None:
            while self._waiting:
                frame = self._waiting.popleft()
                self._unseen.append(frame)
                writer.write(frame)
                await writer.drain()
            self._more.clear()
            await self._more.wait()
        return str(self.lost)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        loop = asyncio.get_running_loop()
        while True:
            message = await wire.read(reader)
            self._heard = loop.time()
            if isinstance(message, wire.Beat):
                self._seen(message.received)
                continue
            self.received += 1
            self._untold_bytes += len(message.data) if isinstance(message, wire.Data) else 0
            self._handle(message)
            if self._untold_bytes >= _TELL_EVERY_BYTES or self.received - self._told >= _TELL_EVERY_MESSAGES:
                self._tell(writer)

    async def _beat(self, writer: asyncio.StreamWriter, silence_s: float) -> str:
        loop = asyncio.get_running_loop()
        while loop.time() - self._heard < silence_s:
            self._tell(writer)
            await asyncio.sleep(silence_s / 4)
        return f"nothing was heard for {silence_s:g} s"

    def _tell(self, writer: asyncio.StreamWriter) -> None:
        self._told, self._untold_bytes = self.received, 0
        with contextlib.suppress(OSError, RuntimeError):
            writer.write(wire.encode(wire.Beat(received=self.received)))

    def _seen(self, count: int) -> None:
        """The other side has had so many messages: those are not kept any more."""
        newly = count - self._seen_there
        if newly < 0 or newly > len(self._unseen):
            raise wire.WireError("the other side has had messages that were never sent")
        for _ in range(newly):
            self._bytes -= len(self._unseen.popleft())
        self._seen_there = count
        if self._bytes <= UNSEEN_BYTES_MAX:
            self._room.set()
