"""The syscall socket of one program at a host: every connection is carried to the kernel's own socket of that agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from ringfence.sandbox.overlay_apply import discard
from ringfence.sandbox.remote import pumps, wire
from ringfence.sandbox.remote.channels import RELAY_WINDOW, Channels
from ringfence.sandbox.remote.session import Session, SessionLostError

CONNECTIONS_MAX = 64
"""Of one program at a time; as many as a kernel's own socket takes. Above it a connection is closed at once."""
SOCKET_NAME = "syscall.sock"
LAST_WORDS_S = 2.0
"""How long a connection whose program has ended may take to bring its last bytes to the kernel, and to hear of its end there."""


class Relay:
    """Listens for one program.

    Args:
        session: of the kernel.
        channels: of that session.
        program: whose connections these are.
        directory: for the socket; made by `open` and removed by `close`.
    """

    def __init__(self, session: Session, channels: Channels, program: int, directory: Path) -> None:
        self.directory = directory
        self._session = session
        self._channels = channels
        self._program = program
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, uid: int | None) -> None:
        """Listen, for this user alone.

        Raises:
            OSError: the socket can't be made.
        """
        self.directory.mkdir()
        self.directory.chmod(0o755)  # whatever the umask: the program comes through it
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            handle = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # By the handle: the path of a data directory may be longer than a socket's can be.
                listener.bind(f"/proc/self/fd/{handle}/{SOCKET_NAME}")
            finally:
                os.close(handle)
            path = self.directory / SOCKET_NAME
            path.chmod(0o600)
            if uid is not None:
                os.chown(path, uid, uid)
            listener.listen(CONNECTIONS_MAX)
            self._server = await asyncio.start_unix_server(self._connected, sock=listener, limit=RELAY_WINDOW)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """Let what the program sent last through, cut every connection and remove the socket; after its end."""
        if self._server is not None:
            self._server.close()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=LAST_WORDS_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(discard, self.directory)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = self._channels.make(sends=True, receives=True, window=RELAY_WINDOW)
        try:
            await self._session.send(wire.Open(channel=channel.number, program=self._program))
        except SessionLostError:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            await pumps.relay(reader, writer, channel)
