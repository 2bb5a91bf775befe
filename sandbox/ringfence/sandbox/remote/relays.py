"""The syscall socket of one program at a host, and its doors: every connection is carried to the kernel's own sockets of that agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from functools import partial
from pathlib import Path

from ringfence.sandbox.overlay_apply import discard
from ringfence.sandbox.remote import pumps, wire
from ringfence.sandbox.remote.channels import RELAY_WINDOW, Channels
from ringfence.sandbox.remote.orders import to_its_end
from ringfence.sandbox.remote.session import Session, SessionLostError
from ringfence.sandbox.types import Program, SandboxError

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
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, uid: int | None) -> None:
        """Listen, for this user alone.

        Raises:
            OSError: the socket can't be made.
        """
        self.directory.mkdir()
        self.directory.chmod(0o755)  # whatever the umask: the program comes through it
        listener = bound(self.directory, SOCKET_NAME)
        try:
            if uid is not None:
                os.chown(self.directory / SOCKET_NAME, uid, uid)
            serving = asyncio.start_unix_server(
                partial(self._connected, door=False), sock=listener, limit=RELAY_WINDOW
            )
            self._servers.append(await serving)
        except BaseException:
            listener.close()
            raise

    async def lend(self, listener: socket.socket) -> None:
        """Carry what comes in at the program's loopback, too.

        Args:
            listener: of its loopback; becomes this object's.
        """
        listener.setblocking(False)
        try:
            serving = asyncio.start_server(
                partial(self._connected, door=True), sock=listener, limit=RELAY_WINDOW
            )
            self._servers.append(await serving)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """Let what the program sent last through, cut every connection and remove the socket; after its end."""
        for server in self._servers:
            server.close()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=LAST_WORDS_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(discard, self.directory)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, door: bool) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._carry(reader, writer, door=door))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, door: bool) -> None:
        channel = self._channels.make(sends=True, receives=True, window=RELAY_WINDOW)
        try:
            await self._session.send(wire.Open(channel=channel.number, program=self._program, door=door))
        except SessionLostError:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            await pumps.relay(reader, writer, channel)


def bound(directory: Path, name: str) -> socket.socket:
    """A listening unix socket in a directory, for this user alone, however long the path is.

    Raises:
        OSError: it can't be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{handle}/{name}")
        finally:
            os.close(handle)
        (directory / name).chmod(0o600)
        listener.listen(CONNECTIONS_MAX)
    except BaseException:
        listener.close()
        raise
    return listener


async def lend(relay: Relay, program: Program, ours: socket.socket) -> None:
    """Take the loopback that the sandbox handed out, and carry what comes in there.

    Raises:
        SandboxError: it handed none out; the program is ended.
    """
    try:
        ours.setblocking(False)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
        await relay.lend(socket.socket(fileno=descriptors[0]))
    except BaseException as error:
        await to_its_end(program.kill())
        if isinstance(error, (OSError, IndexError)):
            raise SandboxError(f"the sandbox handed no doors out ({error}); report this") from error
        raise
