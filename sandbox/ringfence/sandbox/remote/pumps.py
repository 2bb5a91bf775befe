"""Moves bytes between descriptors or sockets and channels, in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat

from ringfence.sandbox.remote import wire
from ringfence.sandbox.remote.channels import Channel, ChannelLostError

_PIECE_BYTES = 64 << 10
_STREAM_LIMIT_BYTES = 64 << 10


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, channel: Channel) -> None:
    """Join a socket and a channel until both directions have ended, or either is cut.

    One direction may end before the other. The socket is closed on return.
    """
    both = [
        asyncio.create_task(_from_socket(reader, channel)),
        asyncio.create_task(_to_socket(channel, writer)),
    ]
    # Either may wait for the socket alone, and would not hear that the channel is gone.
    lost = asyncio.create_task(channel.until_lost())
    work = asyncio.gather(*both)
    cut = True
    try:
        await asyncio.wait([work, lost], return_when=asyncio.FIRST_COMPLETED)
        cut = not work.done() or work.exception() is not None
    finally:
        for task in (*both, lost):
            task.cancel()
        await asyncio.gather(*both, lost, return_exceptions=True)
        await asyncio.gather(work, return_exceptions=True)
        if cut:
            await channel.reset()
            writer.transport.abort()
        else:
            writer.close()


async def _from_socket(reader: asyncio.StreamReader, channel: Channel) -> None:
    while data := await reader.read(_PIECE_BYTES):
        await channel.send(data)
    await channel.end()


async def _to_socket(channel: Channel, writer: asyncio.StreamWriter) -> None:
    while data := await channel.read():
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def send_bytes(channel: Channel, data: bytes) -> None:
    """Send a whole text and its end; content if nobody wants it."""
    with contextlib.suppress(ChannelLostError):
        await channel.send(data)
        await channel.end()


async def read_bytes(channel: Channel, most: int) -> bytes:
    """Take a whole text in.

    Raises:
        WireError: it is longer than was said.
        ChannelLostError: its sender is gone.
    """
    found = bytearray()
    while data := await channel.read():
        found += data
        if len(found) > most:
            raise wire.WireError("a text is longer than was said")
    return bytes(found)


async def from_pipe(fd: int, channel: Channel) -> None:
    """Send what comes out of a pipe, to its end; closes `fd`. Its writers wait while nobody reads the channel."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    try:
        while True:
            try:
                data = os.read(fd, _PIECE_BYTES)
            except BlockingIOError:
                await _ready(loop, fd, writing=False)
                continue
            if not data:
                await channel.end()
                return
            await channel.send(data)
    except ChannelLostError:
        return  # closing the pipe tells its writers
    finally:
        os.close(fd)


async def to_descriptor(channel: Channel, fd: int) -> None:
    """Write what comes to a descriptor of whatever kind, to the end; closes `fd`.

    The other end is told when nobody reads it any more.
    """
    kind = os.fstat(fd).st_mode
    waits = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
    if waits:
        os.set_blocking(fd, False)
    try:
        while data := await channel.read():
            if waits:
                await _write(fd, data)
            else:
                await asyncio.to_thread(_write_all, fd, data)
    except ChannelLostError:
        return
    except OSError:
        await channel.reset()
    finally:
        os.close(fd)


async def _write(fd: int, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            await _ready(loop, fd, writing=True)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _ready(loop: asyncio.AbstractEventLoop, fd: int, *, writing: bool) -> None:
    future: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(fd, lambda: future.done() or future.set_result(None))
    try:
        await future
    finally:
        remove(fd)


async def connect(directory: str, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a unix socket in a directory, however long its path is.

    Raises:
        OSError: nobody listens.
    """
    handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return await connect_to(f"/proc/self/fd/{handle}/{name}")
    finally:
        os.close(handle)


async def connect_to(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a unix socket.

    Raises:
        OSError: nobody listens.
    """
    try:
        return await asyncio.open_unix_connection(path, limit=_STREAM_LIMIT_BYTES)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
