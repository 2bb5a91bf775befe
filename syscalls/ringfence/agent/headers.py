"""Header lists as HTTP/2 has them on the wire (HPACK, RFC 7541): what a client of one stream needs of it.

Written plainly and never indexed, which every server has to read; read in full, with Huffman codes and the
table that grows.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TABLE_BYTES: Final = 4096
"""Of the table that grows; the default, which this client never changes."""

Pair = tuple[bytes, bytes]

_ENTRY_BYTES: Final = 32  # counted for each entry beside its name and value
_INDEXED: Final = 0x80
_KEPT: Final = 0x40
_RESIZED: Final = 0x20
_HUFFMAN: Final = 0x80
_INTEGER_BYTES: Final = 5  # at most, beyond its prefix
_PADDING_BITS: Final = 7

_NAMES: Final = (
    ":authority|:method GET|:method POST|:path /|:path /index.html|:scheme http|:scheme https|"
    ":status 200|:status 204|:status 206|:status 304|:status 400|:status 404|:status 500|"
    "accept-charset|accept-encoding gzip, deflate|accept-language|accept-ranges|accept|"
    "access-control-allow-origin|age|allow|authorization|cache-control|content-disposition|"
    "content-encoding|content-language|content-length|content-location|content-range|content-type|"
    "cookie|date|etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|"
    "if-unmodified-since|last-modified|link|location|max-forwards|proxy-authenticate|"
    "proxy-authorization|range|referer|refresh|retry-after|server|set-cookie|"
    "strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate"
)
_STATIC: Final[tuple[Pair, ...]] = tuple(
    (name.encode(), value.encode()) for name, _, value in (line.partition(" ") for line in _NAMES.split("|"))
)

# The code is canonical: the octets by the length of their codes, in the order of the codes.
_BY_LENGTH: Final[Mapping[int, bytes]] = {
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\0$@[]~",
    14: b"^}",
    15: b"<`{",
    19: b"\\\xc3\xd0",
    20: b"\x80\x82\x83\xa2\xb8\xc2\xe0\xe2",
    21: b"\x99\xa1\xa7\xac\xb0\xb1\xb3\xd1\xd8\xd9\xe3\xe5\xe6",
    22: bytes.fromhex("8184858688929a9ca0a3a4a9aaadb2b5b9babbbdbec4c6e4e8e9"),
    23: bytes.fromhex("0187898a8b8c8d8f93959697989b9d9ea5a6a8aeafb4b6b7bcbfc5e7ef"),
    24: bytes.fromhex("098e9091949fabced7e1eced"),
    25: b"\xc7\xcf\xea\xeb",
    26: bytes.fromhex("c0c1c8c9cacdd2d5dadbeef0f2f3ff"),
    27: bytes.fromhex("cbccd3d4d6dddedff1f4f5f6f7f8fafbfcfdfe"),
    28: bytes.fromhex("020304050607080b0c0e0f1011121314151718191a1b1c1d1e1f7fdcf9"),
    30: b"\n\r\x16",
}


class HeaderError(ValueError):
    """What came is no header list."""


def encode(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Give a header list, each pair written out in full."""
    out = bytearray()
    for name, value in pairs:
        out += b"\0"
        for text in (name.encode("ascii"), value.encode("utf-8")):
            out += _integer(len(text), 7)
            out += text
    return bytes(out)


def _integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes((value,))
    out = bytearray((most,))
    value -= most
    while value >= _HUFFMAN:
        out.append(value & 0x7F | _HUFFMAN)
        value >>= 7
    out.append(value)
    return bytes(out)


class Decoder:
    """Reads the header lists of one connection, in order."""

    def __init__(self) -> None:
        self._table: deque[Pair] = deque()
        self._size = 0
        self._limit = TABLE_BYTES

    def decode(self, block: bytes) -> list[Pair]:
        """Read one header list.

        Raises:
            HeaderError: it is none.
        """
        pairs: list[Pair] = []
        at = 0
        try:
            while at < len(block):
                first = block[at]
                if first & _INDEXED:
                    index, at = _read_integer(block, at, 7)
                    pairs.append(self._entry(index))
                elif first & _KEPT:
                    pair, at = self._literal(block, at, 6)
                    self._keep(pair)
                    pairs.append(pair)
                elif first & _RESIZED:
                    size, at = _read_integer(block, at, 5)
                    self._resize(size, first=not pairs)
                else:
                    pair, at = self._literal(block, at, 4)
                    pairs.append(pair)
        except IndexError:
            raise HeaderError("a header list is cut short") from None
        return pairs

    def _literal(self, block: bytes, at: int, bits: int) -> tuple[Pair, int]:
        index, at = _read_integer(block, at, bits)
        if index:
            name = self._entry(index)[0]
        else:
            name, at = _read_text(block, at)
        value, at = _read_text(block, at)
        return (name, value), at

    def _entry(self, index: int) -> Pair:
        if 1 <= index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC) + 1
        if not 0 <= index < len(self._table):
            raise HeaderError("a header list names an entry that is not there")
        return self._table[index]

    def _resize(self, size: int, *, first: bool) -> None:
        if size > TABLE_BYTES or not first:
            raise HeaderError("a header list changes its table where it may not")
        self._limit = size
        self._shrink()

    def _keep(self, pair: Pair) -> None:
        self._table.appendleft(pair)
        self._size += _weight(pair)
        self._shrink()

    def _shrink(self) -> None:
        while self._size > self._limit:
            self._size -= _weight(self._table.pop())


def _weight(pair: Pair) -> int:
    return len(pair[0]) + len(pair[1]) + _ENTRY_BYTES


def _read_integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in range(0, 7 * _INTEGER_BYTES, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < _HUFFMAN:
            return value, at
    raise HeaderError("a number in a header list is too large")


def _read_text(block: bytes, at: int) -> tuple[bytes, int]:
    coded = block[at] & _HUFFMAN
    size, at = _read_integer(block, at, 7)
    end = at + size
    if end > len(block):
        raise HeaderError("a header list is cut short")
    text = block[at:end]
    return (_decompress(text) if coded else text), end


@functools.cache
def _codes() -> Mapping[tuple[int, int], int]:
    """Octets by length and code."""
    found: dict[tuple[int, int], int] = {}
    code = before = 0
    for length, octets in _BY_LENGTH.items():
        code <<= length - before
        for octet in octets:
            found[length, code] = octet
            code += 1
        before = length
    return found


def _decompress(data: bytes) -> bytes:
    codes = _codes()
    out = bytearray()
    code = length = 0
    for byte in data:
        for shift in range(7, -1, -1):
            code = code << 1 | (byte >> shift & 1)
            length += 1
            octet = codes.get((length, code))
            if octet is not None:
                out.append(octet)
                code = length = 0
            elif length > max(_BY_LENGTH):
                raise HeaderError("a text in a header list has a code that is none")
    if length > _PADDING_BITS or code != (1 << length) - 1:
        raise HeaderError("a text in a header list ends in the middle of a code")
    return bytes(out)
