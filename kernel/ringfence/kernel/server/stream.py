"""One call of gRPC on a connection: messages in, messages out, each within the room that both sides give each other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ringfence.kernel.config import MESSAGE_BYTES_MAX
from ringfence.kernel.server import frames
from ringfence.kernel.server.frames import (
    FRAME_BYTES_MAX,
    WINDOW_FIRST,
    ProtocolError,
    pack_head,
    pack_prefix,
    prefix,
    read_prefix,
)
from ringfence.kernel.server.gate import Bounds

WINDOW_WAITING = 8192
"""Bytes that a stream may send before it has its turn; after it as many as HTTP/2 gives at first."""

LARGE_S = 60.0
"""How long a message longer than a window may take to come in, once it is its turn."""

_REFILL = 16_384
"""Room that is given back at once: less would be a frame for each message."""


class Handler(Protocol):
    """Whoever answers a stream. None of these may raise."""

    def message(self, data: bytes) -> None:
        """Take a message."""
        ...

    def ended(self) -> None:
        """Hear that the client sends no more."""
        ...

    def gone(self) -> None:
        """Hear that the stream is over, whoever ended it: last of all, once."""
        ...


class Wire(Protocol):
    """The connection as a stream uses it."""

    window: int
    """Bytes that the client still takes of all streams."""

    writable: bool
    """Whether it takes more now; else what is written would pile up."""

    def write(self, data: bytes | memoryview) -> None:
        """Send, or keep until it can be sent."""
        ...

    def drop(self, number: int) -> None:
        """Forget a stream."""
        ...


class Stream:
    """One stream.

    INVARIANT: it holds at most a window of what came in, and one message beyond where it has a place among the large.

    Attributes:
        number: its number on the connection.
        window: bytes that the client still takes of it.
    """

    def __init__(self, wire: Wire, bounds: Bounds, number: int, window: int, room: int) -> None:
        self._wire = wire
        self._bounds = bounds
        self._handler: Handler | None = None
        self._served = False
        self._part = bytearray()
        self._ready: deque[bytes] = deque()
        self._held = 0
        self._room = room
        self._extra = 0
        self._granted = 0
        self._late: asyncio.TimerHandle | None = None
        self._waits = False
        self._last = False
        self._heard = False
        self._begun = False
        self._out: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._ending: bytes | None = None
        self._over = False
        self.number = number
        self.window = window

    # -- in -----------------------------------------------------------------------------------------------------

    @property
    def unheard(self) -> bool:
        """Whether a message is there that is not handed on yet."""
        return bool(self._ready)

    def attend(self, handler: Handler) -> None:
        """Say who answers it, before it has its turn."""
        self._handler = handler

    def serve(self) -> None:
        """It is its turn: what came is handed on, and more may come."""
        self._served = True
        if not self._over:
            self._refill()
            self._deliver()

    def narrow(self, by: int) -> None:
        """The client has heard of another first window."""
        self._room -= by
        if not self._over:
            # It may be beyond it already, and then waits to be told of more.
            self._refill()

    def receive(self, data: bytes, size: int, *, last: bool = False) -> None:
        """Take a frame's payload, which took `size` bytes of room. What was not worth its frame is a chore.

        Raises:
            ProtocolError: there was no room for it, or the client had said that nothing follows.
        """
        self._room -= size
        if size and self._room < 0:
            raise ProtocolError(frames.FLOW, "more than there was room for")
        if self._ending is not None:
            self._bounds.calm.spend(1)
            return  # nobody listens any more
        if self._last:
            raise ProtocolError(frames.CLOSED, "something came on a stream after its end")
        self._last = last
        handler = self._handler
        if (
            handler is not None
            and self._served
            and not self._held
            and self._bounds.gate.open
            and len(data) >= 5  # noqa: PLR2004 - the size of the prefix
            and read_prefix(data) == (0, len(data) - 5)
        ):
            # Most frames are one message that is not compressed.
            handler.message(data[5:])
            if self._room <= WINDOW_FIRST - _REFILL:
                self._refill()
            if last:
                self._deliver()
            return
        worth = last
        if data:
            self._part += data
            self._held += len(data)
            worth = self._cut() or len(data) > 1024  # noqa: PLR2004 - as much as a frame should at least carry
        if not worth:
            self._bounds.calm.spend(1)
        self._refill()
        if self._held or last:
            self._deliver()

    def _cut(self) -> bool:
        """Take whole messages off what came; whether there was one."""
        part, some = self._part, False
        while len(part) >= prefix.size:
            packed, length = prefix.unpack_from(part)
            if packed:
                self.end(frames.UNIMPLEMENTED, "compressed messages are not taken")
                return False
            if length > MESSAGE_BYTES_MAX:
                text = f"Received message larger than max ({length} vs. {MESSAGE_BYTES_MAX})"
                self.end(frames.EXHAUSTED, text)
                return False
            size = prefix.size + length
            if len(part) < size:
                if size > WINDOW_FIRST and not self._extra:
                    # Of a stream that has one already: when that is handed on.
                    self._extra = size
                    self._bounds.large.take(self, self._enlarge)
                break
            if self._late is not None:
                self._late.cancel()
                self._late = None
            self._ready.append(bytes(memoryview(part)[prefix.size : size]))
            del part[:size]
            some = True
        return some

    def _enlarge(self) -> None:
        if self._over or self._ending is not None:
            self._bounds.large.leave(self)
            return
        self._late = asyncio.get_running_loop().call_later(LARGE_S, self._too_late)
        self._granted = self._extra
        self._refill()

    def _too_late(self) -> None:
        self.end(frames.EXHAUSTED, f"the message did not come within {LARGE_S:.0f} s")

    def _refill(self) -> None:
        if self._over or self._ending is not None:
            return
        base = WINDOW_FIRST if self._served else WINDOW_WAITING
        # Of a long message also the padding is given back, which takes room and is not held.
        more = base + self._granted - self._held - self._room
        # With little room left also little is given back: else what fits into a window may wait for its last bytes.
        if more >= _REFILL or (more > 0 and self._room < _REFILL):
            self._room += more
            self._wire.write(frames.frame(frames.WINDOW, 0, self.number, frames.number32.pack(more)))

    def _deliver(self) -> None:
        """Hand on what is ready, as far as the gate is open."""
        handler = self._handler
        if handler is None or not self._served:
            return
        gate = self._bounds.gate
        while self._ready:
            if not gate.open:
                if not self._waits:
                    # Back-pressure: a flood waits in the client's own buffers.
                    self._waits = True
                    gate.when_open(self._again)
                return
            message = self._ready.popleft()
            size = prefix.size + len(message)
            self._held -= size
            if size > WINDOW_FIRST:
                self._extra = self._granted = 0
                self._bounds.large.leave(self)
            handler.message(message)
        if self._part:
            self._cut()
        self._refill()
        if self._last and not self._heard and self._ending is None:
            self._heard = True
            if self._part:
                self.end(frames.INVALID, "the last message was cut off")
            else:
                handler.ended()

    def _again(self) -> None:
        self._waits = False
        if not self._over:
            self._deliver()

    # -- out ----------------------------------------------------------------------------------------------------

    def send_now(self, message: bytes) -> bool:
        """Send a message where there is room for it; False: nothing was done, `send` takes it."""
        wire, size = self._wire, len(message) + 5
        if (
            not self._begun
            or self._out
            or self._over
            or self._ending is not None
            or not wire.writable
            or size > self.window
            or size > wire.window
            or size > FRAME_BYTES_MAX
        ):
            return False
        self.window -= size
        wire.window -= size
        head = pack_head(0, size, frames.DATA, 0, self.number)
        wire.write(b"".join((head, pack_prefix(0, size - 5), message)))
        return True

    def send(self, message: bytes, done: Callable[[], None] | None = None) -> None:
        """Send a message.

        Args:
            message: its bytes.
            done: called once, when the connection has it, or when nobody is there to take it.
        """
        if self._over or self._ending is not None:
            if done is not None:
                done()
            return
        self._out.append((memoryview(prefix.pack(0, len(message)) + message), done))
        self.pump()

    def end(self, status: int, text: str = "", details: bytes = b"") -> None:
        """End it with a status, behind what is sent already; what still comes in is dropped."""
        if self._over or self._ending is not None:
            return
        self._ending = frames.trailers(status, text, details)
        self._forget()
        self.pump()

    def pump(self) -> None:
        """Send what there is room for."""
        wire = self._wire
        if self._over or not wire.writable:
            return
        if not self._begun and self._out:
            self._begun = True
            wire.write(frames.header_frames(self.number, frames.ANSWER, last=False))
        while self._out and wire.writable:
            room = min(self.window, wire.window, FRAME_BYTES_MAX)
            if room <= 0:
                return
            rest, done = self._out[0]
            part = rest[:room]
            size = len(part)
            self.window -= size
            wire.window -= size
            wire.write(pack_head(0, size, frames.DATA, 0, self.number))
            wire.write(part)
            if size < len(rest):
                self._out[0] = (rest[size:], done)
                continue
            self._out.popleft()
            if done is not None:
                done()
        # It may be over by now: whoever hears that a message is written may end it.
        if self._ending is not None and not self._out and wire.writable and not self._over:
            block = self._ending if self._begun else frames.ANSWER + self._ending
            wire.write(frames.header_frames(self.number, block, last=True))
            if not self._last:
                # The client may stop sending.
                wire.write(frames.frame(frames.RESET, 0, self.number, frames.number32.pack(frames.NO_ERROR)))
            wire.drop(self.number)

    # -- over ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """It is over. More than once does nothing."""
        if self._over:
            return
        self._over = True
        self._forget()
        out, self._out = self._out, deque()
        for _, done in out:
            if done is not None:
                done()
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.gone()

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._part = bytearray()
        self._ready.clear()
        self._held = 0
        self._bounds.large.leave(self)
        if self._waits:
            self._waits = False
            self._bounds.gate.forget(self._again)
