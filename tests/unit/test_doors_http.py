"""HTTP at a program's doors: what is too much is refused, who reads slowly holds up nobody and nothing grows, who leaves is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import pytest
from ringfence.kernel.doors import http
from ringfence.kernel.doors.http import BODY_BYTES_MAX, Exchange, Gone, Reply, Request

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: a\r\n"


class Served:
    """A connection to a server that answers by a function of the test."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.replies: list[Reply] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.answer: bytes | None = b"ok"
        self.ended: list[str] = []

    async def handle(self, request: Request, reply: Reply) -> None:
        self.asked.append(request)
        self.replies.append(reply)
        try:
            if self.answer is None:
                await asyncio.Event().wait()
            else:
                await reply.whole(200, self.answer, {})
        except Gone:
            self.ended.append("gone")
            raise
        self.ended.append("sent")


@contextlib.asynccontextmanager
async def serving() -> AsyncGenerator[tuple[Served, asyncio.StreamReader, asyncio.StreamWriter]]:
    served = Served()
    work: set[asyncio.Task[None]] = set()

    def keep(one: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(one)
        work.add(task)
        return task

    def refuse(path: str, status: int, message: str) -> tuple[bytes, dict[str, str]]:
        return f"{status} {path} {message}".encode(), {}

    exchange = Exchange(served.handle, keep, refuse, asyncio.Semaphore(1))

    over = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.writers.append(writer)
        await exchange.serve(reader, writer)
        writer.transport.abort()
        over.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 30)
    try:
        yield served, reader, writer
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        writer.transport.abort()
        server.close()
        await over.wait()
        await asyncio.sleep(0)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(
        int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length")
    )
    return int(head.split()[1]), await reader.readexactly(size)


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with serving() as (served, reader, writer):
        for body in (b"", b"one", b"x" * http.SMALL_BYTES * 3):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert await answer(reader) == (200, b"ok")
            assert served.asked[-1].body == body
        # Sent together, answered in turn.
        writer.write((HEAD + b"Content-Length: 1\r\n\r\na") * 3)
        assert [await answer(reader) for _ in range(3)] == [(200, b"ok")] * 3
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        assert await answer(reader) == (200, b"ok")
        assert served.asked[-1].body == b"abc"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1), 413),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na", 415),
        (HEAD + b"X-Long: " + b"a" * http.HEAD_BYTES_MAX + b"\r\n\r\n", 431),
        (HEAD + b"Content-Length: many\r\n\r\n", 400),
        (b"what is this\r\n\r\n", 400),
    ],
)
async def test_what_is_no_request_gets_an_error_and_the_end(sent: bytes, status: int) -> None:
    async with serving() as (served, reader, writer):
        writer.write(sent)
        assert (await answer(reader))[0] == status
        assert await reader.read() == b""
        assert served.asked == []


async def test_a_look_whether_somebody_is_there_gets_a_head() -> None:
    async with serving() as (served, reader, writer):
        for _ in range(2):
            writer.write(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"content-length: 2" in head.lower()
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        assert await answer(reader) == (200, b"ok")
        assert served.ended == ["sent"] * 3


async def test_a_body_without_a_length_is_bounded_too() -> None:
    async with serving() as (served, reader, writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        part = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
        for _ in range(BODY_BYTES_MAX // 0x10000 + 1):
            writer.write(part)
        assert (await answer(reader))[0] == 413
        assert served.asked == []


async def test_a_slow_reader_is_waited_for_and_nothing_piles_up() -> None:
    async with serving() as (served, reader, writer):
        served.answer = b"y" * (50 << 20)
        transport: Any = writer.transport
        transport.pause_reading()
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        while not served.replies:
            await asyncio.sleep(0)
        held = served.writers[0].transport
        seen = 0
        for _ in range(2000):
            await asyncio.sleep(0)
            seen = max(seen, held.get_write_buffer_size())
        assert served.ended == []
        assert 0 < seen < 1 << 20
        transport.resume_reading()
        status, body = await answer(reader)
        assert (status, len(body)) == (200, 50 << 20)


async def test_who_leaves_is_noticed_and_the_work_goes_on() -> None:
    async with serving() as (served, _, writer):
        served.answer = None
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        while not served.replies:
            await asyncio.sleep(0)
        writer.transport.abort()
        while not served.replies[0].lost:
            await asyncio.sleep(0)
        assert served.ended == []
        with pytest.raises(Gone):
            await served.replies[0].whole(200, b"late", {})
