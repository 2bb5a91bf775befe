"""Byte streams within a session: each direction has a window, so that a slow reader holds up its own writer and no one else."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from ringfence.sandbox.remote import wire
from ringfence.sandbox.remote.session import Session, SessionLostError

BULK_WINDOW = 256 << 10
RELAY_WINDOW = 64 << 10
"""Bytes on their way in one direction of a channel: for files and output, and for one connection of a program."""


class ChannelLostError(Exception):
    """The other end of a channel is gone."""


class Channel:
    """One end.

    Args:
        session: carries it.
        number: names it at both ends.
        window: bytes that may be unread, in each direction.
        sends: whether this end writes.
        receives: whether this end reads.
        on_done: called once neither end uses it any more.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        *,
        window: int,
        sends: bool,
        receives: bool,
        on_done: Callable[[int], None],
    ) -> None:
        self.number = number
        self._session = session
        self._window = window
        self._credit = window
        self._sent_all = not sends
        self._had_all = not receives
        self._lost = False
        self._gone = asyncio.Event()
        self._chunks: deque[bytes] = deque()
        self._unread = 0
        self._uncredited = 0
        self._changed = asyncio.Event()
        self._credited = asyncio.Event()
        self._on_done = on_done

    @property
    def lost(self) -> bool:
        """Whether the other end gave it up."""
        return self._lost

    async def until_lost(self) -> None:
        """Wait until the other end gives it up, or the session is lost; for ever where it ends well.

        Raises:
            ChannelLostError: always.
        """
        await self._gone.wait()
        raise ChannelLostError("the other end of a stream is gone")

    async def send(self, data: bytes | memoryview) -> None:
        """Write all of `data`; waits until the reader has room.

        Raises:
            ChannelLostError: the other end is gone.
        """
        rest = memoryview(data)
        while rest:
            while self._credit <= 0 and not self._lost:
                self._credited.clear()
                await self._credited.wait()
            if self._lost or self._sent_all:
                raise ChannelLostError("the other end of a stream is gone")
            size = min(len(rest), self._credit, wire.DATA_BYTES_MAX)
            self._credit -= size
            await self._post(wire.Data(channel=self.number, data=bytes(rest[:size])))
            rest = rest[size:]

    async def end(self) -> None:
        """Say that nothing more comes from here; the other direction goes on."""
        if not self._sent_all and not self._lost:
            self._sent_all = True
            with contextlib.suppress(ChannelLostError):
                await self._post(wire.End(channel=self.number))
            self._look()

    async def reset(self) -> None:
        """Give the channel up; the other end is told."""
        if not self._lost and not (self._sent_all and self._had_all):
            self.drop()
            with contextlib.suppress(ChannelLostError):
                await self._post(wire.Reset(channel=self.number))

    async def read(self) -> bytes:
        """The next bytes, empty at the end.

        Raises:
            ChannelLostError: the other end is gone; what it had sent before is lost.
        """
        while not self._chunks and not self._had_all and not self._lost:
            self._changed.clear()
            await self._changed.wait()
        if self._lost:
            raise ChannelLostError("the other end of a stream is gone")
        if not self._chunks:
            return b""
        data = self._chunks.popleft()
        self._unread -= len(data)
        self._uncredited += len(data)
        if self._uncredited >= self._window // 2 and not self._had_all:
            size, self._uncredited = self._uncredited, 0
            await self._post(wire.Credit(channel=self.number, size=size))
        return data

    def take(self, message: wire.Data | wire.Credit | wire.End | wire.Reset) -> None:
        """What the other end sent.

        Raises:
            WireError: it sent more than it may.
        """
        match message:
            case wire.Data(data=data):
                self._unread += len(data)
                if self._had_all or self._unread + self._uncredited > self._window:
                    raise wire.WireError("a stream sent more than there was room for")
                self._chunks.append(data)
                self._changed.set()
            case wire.Credit(size=size):
                self._credit = min(self._credit + size, self._window)
                self._credited.set()
            case wire.End():
                self._had_all = True
                self._changed.set()
                self._look()
            case wire.Reset():
                self.drop()

    def drop(self) -> None:
        """Forget it: whoever waits at this end is told."""
        self._lost = True
        self._gone.set()
        self._chunks.clear()
        self._changed.set()
        self._credited.set()
        self._on_done(self.number)

    def _look(self) -> None:
        if self._sent_all and self._had_all:
            self._on_done(self.number)

    async def _post(self, message: wire.Counted) -> None:
        try:
            await self._session.send(message)
        except SessionLostError as error:
            raise ChannelLostError(str(error)) from error


class Channels:
    """The channels of one side.

    Args:
        session: carries them.
        first: number of the first channel made here; the other side counts from the other of 0 and 1.
    """

    def __init__(self, session: Session, first: int) -> None:
        self._session = session
        self._next = first
        self._open: dict[int, Channel] = {}

    def make(
        self,
        *,
        sends: bool = False,
        receives: bool = False,
        number: int | None = None,
        window: int = BULK_WINDOW,
    ) -> Channel:
        """A new channel, or this end of one that the other side made.

        Raises:
            WireError: the number is taken.
        """
        if number is None:
            number, self._next = self._next, self._next + 2
        elif number in self._open:
            raise wire.WireError("a stream was opened twice")
        channel = Channel(
            self._session, number, window=window, sends=sends, receives=receives, on_done=self._done
        )
        self._open[number] = channel
        return channel

    def take(self, message: wire.Data | wire.Credit | wire.End | wire.Reset) -> None:
        """Give a message to its channel; one for a channel that this side gave up already is dropped."""
        channel = self._open.get(message.channel)
        if channel is not None:
            channel.take(message)

    def _done(self, number: int) -> None:
        self._open.pop(number, None)

    def drop_all(self) -> None:
        """The session is lost."""
        for channel in list(self._open.values()):
            channel.drop()


class Bytes:
    """Reads exact amounts from a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buffer = bytearray()

    async def some(self, most: int) -> bytes:
        """Up to `most` bytes, empty at the end."""
        if not self._buffer:
            self._buffer += await self._channel.read()
        data = bytes(self._buffer[:most])
        del self._buffer[: len(data)]
        return data

    async def exactly(self, size: int) -> bytes:
        """So many bytes.

        Raises:
            WireError: the stream ends before.
            ChannelLostError: its other end is gone.
        """
        while len(self._buffer) < size:
            data = await self._channel.read()
            if not data:
                raise wire.WireError("a stream ended too early")
            self._buffer += data
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def frame(self, most: int) -> bytes | None:
        """One frame of four bytes of length and its content; None at the end.

        Raises:
            WireError: it is longer than `most` bytes, or cut off.
        """
        head = await self.some(4)
        if not head:
            return None
        if len(head) < 4:  # noqa: PLR2004 - what is missing of the length
            head += await self.exactly(4 - len(head))
        size = int.from_bytes(head, "big")
        if size > most:
            raise wire.WireError(f"an entry of {size} bytes is too large")
        return await self.exactly(size)
