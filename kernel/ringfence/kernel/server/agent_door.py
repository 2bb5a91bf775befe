"""The door of one agent: a socket of its own, so that the socket is the identity. What is spoken on it is gRPC.

One bidirectional stream carries most calls; unary methods of the table serve callers without the library. A client that
dies cancels nothing: its calls go on, are recorded, and answer the next process from the journal.

gRPC's own server is not used here. It reads before it counts: what one agent could have it hold was beyond any bound of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.kernel.descriptors import Descriptors
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.doors import mcp_door
from ringfence.kernel.doors.mcp_calls import Calls
from ringfence.kernel.server import frames
from ringfence.kernel.server.connection import CHORES_OF_CONNECTION, Connection
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.server.gate import Bounds
from ringfence.kernel.server.stream import Stream
from ringfence.kernel.server.talk import Talk
from ringfence.kernel.server.unary import Unary, vouches
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.syscalls.table import Row

if TYPE_CHECKING:
    from ringfence.kernel.doors.bridge import Bridge

SOCKET = "syscall.sock"
SERVICE = "ringfence.v1.SyscallService"
STREAM = f"/{SERVICE}/Stream"

_BACKLOG = 128
_ACCEPTED_AT_ONCE = 16
_NO_DESCRIPTOR_S = 0.1
_ENDED = "the agent's program has ended, or its kernel stops"


def by_path(table: Mapping[str, Row]) -> Mapping[str, Row]:
    """The methods of a table as their callers name them: made once for all doors."""
    return {f"/{SERVICE}/{row.method}": row for row in table.values()}


class AgentDoor:
    """Serves one agent while one program of it lives.

    Attributes:
        bounds: of all its connections together.
    """

    def __init__(
        self,
        thread: Thread,
        dispatcher: Dispatcher,
        on_park: Callable[[Thread, Answer], Awaitable[None]],
        descriptors: Descriptors,
    ) -> None:
        self._desk = Desk(thread, dispatcher, on_park)
        self._calls = Calls.of(self._desk)
        self._descriptors = descriptors
        self._holds = False
        self._taken = 0
        self._connections: set[Connection] = set()
        self._rows: Mapping[str, Row] = {}
        self._directory = Path()
        self._socket: socket.socket | None = None
        self._inode = (0, 0)
        self._resting: asyncio.TimerHandle | None = None
        self._bridge: Bridge | None = None

    @property
    def bounds(self) -> Bounds:
        """Of all its connections together."""
        return self._desk.bounds

    async def open(self, directory: Path, rows: Mapping[str, Row], uid: int | None) -> None:
        """Listen on `syscall.sock` in `directory`, readable to the agent alone; `rows` as `by_path` makes them.

        Raises:
            NoDescriptors: the kernel can't serve one more agent.
        """
        path = _clear(directory)
        self._directory = directory
        self._descriptors.take()
        self._holds = True
        self._rows = rows
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        self._inode = _inode(path)
        self._socket.listen(_BACKLOG)
        _admit_agent(path, uid)
        self._listen()

    async def close(self) -> None:
        """Stop listening; calls in flight go on without a client."""
        self._desk.closed.set()
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None
        if self._socket is not None:
            self._deaf()
            # INVARIANT: what is there may be the successor's, of a kernel that was taken over from and does not know it
            # yet. The number of our own file is nobody else's while our socket is open.
            path = self._directory / SOCKET
            ours = _inode(path) == self._inode
            self._socket.close()
            self._socket = None
            for connection in list(self._connections):
                connection.shut(frames.NO_ERROR, _ENDED)
            if ours:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    # It was mounted in a sandbox, and waits for that to be taken down.
                    await asyncio.to_thread(self._directory.rmdir)
        if self._holds:
            self._holds = False
            self._descriptors.give_back(self._taken)

    def lend(self, listener: socket.socket, doors: Sequence[str]) -> None:
        """Serve what the program connects to on its loopback, too.

        Args:
            listener: becomes this object's.
            doors: as the manifest names them.
        """
        from ringfence.kernel.doors.bridge import Bridge  # noqa: PLC0415 - few programs have doors, and they speak HTTP

        self._bridge = Bridge(self._desk, self, listener, doors)

    # -- connections --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._resting = None
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _deaf(self) -> None:
        loop = asyncio.get_running_loop()
        if self._socket is not None:
            loop.remove_reader(self._socket)
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def _rest(self, for_s: float) -> None:
        """Leave who comes in the queue of the socket for a while."""
        self._deaf()
        self._resting = asyncio.get_running_loop().call_later(for_s, self._listen)

    def _accept(self) -> None:
        assert self._socket is not None  # noqa: S101 - else nobody reads it
        calm = self.bounds.calm
        for _ in range(_ACCEPTED_AT_ONCE):
            if debt_s := calm.debt_s():
                self._rest(debt_s)
                return
            try:
                client, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:
                self._rest(_NO_DESCRIPTOR_S)
                return
            if not self.admit():
                # One more than there is room for hears it at once; the library tries again.
                calm.spend(CHORES_OF_CONNECTION)
                client.close()
                continue
            client.setblocking(False)
            self._desk.keep(self._welcome(client))

    async def _welcome(self, client: socket.socket) -> None:
        connection = Connection(self)
        self._connections.add(connection)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client)
        except OSError:
            client.close()
            self.lost(connection)
        if self._socket is None:
            # Closed meanwhile, when there was nothing yet to close of this one.
            connection.shut(frames.NO_ERROR, _ENDED)

    def lost(self, connection: Connection) -> None:
        """Hear that a connection is over."""
        if connection in self._connections:
            self._connections.discard(connection)
            self.leave()

    def admit(self) -> bool:
        """Count one more connection, if the agent may have it."""
        if not self._descriptors.connect(self._taken):
            return False
        self._taken += 1
        return True

    def leave(self) -> None:
        """A connection is over."""
        if self._holds:
            self._descriptors.disconnect(self._taken)
        self._taken -= 1

    # -- streams ------------------------------------------------------------------------------------------------

    def accept(self, stream: Stream, headers: Mapping[str, str]) -> None:
        """Take a new stream, and serve it when it is its turn."""
        path = headers.get(":path", "")
        if not headers.get("content-type", "").startswith("application/grpc"):
            stream.end(frames.UNIMPLEMENTED, "this socket serves gRPC")
            return
        if path == STREAM:
            talk = Talk(self._desk, stream)
            stream.attend(talk)
            self.bounds.streams.take(talk, talk.begin)
            return
        if path == mcp_door.METHOD:
            vouched = vouches(self._desk.thread, headers)
            client = mcp_door.McpTalk(self._desk, self._calls, stream, vouched=vouched)
            stream.attend(client)
            self.bounds.streams.take(client, client.begin)
            return
        row = self._rows.get(path)
        if row is None:
            stream.end(
                frames.UNIMPLEMENTED, "there is no such method; see the .proto files of `ringfence.v1`"
            )
            return
        unary = Unary(self._desk, stream, row, vouched=vouches(self._desk.thread, headers))
        stream.attend(unary)
        self.bounds.unary.take(unary, unary.begin)


def _clear(directory: Path) -> Path:
    """Make the socket's directory and remove what an earlier start left in it."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory.chmod(0o755)
    path = directory / SOCKET
    path.unlink(missing_ok=True)
    return path


def _inode(path: Path) -> tuple[int, int]:
    try:
        found = path.lstat()
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def _admit_agent(path: Path, uid: int | None) -> None:
    # The directory is mounted into one sandbox only and its parents are closed to others on the host.
    path.chmod(0o666)
    if uid is not None:
        os.chown(path, uid, -1)
