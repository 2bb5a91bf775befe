"""Content of files on its way: data without holes, named by a hash over both, in pieces of bounded size.

A file is a row of extents, each `D`, offset and length and then its bytes, and at last `E` and the size of the file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Iterator

from ringfence.sandbox import content
from ringfence.sandbox.remote import wire
from ringfence.sandbox.remote.channels import Bytes, Channel

_HEAD = struct.Struct(">cQQ")
_PIECE_BYTES = 64 << 10
_SIZE_MAX = 1 << 62
DIGEST_BYTES = 32


class ChangedError(Exception):
    """A file changed while it was sent."""


def extents(fd: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each part of a file that is not a hole."""
    facts = os.fstat(fd)
    size = facts.st_size
    if facts.st_blocks * 512 >= size:
        if size:
            yield 0, size
        return
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        position = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if position > start:
            yield start, position - start


def _pieces(fd: int) -> Iterator[bytes]:
    """The row of extents, in pieces.

    Raises:
        ChangedError: the file is shorter than it was a moment ago.
    """
    for offset, length in extents(fd):
        yield _HEAD.pack(b"D", offset, length)
        done = 0
        while done < length:
            data = os.pread(fd, min(_PIECE_BYTES, length - done), offset + done)
            if not data:
                raise ChangedError("a file became shorter while it was read")
            yield data
            done += len(data)
    yield _HEAD.pack(b"E", os.fstat(fd).st_size, 0)


def digest(fd: int) -> bytes:
    """The name of an open file's content; errors as for `send`."""
    found = hashlib.sha256()
    for piece in _pieces(fd):
        found.update(piece)
    return found.digest()


async def send(channel: Channel, fd: int) -> bytes:
    """Send an open file's content; returns its digest.

    Raises:
        ChangedError: it changed meanwhile; what was sent is no whole file.
        ChannelLostError: nobody reads.
    """
    found = hashlib.sha256()
    for piece in _pieces(fd):
        found.update(piece)
        await channel.send(piece)
    return found.digest()


class Budget:
    """How much may still come, over all files of a stream."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, size: int) -> None:
        """Count what comes.

        Raises:
            WireError: it is more than was agreed.
        """
        self._left -= size
        if self._left < 0:
            raise wire.WireError("more came than the limit allows")


async def receive(stream: Bytes, fd: int, budget: Budget) -> bytes:
    """Take a file's content in, into an empty open file; returns its digest.

    Raises:
        WireError: it is malformed, or larger than `budget`.
        ChannelLostError: the sender is gone.
        OSError: there is no room.
    """
    found = hashlib.sha256()
    while True:
        head = await stream.exactly(_HEAD.size)
        found.update(head)
        kind, offset, length = _HEAD.unpack(head)
        if kind == b"E" and offset <= _SIZE_MAX:
            os.ftruncate(fd, offset)
            return found.digest()
        if kind != b"D" or offset + length > _SIZE_MAX:
            raise wire.WireError("an extent makes no sense")
        budget.take(length)
        os.lseek(fd, offset, os.SEEK_SET)
        while length:
            data = await stream.some(min(length, _PIECE_BYTES))
            if not data:
                raise wire.WireError("a file was cut off")
            found.update(data)
            content.write_all(fd, data)
            length -= len(data)
