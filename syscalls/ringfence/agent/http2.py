"""One gRPC call over one HTTP/2 connection (RFC 9113), without I/O: bytes in, messages out, and back.

What a client needs that makes a single call on each connection, to a socket on the same machine: no other
streams, no pushes, no compression. `ringfence.agent.link` and `ringfence.agent.aio_session` move the bytes.
"""

from __future__ import annotations

import base64
import binascii
import collections
import struct
import urllib.parse
from typing import TYPE_CHECKING, Final

from ringfence.agent.headers import Decoder, HeaderError, encode
from ringfence.agent.status import DETAILS_KEY, NAMES, Ended

if TYPE_CHECKING:
    from collections.abc import Iterable

WINDOW_BYTES: Final = 4 << 20
"""How much the kernel may send before we have taken it from the socket."""
FRAME_BYTES: Final = 1 << 20
HEADERS_BYTES: Final = 64 << 10

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE = range(9)
_CONTINUATION: Final = 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_ENABLE_PUSH, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST_SIZE = 0x2, 0x4, 0x5, 0x6
_STREAM: Final = 1
_DEFAULT_WINDOW: Final = 65535
_DEFAULT_FRAME: Final = 16384
_MOST: Final = (1 << 31) - 1
_HEAD_BYTES: Final = 9
_PREFIX_BYTES: Final = 5
_CANCEL: Final = 8

# What a stream that is reset without a status means (gRPC's "HTTP2 transport mapping"); everything else is INTERNAL.
_RESETS: Final = {7: "UNAVAILABLE", _CANCEL: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}


def _head(size: int, kind: int, flags: int, stream: int) -> bytes:
    return struct.pack(">HBBBI", size >> 8, size & 0xFF, kind, flags, stream)


class Exchange:
    """One call, from its first byte to its end.

    Args:
        path: of the method.
        most_bytes: longest message that is taken.
        metadata: more header lines for the kernel.

    Attributes:
        outgoing: bytes that wait to be written; whoever writes takes them away.
        ended: how the call ended; None: it goes on. Messages that came before are still given.
    """

    def __init__(self, path: str, *, most_bytes: int, metadata: Iterable[tuple[str, str]] = ()) -> None:
        self.outgoing = bytearray(_PREFACE)
        self.ended: Ended | None = None
        self._most = most_bytes
        self._incoming = bytearray()
        self._message = bytearray()
        self._headers = Decoder()
        self._block = bytearray()
        self._block_flags = 0
        self._in_block = False
        self._answered = False
        self._untold = 0
        self._window = _DEFAULT_WINDOW
        self._stream_window: int = _DEFAULT_WINDOW
        self._initial_window: int = _DEFAULT_WINDOW
        self._frame = _DEFAULT_FRAME
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._last = False
        self._begin(path, metadata)

    def _begin(self, path: str, metadata: Iterable[tuple[str, str]]) -> None:
        settings = (
            (_ENABLE_PUSH, 0),
            (_INITIAL_WINDOW_SIZE, WINDOW_BYTES),
            (_MAX_FRAME_SIZE, FRAME_BYTES),
            (_MAX_HEADER_LIST_SIZE, HEADERS_BYTES),
        )
        self._put(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))
        self._put(_WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW_BYTES - _DEFAULT_WINDOW))
        pairs = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "ringfence-agent"),
            *metadata,
        )
        self._put(_HEADERS, _END_HEADERS, _STREAM, encode(pairs))

    def _put(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.outgoing += _head(len(payload), kind, flags, stream) + payload

    # -- sending ---------------------------------------------------------------------------------------------

    def send(self, message: bytes, *, last: bool = False) -> None:
        """Put a message into `outgoing`, as far as the kernel has room for it; the rest follows by itself.

        Args:
            message: serialised.
            last: whether nothing follows it.
        """
        self._unsent.append(memoryview(struct.pack(">BI", 0, len(message)) + message))
        self._last = self._last or last
        self._fill()

    def finish(self) -> None:
        """Say that nothing follows what was sent."""
        if self._last or self.ended is not None:
            return
        self._last = True
        if not self._unsent:
            self.outgoing += _head(0, _DATA, _END_STREAM, _STREAM)

    def _fill(self) -> None:
        while self._unsent and self.ended is None:
            part = self._unsent[0]
            size = min(len(part), self._window, self._stream_window, self._frame)
            if size <= 0:
                return
            self._window -= size
            self._stream_window -= size
            if size < len(part):
                self._unsent[0] = part[size:]
            else:
                self._unsent.popleft()
            over = _END_STREAM if self._last and not self._unsent else 0
            self.outgoing += _head(size, _DATA, over, _STREAM)
            self.outgoing += part[:size]

    def cancel(self) -> None:
        """Tell the kernel that nobody waits any more."""
        if self.ended is None:
            self._put(_RST_STREAM, 0, _STREAM, struct.pack(">I", _CANCEL))
            self.ended = Ended("CANCELLED", "the call was given up here")

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[bytes]:
        """Take what came, nothing for the end of the connection; gives the messages that are whole by it."""
        messages: list[bytes] = []
        if not data:
            self._end("UNAVAILABLE", "the connection was closed")
            return messages
        self._incoming += data
        at = 0
        try:
            while self.ended is None and len(self._incoming) - at >= _HEAD_BYTES:
                high, low, kind, flags, stream = struct.unpack_from(">HBBBI", self._incoming, at)
                size = high << 8 | low
                begin = at + _HEAD_BYTES
                if size > FRAME_BYTES:
                    self._end("INTERNAL", f"the kernel sent a frame of {size} bytes")
                elif len(self._incoming) - begin < size:
                    break
                else:
                    at = begin + size
                    self._take(kind, flags, stream & _MOST, bytes(self._incoming[begin:at]), messages)
        except (HeaderError, struct.error) as error:
            self._end("INTERNAL", f"the kernel does not speak HTTP/2: {error}")
        del self._incoming[:at]
        return messages

    def _take(self, kind: int, flags: int, stream: int, payload: bytes, messages: list[bytes]) -> None:
        if self._in_block and kind != _CONTINUATION:
            raise HeaderError("a header list is interrupted")
        if stream not in (0, _STREAM) or kind == _PUSH_PROMISE:
            raise HeaderError("a frame is for no stream of ours")
        if kind == _DATA:
            self._on_data(flags, payload, messages)
        elif kind in (_HEADERS, _CONTINUATION):
            self._on_headers(kind, flags, payload)
        elif kind == _WINDOW_UPDATE:
            self._on_window(stream, struct.unpack(">I", payload)[0] & _MOST)
        else:
            self._on_control(kind, flags, payload)

    def _on_control(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._put(_PING, _ACK, 0, payload)
        elif kind == _RST_STREAM:
            code = struct.unpack(">I", payload)[0]
            self._end(_RESETS.get(code, "INTERNAL"), f"the kernel reset the stream ({code})")
        elif kind == _GOAWAY:
            last, code = struct.unpack_from(">II", payload)
            if last & _MOST < _STREAM:  # else this call is finished before the connection is closed
                self._end("UNAVAILABLE", f"the kernel closes the connection ({code})")

    def _on_data(self, flags: int, payload: bytes, messages: list[bytes]) -> None:
        self._untold += len(payload)
        self._message += _unpadded(flags, payload)
        at = 0
        while len(self._message) - at >= _PREFIX_BYTES:
            packed, size = struct.unpack_from(">BI", self._message, at)
            if packed:
                return self._end("INTERNAL", "a message is compressed, which was not agreed")
            if size > self._most:
                return self._end("RESOURCE_EXHAUSTED", f"a message has {size} bytes, more than {self._most}")
            end = at + _PREFIX_BYTES + size
            if end > len(self._message):
                break
            messages.append(bytes(self._message[at + _PREFIX_BYTES : end]))
            at = end
        del self._message[:at]
        if self._untold >= WINDOW_BYTES // 2:
            for stream in (0, _STREAM):
                self._put(_WINDOW_UPDATE, 0, stream, struct.pack(">I", self._untold))
            self._untold = 0
        if flags & _END_STREAM:
            self._end("INTERNAL", "the stream ended without a status")
        return None

    def _on_headers(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _HEADERS:
            self._block_flags = flags
            payload = _unpadded(flags, payload)
            if flags & _HAS_PRIORITY:
                payload = payload[5:]
        elif not self._in_block:
            raise HeaderError("a header list begins in its middle")
        self._block += payload
        self._in_block = not flags & _END_HEADERS
        if len(self._block) > HEADERS_BYTES:
            raise HeaderError("a header list is too long")
        if self._in_block:
            return
        pairs = dict(self._headers.decode(bytes(self._block)))
        self._block.clear()
        if self._block_flags & _END_STREAM:
            self._on_status(pairs)
        elif pairs.get(b":status", b"200").startswith(b"1"):
            return  # an informational answer; the real one follows
        elif self._answered or pairs.get(b":status") != b"200":
            raise HeaderError("an answer has the wrong status or comes twice")
        else:
            self._answered = True

    def _on_status(self, pairs: dict[bytes, bytes]) -> None:
        number = pairs.get(b"grpc-status", b"")
        code = NAMES[int(number)] if number.isdigit() and int(number) < len(NAMES) else "UNKNOWN"
        # Percent-encoded UTF-8, of which every octet may be wrong.
        detail = urllib.parse.unquote_to_bytes(pairs.get(b"grpc-message", b"")).decode(errors="replace")
        packed = pairs.get(DETAILS_KEY.encode(), b"")
        try:
            details = base64.b64decode(packed + b"=" * (-len(packed) % 4))
        except binascii.Error:
            details = b""
        self._end(code, detail, details)

    def _on_settings(self, payload: bytes) -> None:
        for which, value in struct.iter_unpack(">HI", payload):
            if which == _INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif which == _MAX_FRAME_SIZE:
                self._frame = max(value, _DEFAULT_FRAME)
        self._put(_SETTINGS, _ACK, 0, b"")
        self._fill()

    def _on_window(self, stream: int, more: int) -> None:
        if stream:
            self._stream_window += more
        else:
            self._window += more
        if max(self._window, self._stream_window) > _MOST:
            raise HeaderError("a window is larger than can be")
        self._fill()

    def _end(self, code: str, detail: str, details: bytes = b"") -> None:
        if self.ended is None:
            self.ended = Ended(code, detail, details)


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise HeaderError("a frame has more padding than bytes")
    return payload[1 : len(payload) - payload[0]]
