"""One call of a caller without the library: one message, one answer."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError, Message
from ringfence.kernel.server import frames
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.server.status import end_with
from ringfence.kernel.server.stream import Stream
from ringfence.kernel.thread import Thread
from ringfence.syscalls.codec import result_to_message
from ringfence.syscalls.errors import BadCredential
from ringfence.syscalls.table import Row


def vouches(thread: Thread, headers: Mapping[str, str]) -> bool:
    """Whether a call carries the token of this start."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and thread.token_matches(token)


class Unary:
    """Answers one call of one row of the table."""

    def __init__(self, desk: Desk, stream: Stream, row: Row, *, vouched: bool) -> None:
        self._desk = desk
        self._stream = stream
        self._row = row
        self._vouched = vouched
        self._data: bytes | None = None

    def begin(self) -> None:
        """It is its turn."""
        if self._vouched:
            self._stream.serve()
            return
        end_with(self._stream, BadCredential("send `authorization: Bearer TOKEN` with RINGFENCE_TOKEN"))

    def message(self, data: bytes) -> None:
        """Take the message."""
        if self._data is not None:
            self._stream.end(frames.INVALID, "this method takes one message")
        self._data = data

    def ended(self) -> None:
        """All is there."""
        data, self._data = self._data, None
        if data is None:
            self._stream.end(frames.INVALID, "this method takes one message")
            return
        try:
            message = self._row.request_class.FromString(data)
        except DecodeError:
            end_with(self._stream, self._desk.misread())
            return
        # A caller that is gone cancels nothing.
        self._desk.keep(self._answer(message))

    def gone(self) -> None:
        """The stream is over."""
        self._desk.bounds.unary.leave(self)

    async def _answer(self, message: Message) -> None:
        await self._desk.bounds.gate.wait()
        data = b""
        try:
            answer = await self._desk.in_turn(self._row, message)
            if answer.failure is None:
                data = result_to_message(self._row, answer.result or b"{}").SerializeToString()
        except Exception:  # noqa: BLE001 - an answer that never comes would hold the caller and its place for ever
            end_with(self._stream, self._desk.bug(self._row.action))
            return
        if answer.failure is None:
            self._stream.send(data)
            self._stream.end(frames.OK)
            return
        if answer.park:
            self._desk.park(answer)
        if not answer.withheld:
            end_with(self._stream, answer.failure)
        # Else it hears nothing, until the program is ended and this door is closed with it.
