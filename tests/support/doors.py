"""An agent's door without a socket: a connection fed with bytes, whose answers are kept."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from typing import Any

from ringfence.kernel.server import frames
from ringfence.kernel.server.connection import Connection
from ringfence.kernel.server.frames import PREFACE, frame
from ringfence.kernel.server.gate import Bounds
from ringfence.kernel.server.stream import Stream

HELLO = PREFACE + frame(frames.SETTINGS, 0, 0)
ACKNOWLEDGED = HELLO + frame(frames.SETTINGS, frames.ACK, 0)
FIELDS = b"\x83\x86"


def headers(number: int, block: bytes = FIELDS, flags: int = frames.END_HEADERS) -> bytes:
    return frame(frames.HEADERS, flags, number, block)


def message(data: bytes) -> bytes:
    return b"\x00" + struct.pack(">I", len(data)) + data


class Pipe:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = self.aborted = False
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        found, at = list[tuple[int, int, int, bytes]](), 0
        while at < len(self.written):
            high, low, kind, flags, number = frames.read_head(self.written, at)
            at += frames.HEAD_BYTES
            size = high << 16 | low
            found.append((kind, flags, number, bytes(self.written[at : at + size])))
            at += size
        return found


class Listener:
    """Keeps the messages of one stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.heard, self.over, self.ends = stream, list[bytes](), False, False

    def message(self, data: bytes) -> None:
        self.heard.append(data)

    def ended(self) -> None:
        self.ends = True

    def gone(self) -> None:
        self.over = True


class Door:
    """Serves all streams at once, or none."""

    def __init__(self, *, serves: bool = True) -> None:
        self.bounds = Bounds()
        self.serves = serves
        self.listeners: list[Listener] = []
        self.pipe = Pipe()
        self.connection = Connection(self)
        self.connection.connection_made(self.pipe)  # type: ignore[arg-type]  # as much of a transport as is used

    def accept(self, stream: Stream, headers: Mapping[str, str]) -> None:
        del headers
        listener = Listener(stream)
        self.listeners.append(listener)
        stream.attend(listener)
        if self.serves:
            stream.serve()

    def lost(self, connection: Connection) -> None:
        assert connection is self.connection

    def feed(self, data: bytes, piece: int = 30_000) -> None:
        for at in range(0, len(data), piece):
            if self.pipe.closed:
                return
            part = data[at : at + piece]
            self.connection.get_buffer(-1)[: len(part)] = part
            self.connection.buffer_updated(len(part))

    def end(self) -> None:
        self.connection.connection_lost(None)
        assert all(listener.over for listener in self.listeners)


def run(work: Any) -> None:
    async def main() -> None:
        work()

    asyncio.run(main())
