"""The session between a kernel and a sandbox host: each message once and in order over any cuts, in bounded memory."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from typing import Any

import pytest
from ringfence.sandbox.remote import pumps, wire
from ringfence.sandbox.remote.channels import BULK_WINDOW, ChannelLostError, Channels
from ringfence.sandbox.remote.session import UNSEEN_BYTES_MAX, Session, SessionLostError


class Pair:
    """Two ends, and the cable between them."""

    def __init__(self) -> None:
        self.near, self.far = Session(self._to_near), Session(self._to_far)
        self.near_end, self.far_end = Channels(self.near, 1), Channels(self.far, 2)
        self._work: list[asyncio.Task[str]] = []
        self._writers: list[asyncio.StreamWriter] = []

    def _to_near(self, message: Any) -> None:
        self.near_end.take(message)

    def _to_far(self, message: Any) -> None:
        self.far_end.take(message)

    async def connect(self) -> None:
        one, other = socket.socketpair()
        near, far = await asyncio.open_connection(sock=one), await asyncio.open_connection(sock=other)
        self._writers = [near[1], far[1]]
        received = self.near.received, self.far.received
        self._work = [
            asyncio.create_task(self.near.run(*near, received_there=received[1], silence_s=20)),
            asyncio.create_task(self.far.run(*far, received_there=received[0], silence_s=20)),
        ]

    async def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._work)

    async def reconnect(self) -> None:
        await self.cut()
        await self.connect()


@pytest.fixture
async def pair() -> Any:
    pair = Pair()
    await pair.connect()
    yield pair
    await pair.cut()


async def test_a_stream_is_whole_over_any_number_of_cuts(pair: Pair) -> None:
    data = os.urandom(4_000_000)
    out = pair.near_end.make(sends=True)
    into = pair.far_end.make(receives=True, number=out.number)

    async def feed() -> None:
        await out.send(data)
        await out.end()

    feeding = asyncio.create_task(feed())
    found = bytearray()
    cuts = 0
    while part := await into.read():
        found += part
        if len(found) > (cuts + 1) * 300_000:
            cuts += 1
            await pair.reconnect()
    await feeding
    assert cuts > 10
    assert bytes(found) == data


async def test_a_reader_that_does_not_read_holds_up_its_writer_and_no_one_else(pair: Pair) -> None:
    stuck, runs = pair.near_end.make(sends=True), pair.near_end.make(sends=True)
    into = pair.far_end.make(receives=True, number=stuck.number)
    other = pair.far_end.make(receives=True, number=runs.number)
    waits = asyncio.create_task(stuck.send(b"x" * 10 * BULK_WINDOW))
    for _ in range(20):
        await runs.send(b"y" * 100_000)
        seen = 0
        while seen < 100_000:
            seen += len(await other.read())
    assert not waits.done()
    first = 0
    while first < BULK_WINDOW:
        first += len(await into.read())
    assert first == BULK_WINDOW
    await into.reset()
    with pytest.raises(ChannelLostError):
        await waits


async def test_what_is_kept_for_the_next_connection_is_bounded(pair: Pair) -> None:
    await pair.cut()
    sent = 0

    async def send() -> None:
        nonlocal sent
        while True:
            await pair.near.send(wire.Data(channel=99, data=b"x" * 60_000))
            sent += 60_000

    task = asyncio.create_task(send())
    for _ in range(200):
        await asyncio.sleep(0)
    assert UNSEEN_BYTES_MAX <= sent <= UNSEEN_BYTES_MAX + 120_000
    pair.near.lose("enough")
    with pytest.raises(SessionLostError, match="enough"):
        await task
    await pair.connect()


async def test_half_of_a_channel_may_end_before_the_other(pair: Pair) -> None:
    near = pair.near_end.make(sends=True, receives=True)
    far = pair.far_end.make(sends=True, receives=True, number=near.number)
    await near.send(b"question")
    await near.end()
    assert await far.read() == b"question"
    assert await far.read() == b""
    await far.send(b"answer")
    await far.end()
    assert (await near.read(), await near.read()) == (b"answer", b"")


@pytest.mark.parametrize("count", [-1, 5])
async def test_a_lie_about_what_was_received_ends_the_session(pair: Pair, count: int) -> None:
    await pair.cut()
    one, other = socket.socketpair()
    streams = await asyncio.open_connection(sock=one)
    other.close()
    why = await pair.near.run(*streams, received_there=count, silence_s=20)
    assert "never sent" in why
    assert pair.near.lost is not None
    pair.near.lost = None
    await pair.connect()


async def test_more_than_the_window_ends_the_session(pair: Pair) -> None:
    number = pair.near_end.make(sends=True).number
    pair.far_end.make(receives=True, number=number)
    for _ in range(BULK_WINDOW // 60_000 + 2):
        await pair.near.send(wire.Data(channel=number, data=b"x" * 60_000))
    while pair.far.lost is None:
        await asyncio.sleep(0)
    assert "more than there was room for" in str(pair.far.lost)


async def test_a_message_that_is_too_large_is_refused_and_the_session_goes_on(pair: Pair) -> None:
    with pytest.raises(wire.WireError):
        await pair.near.send(wire.Data(channel=1, data=b"x" * (wire.FRAME_BYTES_MAX + 1)))
    out = pair.near_end.make(sends=True)
    into = pair.far_end.make(receives=True, number=out.number)
    await out.send(b"well")
    assert await into.read() == b"well"


async def test_a_relay_that_is_cancelled_leaves_no_error_behind(pair: Pair) -> None:
    left: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
    near = pair.near_end.make(sends=True, receives=True)
    far = pair.far_end.make(sends=True, receives=True, number=near.number)
    one, other = socket.socketpair()
    with other:
        reader, writer = await asyncio.open_connection(sock=one)
        relaying = asyncio.create_task(pumps.relay(reader, writer, near))
        feeding = asyncio.create_task(far.send(bytes(4 << 20)))
        while (
            not writer.transport.get_write_buffer_size()
        ):  # nobody reads the socket, so the relay waits for it
            await asyncio.sleep(0)
        relaying.cancel()
        await asyncio.gather(relaying, feeding, return_exceptions=True)
    del relaying, feeding
    gc.collect()
    await asyncio.sleep(0)
    assert left == []
