"""HTTP/1.1 for programs in sandboxes: requests read whole and bounded, answers written as fast as they are read.

The one place where doors speak HTTP. A program is trusted with nothing: what it may make the kernel hold is counted before it
is read, and a request that is none gets an error, never an exception of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import h11
from ringfence.syscalls.codec import ARGUMENTS_BYTES_MAX

HEAD_BYTES_MAX: Final = 32 << 10
"""Longest request line with all headers."""
BODY_BYTES_MAX: Final = ARGUMENTS_BYTES_MAX
"""Longest body: what a call may have as arguments."""
SMALL_BYTES: Final = 64 << 10
"""A longer body waits for its turn to come in."""
LARGE_MAX: Final = 2
"""Longer ones of one agent that come in at a time."""
LINGER_BYTES: Final = 64 << 20
"""Of a request that is refused so much is still read, and thrown away: closed before, the connection would take the answer along."""
_PART_BYTES: Final = 64 << 10


class Gone(Exception):
    """Whoever asked is not there any more."""


class BadRequest(Exception):
    """This is no request that can be served; the connection ends after the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, read whole.

    Attributes:
        path: without the query, as it was sent.
        headers: by name in lower case; of one that came twice the last.
        pairs: the same, each as often as it came.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    pairs: Sequence[tuple[str, str]] = ()
    body: bytes = b""


@dataclass(slots=True)
class _Head:
    method: str = ""
    target: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    pairs: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    body: bytearray = field(default_factory=bytearray)


class Reply:
    """The answer to one request: whole, or in parts.

    Attributes:
        begun: whether its status is on its way.
        gone: set when whoever asked is known to be gone.
        bare: whether the head of an answer is all that was asked for.
    """

    def __init__(self, connection: h11.Connection, writer: asyncio.StreamWriter) -> None:
        self._connection = connection
        self._writer = writer
        self.begun = self.bare = False
        self.gone = asyncio.Event()

    @property
    def lost(self) -> bool:
        """Whether whoever asked is known to be gone."""
        return self.gone.is_set()

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send it at once.

        Raises:
            Gone: nobody takes it.
        """
        await self.begin(status, {**headers, "content-length": str(len(body))})
        await self.part(body)
        await self.end()

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers; parts follow.

        Raises:
            Gone: as above.
        """
        self.begun = True
        pairs = [
            (name, value.encode("latin-1", "replace").decode("latin-1")) for name, value in headers.items()
        ]
        pairs.append(("cache-control", "no-store"))
        await self._send(h11.Response(status_code=status, headers=pairs))

    async def part(self, data: bytes) -> None:
        """Send a part; returns when its reader has taken most of what was sent.

        Raises:
            Gone: as above.
        """
        view = memoryview(b"" if self.bare else data)
        for at in range(0, len(view), _PART_BYTES):
            await self._send(h11.Data(data=bytes(view[at : at + _PART_BYTES])))

    async def end(self) -> None:
        """Say that it is whole.

        Raises:
            Gone: as above.
        """
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        if self.lost:
            raise Gone
        try:
            if data := self._connection.send(event):
                self._writer.write(data)
                await self._writer.drain()
        except (OSError, h11.LocalProtocolError) as error:
            self.gone.set()
            raise Gone from error


Handler = Callable[[Request, Reply], Awaitable[None]]
"""Answers a request. What it has begun goes on when whoever asked is gone."""
Refuser = Callable[[str, int, str], tuple[bytes, Mapping[str, str]]]
"""`(path, status, message)` to body and headers of an error."""


class Exchange:
    """Serves the requests of one connection, one after the other.

    Args:
        handle: answers a request; runs in a task of its own, which `keep` keeps.
        keep: has work run to its end.
        refuse: words an error of HTTP itself.
        large: places for long bodies, shared by the connections of an agent.
    """

    def __init__(
        self,
        handle: Handler,
        keep: Callable[[Awaitable[None]], asyncio.Task[None]],
        refuse: Refuser,
        large: asyncio.Semaphore,
    ) -> None:
        self._handle = handle
        self._keep = keep
        self._refuse = refuse
        self._large = large

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either side has enough."""
        connection = h11.Connection(our_role=h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        with contextlib.suppress(OSError, Gone):
            while await self._one(connection, reader, writer):
                connection.start_next_cycle()

    async def _one(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """One request; False: it was the last."""
        head = _Head()
        reply = Reply(connection, writer)
        try:
            request = await self._read(connection, head, reader, writer)
        except (BadRequest, h11.RemoteProtocolError) as error:
            status = error.status if isinstance(error, BadRequest) else error.error_status_hint
            text = str(error) if isinstance(error, BadRequest) else "this is no HTTP request"
            body, headers = self._refuse(head.target.partition("?")[0], status, text)
            await reply.whole(status, body, {**headers, "connection": "close"})
            writer.write_eof()
            left = LINGER_BYTES
            while left > 0 and (data := await reader.read(_PART_BYTES)):
                left -= len(data)
            return False
        if request is None:
            return False
        reply.bare = request.method == "HEAD"
        work = self._keep(self._answer(request, reply))
        await self._watch(work, reply, connection, reader)
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    async def _answer(self, request: Request, reply: Reply) -> None:
        with contextlib.suppress(Gone):
            await self._handle(request, reply)

    @staticmethod
    async def _watch(
        work: asyncio.Task[None], reply: Reply, connection: h11.Connection, reader: asyncio.StreamReader
    ) -> None:
        """Wait for the answer, and notice when nobody waits for it any more. What is asked meanwhile waits in the parser."""
        more = asyncio.create_task(reader.read(_PART_BYTES))
        try:
            await asyncio.wait([work, more], return_when=asyncio.FIRST_COMPLETED)
            if more.done():
                data = b""
                with contextlib.suppress(OSError):
                    data = more.result()
                if not data:
                    reply.gone.set()
                    raise Gone
                connection.receive_data(data)
            await asyncio.shield(work)
        finally:
            if not more.done():
                more.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    if data := await more:
                        connection.receive_data(data)

    async def _read(
        self,
        connection: h11.Connection,
        head: _Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> Request | None:
        """Read one request; None: nobody asks any more.

        Raises:
            BadRequest: it is too long, or in an encoding.
            h11.RemoteProtocolError: it is no HTTP.
        """
        async with contextlib.AsyncExitStack() as held:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    if connection.they_are_waiting_for_100_continue:
                        writer.write(connection.send(h11.InformationalResponse(status_code=100, headers=[])))
                    connection.receive_data(await reader.read(_PART_BYTES))
                elif isinstance(event, h11.Request):
                    _take_head(head, event)
                elif isinstance(event, h11.Data):
                    before = len(head.body)
                    _bounded(before + len(event.data))
                    if before <= SMALL_BYTES < before + len(event.data):
                        await held.enter_async_context(self._large)
                    head.body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    path, _, query = head.target.partition("?")
                    body = bytes(head.body)
                    return Request(
                        method=head.method,
                        path=path,
                        query=query,
                        headers=head.headers,
                        pairs=head.pairs,
                        body=body,
                    )
                else:
                    return None


def _take_head(head: _Head, event: h11.Request) -> None:
    head.method, head.target = event.method.decode(), event.target.decode()
    # What came in one piece is not counted by the parser.
    if len(event.target) + sum(len(raw) + len(value) for raw, value in event.headers) > HEAD_BYTES_MAX:
        raise BadRequest(431, f"the headers are longer than {HEAD_BYTES_MAX} bytes")
    head.pairs = [(raw.decode(), value.decode("latin-1")) for raw, value in event.headers]
    head.headers = dict(head.pairs)
    if head.headers.get("content-encoding", "identity") != "identity":
        raise BadRequest(415, "the body is in an encoding; send it as it is")
    _bounded(int(head.headers.get("content-length", "0")))


def _bounded(size: int) -> None:
    if size > BODY_BYTES_MAX:
        raise BadRequest(413, f"the body is longer than {BODY_BYTES_MAX} bytes; send less at a time")
