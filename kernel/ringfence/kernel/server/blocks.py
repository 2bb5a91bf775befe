"""Header blocks of one connection, in as many frames as they come, and what they unpack to."""

from __future__ import annotations

from typing import cast

from hpack import Decoder
from hpack.exceptions import HPACKError
from ringfence.kernel.server import frames
from ringfence.kernel.server.frames import ProtocolError
from ringfence.kernel.server.gate import Calm

HEADER_BLOCK_BYTES_MAX = 16 << 10
"""Header block of a stream as it comes."""

HEADER_LIST_BYTES_MAX = 16 << 10
"""The same unpacked, with 32 bytes for each field."""

TABLE_BYTES = 4096
"""Of the table of fields that the client may name again."""

CHORES_OF_STREAM = 20
"""What opening one costs, in frames."""

_CHORE_BYTES = 16  # of a block: some bytes, as changes of the table's size, take as long as a field

_PRIORITY_BYTES = 5


class Blocks:
    """Puts header blocks together.

    INVARIANT: at most one is not whole, and it is not longer than its bound.

    Attributes:
        open: whether one has begun: nothing else may come before its end.
        number: the stream of the latest one.
        last: whether the client sends nothing after it on its stream.
    """

    def __init__(self, calm: Calm) -> None:
        self._calm = calm
        self._decoder = Decoder(max_header_list_size=HEADER_LIST_BYTES_MAX)
        self._part = bytearray()
        self.open = False
        self.number = 0
        self.last = False

    def begin(self, flags: int, number: int, payload: bytes) -> list[tuple[str, str]] | None:
        """Take the frame that a block begins with.

        Returns:
            Its fields, where that is all of it.

        Raises:
            ProtocolError: it is too long, or can't be unpacked.
        """
        self.open, self.number, self.last = True, number, bool(flags & frames.END_STREAM)
        payload = frames.unpadded(flags, payload)
        if flags & frames.PRIORITISED:
            if len(payload) < _PRIORITY_BYTES:
                raise ProtocolError(frames.FRAME_SIZE, "a header frame ends within its priority")
            payload = payload[_PRIORITY_BYTES:]
        return self.add(flags, payload)

    def add(self, flags: int, part: bytes) -> list[tuple[str, str]] | None:
        """Take a part of a block; gives the fields with the last one.

        Raises:
            ProtocolError: the block is too long, or can't be unpacked.
        """
        self._part += part
        if len(self._part) > HEADER_BLOCK_BYTES_MAX:
            raise ProtocolError(frames.CALM, "a header block is too long")
        if not flags & frames.END_HEADERS:
            return None
        block, self._part, self.open = bytes(self._part), bytearray(), False
        self._calm.spend(CHORES_OF_STREAM + len(block) // _CHORE_BYTES)
        try:
            return cast("list[tuple[str, str]]", self._decoder.decode(block))
        except (HPACKError, ValueError, IndexError) as error:
            raise ProtocolError(
                frames.COMPRESSION, "a header block can't be unpacked, or is too long"
            ) from error
