"""MCP servers that are commands: each runs for one agent in a sandbox of its own, and the kernel is its standard input and output.

Inside is what the kernel file gives it: its files, its environment, its limits. There is no network, no workspace, no syscall socket of the agent's and
nothing of the kernel's environment. Its standard input and output are one end of a socket; a few lines of Python connect it and become the command.

INVARIANT: a server ends with its session, and a session with its server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ringfence.kernel.config import VERSION, Layout
from ringfence.kernel.demands import demanded, limits_in
from ringfence.kernel.outreach_a2a import Cards
from ringfence.kernel.outreach_mcp import OPERATOR, LiveSession, Servers
from ringfence.kernel.pipes import reader_of
from ringfence.kernel.thread import FINAL_STATES
from ringfence.sandbox.types import Program, ProgramSpec, SandboxError
from ringfence.syscalls.mcp_common import ANSWER_BYTES_MAX, Lost, Sent
from ringfence.syscalls.redaction import redactor_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.kernel.backends import Backends
    from ringfence.kernel.core import Core
    from ringfence.kernel.resources import Resources
    from ringfence.policy.kernel_file import KernelFile
    from ringfence.syscalls.declared import McpResource

__all__ = ["Boxes", "Servers", "servers_with"]

log = logging.getLogger(__name__)

Joined: TypeAlias = "asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]"
"""The server's end of its line, once it has connected."""

UID_BASE: Final = 1_800_000_000
"""First host uid of servers when the kernel is root; agents have others."""

_UIDS: Final = 100_000_000
_SOCKET: Final = "syscall.sock"
_TAIL_BYTES: Final = 4096
_JOIN: Final = """
import os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect("/run/ringfence/syscall.sock")
os.dup2(line.fileno(), 0)
os.dup2(line.fileno(), 1)
line.close()
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error.strerror}")
"""


class Boxes:
    """Starts servers.

    Args:
        layout: where their sockets lie.
        backends: who makes sandboxes.
        file: the kernel file in force.
    """

    def __init__(self, layout: Layout, backends: Backends, file: Callable[[], KernelFile]) -> None:
        self._layout = layout
        self._backends = backends
        self._file = file
        self._numbers = itertools.count()

    async def start(self, resource: McpResource, agent: str) -> LiveSession:
        """Start a server for an agent; gives the session, which is to be greeted yet.

        Raises:
            Lost: it can't be started.
        """
        place = self._layout.run / f"m{next(self._numbers)}"
        uid = _uid(f"{self._layout.data}\0{resource.name}\0{agent}") if os.geteuid() == 0 else None
        stream: Joined = asyncio.get_running_loop().create_future()
        try:
            door = await _listen(place, uid, stream)
            try:
                program, reader, writer = await self._begin(resource, agent, place, uid, stream)
            finally:
                door.close()
        except (SandboxError, OSError, TimeoutError, Lost) as error:
            shutil.rmtree(place, ignore_errors=True)
            why = redactor_of(resource.secrets).text(str(error) or "it did not begin in time")
            log.warning("the MCP server `%s` can't be started for %s: %s", resource.name, agent, why)
            # What it printed is the operator's: an agent hears that it does not start.
            raise Lost("can't be started; the kernel's log says why") from None
        from ringfence.syscalls.mcp_stream import open_stream  # noqa: PLC0415 - takes long; whoever asks has imported its half

        return _Boxed(open_stream(reader, writer, VERSION), program, place)

    async def _begin(
        self, resource: McpResource, agent: str, place: Path, uid: int | None, stream: Joined
    ) -> tuple[Program, asyncio.StreamReader, asyncio.StreamWriter]:
        tail = _Tail()
        program = await self._launch(resource, agent, place, uid, tail)
        try:
            return program, *await _joined(program, stream, resource.timeout_s, tail)
        except BaseException:
            await asyncio.shield(asyncio.create_task(program.kill()))
            raise

    async def _launch(
        self, resource: McpResource, agent: str, place: Path, uid: int | None, tail: _Tail
    ) -> Program:
        backend = self._backends.name_for([resource.box])
        image = Path(resource.files) if resource.files else self._empty()
        read_fd, write_fd = os.pipe()
        tail.follow(read_fd)
        try:
            spec = ProgramSpec(
                agent=f"mcp-{resource.name}-{agent}",
                argv=["python3", "-c", _JOIN, *resource.command],
                env={**self._backends.environment(backend), **resource.env},
                image=image,
                socket_dir=place,
                readonly=self._backends.shown(backend),
                require=demanded([resource.box], self._file().sandbox),
                uid=uid,
                limits=limits_in([resource.box]),
                stdout_fd=write_fd,
                stderr_fd=write_fd,
            )
            return await self._backends.named(backend).start(spec)
        finally:
            os.close(write_fd)

    def _empty(self) -> Path:
        """A directory with nothing in it."""
        place = self._layout.run / "mcp-empty"
        place.mkdir(mode=0o755, exist_ok=True)
        return place


def servers_with(
    core: Core, layout: Layout, backends: Backends, resources: Callable[[], Resources]
) -> Servers:
    """The declared servers, those that are commands too, and the cards of declared agents."""
    boxes = Boxes(layout, backends, lambda: resources().file)

    def lives(agent: str) -> bool:
        # One that ended, or is another kernel's by now, needs none here; operators end theirs by not using it.
        return agent == OPERATOR or any(
            thread.id == agent and thread.state not in FINAL_STATES for thread in core.threads.values()
        )

    cards = Cards(core.store, lambda: resources().a2a)
    return Servers(core.store, lambda: resources().mcp, boxes.start, lives, cards)


def _uid(name: str) -> int:
    return UID_BASE + zlib.crc32(name.encode()) % _UIDS


def _made(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    return place / _SOCKET


async def _listen(place: Path, uid: int | None, stream: Joined) -> asyncio.Server:
    """Listen for the server's one connection."""
    path = _made(place)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    line.bind(str(path))
    # The directory is mounted into one sandbox only and its parents are closed to others on the host.
    path.chmod(0o666)
    if uid is not None:
        os.chown(path, uid, -1)

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if stream.done():
            writer.close()
        else:
            stream.set_result((reader, writer))

    return await asyncio.start_unix_server(joined, sock=line, limit=ANSWER_BYTES_MAX)


async def _joined(
    program: Program,
    stream: Joined,
    within_s: float,
    tail: _Tail,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Wait until the server has connected.

    Raises:
        Lost: it ended first.
        TimeoutError: it took longer.
    """
    ended = asyncio.create_task(program.wait())
    try:
        async with asyncio.timeout(within_s):
            await asyncio.wait([ended, stream], return_when=asyncio.FIRST_COMPLETED)
        if not stream.done():
            raise Lost(f"it ended at once: {tail.text()}")
        return stream.result()
    finally:
        ended.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ended


class _Tail:
    """The end of what a server prints beside its messages."""

    def __init__(self) -> None:
        self._kept = b""
        self._task: asyncio.Task[None] | None = None

    def follow(self, read_fd: int) -> None:
        """Read until the writers are gone. Takes ownership of `read_fd`."""
        self._task = asyncio.create_task(self._run(read_fd), name="ringfence mcp output")

    async def _run(self, read_fd: int) -> None:
        reader, transport = await reader_of(read_fd)
        try:
            while data := await reader.read(_TAIL_BYTES):
                self._kept = (self._kept + data)[-_TAIL_BYTES:]
        finally:
            transport.close()

    def text(self) -> str:
        """On one line."""
        return " ".join(self._kept.decode("utf-8", "replace").split())[-400:] or "it printed nothing"


class _Boxed:
    """A session with a server that ends with it."""

    def __init__(self, session: LiveSession, program: Program, place: Path) -> None:
        self._session = session
        self._program = program
        self._place = place

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return self._session.alive

    async def ready(self, within_s: float) -> None:
        """Wait until the server has been greeted."""
        await self._session.ready(within_s)

    async def listed(self, kind: str) -> list[dict[str, Any]]:
        """All that the server lists of a kind."""
        return await self._session.listed(kind)

    async def ask(
        self, method: str, params: Mapping[str, Any], effect_id: str, sent: Sent
    ) -> Mapping[str, Any]:
        """Send one request, once."""
        return await self._session.ask(method, params, effect_id, sent)

    async def close(self) -> None:
        """End both."""
        await self._session.close()
        await self._program.kill()
        shutil.rmtree(self._place, ignore_errors=True)
