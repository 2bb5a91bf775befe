"""One connection to an agent's door: HTTP/2 as RFC 9113 has it, as much as a server of gRPC needs.

It is written here because what a client may have it hold is to be known to the byte: a server that reads first and counts
later is what a hostile program looks for. Header blocks are unpacked by `hpack`, which stops at a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from ringfence.kernel.server import frames
from ringfence.kernel.server.blocks import HEADER_LIST_BYTES_MAX, TABLE_BYTES, Blocks
from ringfence.kernel.server.frames import FRAME_BYTES_MAX, HEAD_BYTES, PREFACE, WINDOW_FIRST, ProtocolError
from ringfence.kernel.server.gate import Bounds
from ringfence.kernel.server.stream import WINDOW_WAITING, Stream

CONNECTION_STREAMS_MAX = 32
"""Streams of one connection that are open at a time; one more is refused, and the client tries it again."""

STRANGER_STREAMS_MAX = 4
"""The same before the client has acknowledged the settings."""

HANDSHAKE_S = 10.0
"""Time for a connection to open its first stream."""

IDLE_S = 300.0
"""Time that a connection without a stream stays open."""

GOODBYE_S = 1.0
"""Time for a client to read why its connection is closed."""

CHORES_OF_CONNECTION = 50
"""What opening one costs, in frames."""

_READ_BYTES = 32 << 10

# Shared by all connections: what was read is parsed, or copied, before anything else is read.
_BUFFER = memoryview(bytearray(_READ_BYTES))

_SETTINGS = frames.settings(
    {
        frames.SET_TABLE: TABLE_BYTES,
        frames.SET_STREAMS: CONNECTION_STREAMS_MAX,
        frames.SET_WINDOW: WINDOW_WAITING,
        frames.SET_HEADERS: HEADER_LIST_BYTES_MAX,
    }
)


class Host(Protocol):
    """Whose connections they are."""

    @property
    def bounds(self) -> Bounds:
        """Of all its connections together."""
        ...

    def accept(self, stream: Stream, headers: Mapping[str, str]) -> None:
        """Take a new stream: attend to it, and serve it when it is its turn."""
        ...

    def lost(self, connection: Connection) -> None:
        """Hear that a connection is over."""
        ...


class Connection(asyncio.BufferedProtocol):
    """One connection.

    INVARIANT: it holds at most one frame and one header block that are not whole, and what its streams hold.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._bounds = host.bounds
        self._calm = host.bounds.calm
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._kinds: dict[int, Callable[[int, int, bytes], None]] = {
            frames.HEADERS: self._headers,
            frames.SETTINGS: self._set,
            frames.WINDOW: self._enlarge,
            frames.PING: self._ping,
            frames.RESET: self._reset,
            frames.PUSH: self._refuse,
            frames.CONTINUATION: self._refuse,
            frames.DATA: self._refuse,
        }
        self._rest = b""
        self._greeted = False
        self._settled = False
        self._acknowledged = False
        self._streams: dict[int, Stream] = {}
        self._newest = 0
        self._quiet_since = self._loop.time()
        self._blocks = Blocks(self._calm)
        self._taken = 0
        self._first_window = WINDOW_FIRST
        self._resting = False
        self._reads = True
        self._closing = False
        self.window = WINDOW_FIRST
        self.writable = True

    # -- the transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what this end takes, as both do first."""
        self._transport = cast("asyncio.Transport", transport)
        self._calm.spend(CHORES_OF_CONNECTION)
        self._timer = self._loop.call_later(HANDSHAKE_S, self._look)
        self.write(_SETTINGS)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Give the place to read to."""
        del sizehint
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        data = bytes(_BUFFER[:nbytes])
        if self._rest:
            data = self._rest + data
        if self._closing:
            return
        try:
            taken = self._parse(data)
        except ProtocolError as error:
            self._rest = b""
            self.shut(error.code, str(error))
            return
        self._rest = data[taken:]
        if not taken:
            # Bytes one by one: the way to here costs more than they do.
            self._calm.spend(1)
        if (debt_s := self._calm.debt_s()) and not self._resting:
            self._resting = True
            self._loop.call_later(debt_s, self._rested)
            self._read_or_not()

    def eof_received(self) -> bool:
        """The client has hung up: no call comes from it any more, and what it does not read now holds no place for it."""
        self.shut(frames.NO_ERROR)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over, and all of its streams."""
        del exc
        self._closing = True
        self.writable = False
        self._transport = None
        self._kinds.clear()  # they lead back here, and would keep all of it until the collector comes
        if self._timer is not None:
            self._timer.cancel()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()
        self._host.lost(self)

    def pause_writing(self) -> None:
        """The client does not read: nothing more is written, and nothing read that would ask for it."""
        self.writable = False
        self._read_or_not()

    def resume_writing(self) -> None:
        """It reads on."""
        self.writable = True
        self._pump()
        self._read_or_not()

    def write(self, data: bytes | memoryview) -> None:
        """Send, or keep until it can be sent."""
        if self._transport is not None and not self._closing:
            self._transport.write(data)

    def drop(self, number: int) -> None:
        """Forget a stream, which is over."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close()
            if not self._streams:
                self._quiet_since = self._loop.time()

    def shut(self, code: int, text: str = "") -> None:
        """Say goodbye and close; nothing that comes is looked at any more."""
        if self._closing or self._transport is None:
            return
        end = frames.number32.pack(self._newest) + frames.number32.pack(code) + text.encode()[:200]
        self.write(frames.frame(frames.GOAWAY, 0, 0, end))
        self._closing = True
        self._transport.close()
        # Who reads nothing keeps no place for it.
        self._loop.call_later(GOODBYE_S, self._transport.abort)

    def _rested(self) -> None:
        if debt_s := self._calm.debt_s():
            self._loop.call_later(debt_s, self._rested)
            return
        self._resting = False
        self._read_or_not()

    def _read_or_not(self) -> None:
        reads = self.writable and not self._resting
        if reads is self._reads or self._closing or self._transport is None:
            return
        self._reads = reads
        if reads:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _look(self) -> None:
        """Close it when nothing has been asked on it for long."""
        patience_s = IDLE_S if self._newest else HANDSHAKE_S
        left_s = patience_s if self._streams else self._quiet_since + patience_s - self._loop.time()
        if left_s <= 0:
            self.shut(frames.NO_ERROR, "nothing was asked")
        else:
            self._timer = self._loop.call_later(max(left_s, 1.0), self._look)

    def _pump(self) -> None:
        for stream in list(self._streams.values()):
            if not self.writable:
                return
            stream.pump()

    # -- frames -------------------------------------------------------------------------------------------------

    def _greet(self, data: bytes) -> int:
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise ProtocolError(frames.PROTOCOL, "this socket speaks HTTP/2")
        self._greeted = len(data) >= len(PREFACE)
        return len(PREFACE) if self._greeted else 0

    def _parse(self, data: bytes) -> int:
        """Take all frames that are whole.

        Returns:
            How many bytes they took.
        """
        at, end = 0, len(data)
        if not self._greeted:
            at = self._greet(data)
            if not at:
                return 0
        read_head, streams = frames.read_head, self._streams
        while end - at >= HEAD_BYTES:
            high, low, kind, flags, number = read_head(data, at)
            size = high << 16 | low
            if size > FRAME_BYTES_MAX:
                raise ProtocolError(frames.FRAME_SIZE, "a frame is too long")
            start = at + HEAD_BYTES
            at, before = start + size, at
            if at > end:
                return before
            number &= 0x7FFF_FFFF
            if kind == frames.DATA and self._settled and not self._blocks.open:
                self._taken += size
                if self._taken >= WINDOW_FIRST // 2:
                    # Streams bound what they hold each; the connection gives its room back at once.
                    self.write(frames.frame(frames.WINDOW, 0, 0, frames.number32.pack(self._taken)))
                    self._taken = 0
                stream = streams.get(number)
                if stream is None or flags:
                    self._data(stream, flags, number, data[start:at])
                else:
                    stream.receive(data[start:at], size)
            else:
                self._other(kind, flags, number, data[start:at])
            if self._closing:
                return end
        return at

    def _data(self, stream: Stream | None, flags: int, number: int, payload: bytes) -> None:
        """Take data that is padded, ends its stream, or comes on none."""
        if stream is None:
            if not number & 1 or number > self._newest:
                raise ProtocolError(frames.PROTOCOL, "data of a stream that was never open")
            self._calm.spend(1)
            return
        stream.receive(
            frames.unpadded(flags, payload) if flags & frames.PADDED else payload,
            len(payload),
            last=bool(flags & frames.END_STREAM),
        )

    def _other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self._calm.spend(1)
        if not self._settled:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ProtocolError(frames.PROTOCOL, "settings come first")
            self._settled = True
        if self._blocks.open:
            if kind != frames.CONTINUATION or number != self._blocks.number:
                raise ProtocolError(frames.PROTOCOL, "a header block goes on with a continuation")
            fields = self._blocks.add(flags, payload)
            if fields is not None:
                self._open(fields)
            return
        take = self._kinds.get(kind)
        if (
            take is not None
        ):  # else a priority, a goodbye, or a kind that came later: nothing follows from them
            take(flags, number, payload)

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        fields = self._blocks.begin(flags, number, payload)
        if fields is not None:
            self._open(fields)

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:  # noqa: PLR2004 - RFC 9113 6.7
            raise ProtocolError(frames.FRAME_SIZE, "a ping is eight bytes")
        if not flags & frames.ACK:
            self.write(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _reset(self, _flags: int, number: int, payload: bytes) -> None:
        if not number & 1 or number > self._newest or len(payload) != 4:  # noqa: PLR2004 - RFC 9113 6.4
            raise ProtocolError(frames.PROTOCOL, "a reset of a stream that was never open")
        self.drop(number)

    def _refuse(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise ProtocolError(frames.PROTOCOL, "a frame that can't come here")

    def _open(self, fields: list[tuple[str, str]]) -> None:
        """Take a header block, which opens a stream or ends what a client sends on it.

        Also of a stream that is refused it was unpacked: the table is the connection's.
        """
        number, last = self._blocks.number, self._blocks.last
        stream = self._streams.get(number)
        if stream is not None:
            if not last:
                raise ProtocolError(frames.PROTOCOL, "a second header block that ends nothing")
            stream.receive(b"", 0, last=True)
            return
        if not number & 1:
            raise ProtocolError(frames.PROTOCOL, "streams of clients have odd numbers")
        if number <= self._newest:
            return
        self._newest = number
        most = CONNECTION_STREAMS_MAX if self._acknowledged else STRANGER_STREAMS_MAX
        if len(self._streams) >= most:
            self.write(frames.frame(frames.RESET, 0, number, frames.number32.pack(frames.REFUSED)))
            return
        room = WINDOW_WAITING if self._acknowledged else WINDOW_FIRST
        stream = self._streams[number] = Stream(self, self._bounds, number, self._first_window, room)
        self._host.accept(stream, dict(fields))
        if last:
            stream.receive(b"", 0, last=True)

    def _set(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % frames.setting.size:
            raise ProtocolError(frames.FRAME_SIZE, "settings that are none")
        if flags & frames.ACK:
            if payload:
                raise ProtocolError(frames.FRAME_SIZE, "an acknowledgement that says something")
            if not self._acknowledged:
                self._acknowledged = True
                for stream in self._streams.values():
                    stream.narrow(WINDOW_FIRST - WINDOW_WAITING)
            return
        self._calm.spend(len(payload) // frames.setting.size)
        said = frames.read_settings(payload)
        # INVARIANT: streams are gone through once for each frame, however often it says the same setting.
        change = said.get(frames.SET_WINDOW, self._first_window) - self._first_window
        self._first_window += change
        widest = max((stream.window for stream in self._streams.values()), default=0)
        if max(self._first_window, widest + change) > frames.WINDOW_MAX:
            raise ProtocolError(frames.FLOW, "a window is too wide")
        for stream in self._streams.values():
            stream.window += change
        self.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._pump()

    def _enlarge(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004 - RFC 9113 6.9
            raise ProtocolError(frames.FRAME_SIZE, "a window's frame is four bytes")
        (more,) = frames.number32.unpack(payload)
        more &= frames.WINDOW_MAX
        if not more or number > self._newest or (number and not number & 1):
            raise ProtocolError(frames.PROTOCOL, "a window that is opened by nothing, or of no stream")
        # Nothing waits for a window before it is used up.
        if not number:
            before, self.window = self.window, self.window + more
            if self.window > frames.WINDOW_MAX:
                raise ProtocolError(frames.FLOW, "a window is too wide")
            if before <= 0:
                self._pump()
        elif (stream := self._streams.get(number)) is not None:
            before, stream.window = stream.window, stream.window + more
            if stream.window > frames.WINDOW_MAX:
                raise ProtocolError(frames.FLOW, "a window is too wide")
            if before <= 0:
                stream.pump()
