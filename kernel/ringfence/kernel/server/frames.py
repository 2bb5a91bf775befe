"""Frames of HTTP/2 (RFC 9113) as a gRPC server needs them: heads, kinds, and header blocks that are always the same."""

from __future__ import annotations

import base64
import struct
from typing import Final
from urllib.parse import quote

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)

END_STREAM: Final = 1
ACK: Final = 1
END_HEADERS: Final = 4
PADDED: Final = 8
PRIORITISED: Final = 32

NO_ERROR, PROTOCOL, INTERNAL, FLOW, _, CLOSED, FRAME_SIZE, REFUSED, CANCEL, COMPRESSION, _, CALM = range(12)
"""Error codes of resets and of the end of a connection."""

FRAME_BYTES_MAX: Final = 16_384
"""Longest payload that is taken: the least that HTTP/2 allows, and what is announced."""

_FRAME_LENGTH_MAX = 2**24 - 1  # as long as the length of a frame can say

WINDOW_FIRST: Final = 65_535
"""Room that both sides have at first, on a connection and on a stream."""

WINDOW_MAX: Final = 2**31 - 1

SET_TABLE, SET_PUSH, SET_STREAMS, SET_WINDOW, SET_FRAME, SET_HEADERS = range(1, 7)
"""Settings: bytes of the header table, pushes, streams at a time, first window, frame, header list."""

OK, INVALID, EXHAUSTED, UNIMPLEMENTED = 0, 3, 8, 12
"""The few statuses of gRPC that are given before anybody knows what is asked."""

_HEAD = struct.Struct(">BHBBI")
HEAD_BYTES: Final = _HEAD.size
pack_head = _HEAD.pack
"""High byte and rest of the length, kind, flags, stream."""
read_head = _HEAD.unpack_from
prefix = struct.Struct(">BI")
"""What stands before each message of gRPC: whether it is compressed, and its length."""
pack_prefix = prefix.pack
read_prefix = prefix.unpack_from
_PLAIN = "".join(map(chr, range(32, 127))).replace("%", "")  # what a status' text keeps as it is
number32 = struct.Struct(">I")
setting = struct.Struct(">HI")


class ProtocolError(Exception):
    """What came is no HTTP/2, or more than a connection may ask for.

    Attributes:
        code: one of the error codes above.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Give one frame."""
    size = len(payload)
    return pack_head(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def settings(pairs: dict[int, int]) -> bytes:
    """Give the frame that announces them."""
    return frame(SETTINGS, 0, 0, b"".join(setting.pack(*pair) for pair in pairs.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    """Read what a client announces; of a setting that is said twice the last one holds.

    Raises:
        ProtocolError: one of them is beyond what RFC 9113 6.5.2 lets it be, whatever follows it.
    """
    said: dict[int, int] = {}
    for name, value in setting.iter_unpack(payload):
        if name == SET_WINDOW and value > WINDOW_MAX:
            raise ProtocolError(FLOW, "a window is too wide")
        if (name == SET_PUSH and value > 1) or (
            name == SET_FRAME and not FRAME_BYTES_MAX <= value <= _FRAME_LENGTH_MAX
        ):
            raise ProtocolError(PROTOCOL, f"setting {name} can't be {value}")
        said[name] = value
    return said


def _integer(value: int, bits: int, first: int) -> bytes:
    """Give an integer with a prefix, RFC 7541 5.1."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    out = bytearray([first | most])
    value -= most
    while value >> 7:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _literal(name: bytes, value: bytes) -> bytes:
    """Give one field that the other side is not to remember."""
    return b"\x00" + _integer(len(name), 7, 0) + name + _integer(len(value), 7, 0) + value


ANSWER: Final = b"\x88" + _literal(b"content-type", b"application/grpc")
"""The headers of every answer: status 200 of the static table, and the type."""


def trailers(status: int, text: str, details: bytes) -> bytes:
    """Give the fields that end a call: its status, its text, and the packed `google.rpc.Status`."""
    out = _literal(b"grpc-status", b"%d" % status)
    if text:
        out += _literal(b"grpc-message", _percent(text))
    if details:
        out += _literal(b"grpc-status-details-bin", base64.b64encode(details).rstrip(b"="))
    return out


def _percent(text: str) -> bytes:
    return quote(text, safe=_PLAIN, errors="replace").encode()


def header_frames(stream: int, block: bytes, *, last: bool) -> bytes:
    """Give a header block as one frame and as many continuations as it takes."""
    flags = END_STREAM if last else 0
    if len(block) <= FRAME_BYTES_MAX:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    parts = [block[at : at + FRAME_BYTES_MAX] for at in range(0, len(block), FRAME_BYTES_MAX)]
    out = frame(HEADERS, flags, stream, parts[0])
    for part in parts[1:-1]:
        out += frame(CONTINUATION, 0, stream, part)
    return out + frame(CONTINUATION, END_HEADERS, stream, parts[-1])


def unpadded(flags: int, payload: bytes) -> bytes:
    """Take the padding off a payload.

    Raises:
        ProtocolError: there is more of it than payload.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(PROTOCOL, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
