"""A client of one gRPC stream that does no more than that: HTTP/2 frames by hand, for the generator.

gRPC's own client takes as much processor time for a call as its server does for an echo: of what is measured with it, half
is the measuring. Agents don't use it either: their library speaks HTTP/2 itself.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Final, cast

import hpack
from ringfence.agent.status import NAMES

DATA, HEADERS, _, RESET, SETTINGS, _, PING, GOAWAY, WINDOW, _ = range(10)
END_STREAM: Final = 1
ACK: Final = 1
END_HEADERS: Final = 4
SET_WINDOW: Final = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">BHBBI")
_PREFIX = struct.Struct(">BI")
_NUMBER = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_WINDOW_FIRST = 65_535
_ROOM = 1 << 30
"""What both ends of this client's connection may send before it says more: no update for each answer."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Give one frame."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _named(status: str) -> str:
    """A status as gRPC calls it; one that it has no name for as it came."""
    return NAMES[int(status)] if status.isdecimal() and int(status) < len(NAMES) else f"status {status}"


class Frames(asyncio.Protocol):
    """One connection with one call on it.

    Attributes:
        on_message: gets each message of the server.
        on_end: gets why there will be no more; empty: the call ended well.
    """

    def __init__(
        self, method: str, on_message: Callable[[bytes], None], on_end: Callable[[str], None]
    ) -> None:
        self._method = method
        self.on_message = on_message
        self.on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._headers = hpack.Decoder()
        self._rest = b""
        self._part = b""
        self._came = 0
        self._room = self._stream_room = self._first = _WINDOW_FIRST
        self._held: list[bytes] = []
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the call."""
        self._transport = cast("asyncio.Transport", transport)
        fields = [
            *((":method", "POST"), (":scheme", "http"), (":path", self._method), (":authority", "localhost")),
            *(("content-type", "application/grpc"), ("te", "trailers")),
        ]
        block: bytes = hpack.Encoder().encode(fields)
        self._transport.write(
            _PREFACE
            + frame(SETTINGS, 0, 0, _SETTING.pack(SET_WINDOW, _ROOM))
            + frame(WINDOW, 0, 0, _NUMBER.pack(_ROOM))
            + frame(HEADERS, END_HEADERS, 1, block)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._end(f"the connection was lost: {exc}" if exc else "the connection was closed")

    def send(self, message: bytes) -> None:
        """Send a message, as soon as there is room for it."""
        size = len(message) + 5
        if self._held or size > self._room or size > self._stream_room:
            self._held.append(message)
            return
        self._room -= size
        self._stream_room -= size
        if self._transport is not None:
            self._transport.write(
                b"".join((_HEAD.pack(0, size, DATA, 0, 1), _PREFIX.pack(0, size - 5), message))
            )

    def close(self) -> None:
        """End what is sent, and the connection."""
        self._over = True
        if self._transport is not None:
            self._transport.write(frame(DATA, END_STREAM, 1))
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take all frames that are whole."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= _HEAD.size:
            high, low, kind, flags, number = _HEAD.unpack_from(data, at)
            start = at + _HEAD.size
            stop = start + (high << 16 | low)
            if stop > end:
                break
            at = stop
            if kind == DATA:
                self._data(data[start:stop])
            else:
                self._other(kind, flags, number, data[start:stop])
        self._rest = data[at:]

    def _data(self, payload: bytes) -> None:
        self._came += len(payload)
        if self._came >= _ROOM // 2:
            more = _NUMBER.pack(self._came)
            self._write(frame(WINDOW, 0, 0, more) + frame(WINDOW, 0, 1, more))
            self._came = 0
        if self._part:
            payload = self._part + payload
        while len(payload) >= _PREFIX.size:
            size = _PREFIX.size + _PREFIX.unpack_from(payload)[1]
            if len(payload) < size:
                break
            message, payload = payload[_PREFIX.size : size], payload[size:]
            self.on_message(message)
        self._part = payload

    def _other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == WINDOW:
            (more,) = _NUMBER.unpack(payload)
            if number:
                self._stream_room += more
            else:
                self._room += more
            self._resend()
        elif kind == SETTINGS and not flags & ACK:
            for name, value in _SETTING.iter_unpack(payload):
                if name == SET_WINDOW:
                    self._stream_room += value - self._first
                    self._first = value
            self._write(frame(SETTINGS, ACK, 0))
            self._resend()
        elif kind == PING and not flags & ACK:
            self._write(frame(PING, ACK, 0, payload))
        elif kind == HEADERS:
            fields = dict(cast("Any", self._headers.decode(payload)))
            if flags & END_STREAM:
                status, text = fields.get("grpc-status", "0"), fields.get("grpc-message", "")
                self._end("" if status == "0" else f"{_named(status)}: {text}")
        elif kind in (RESET, GOAWAY):
            self._end("the server ended the call")

    def _resend(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self.send(message)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = True
            self.on_end(why)
