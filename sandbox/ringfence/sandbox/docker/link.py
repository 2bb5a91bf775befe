"""The kernel's end of the link with a container's first process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.sandbox.docker.inside import HEADER_BYTES
from ringfence.sandbox.docker.places import LINK_NAME
from ringfence.sandbox.types import SandboxError, SandboxLostError

_CREDENTIALS = struct.Struct("3i")
_PACKET_BYTES = 65536
_LINE_BYTES_MAX = 1 << 20
_MAX_VIEWS = 4
_MARSHAL = 4
"""Its format that every Python from 3.4 on reads."""
_GREETING_S = 60.0


class Listener:
    """Waits for the one connection of a container.

    Args:
        directory: what the container sees of it; holds nothing else that could be connected to.
    """

    def __init__(self, directory: Path) -> None:
        self._place = directory / LINK_NAME
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        top = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A socket's path has at most 107 bytes; that of a data directory may be longer.
            self._socket.bind(f"/proc/self/fd/{top}/{LINK_NAME}")
        finally:
            os.close(top)
        self._place.chmod(0o666)
        self._socket.listen(1)

    async def accept(self) -> socket.socket:
        """The connection. From then on there is nothing more to connect to."""
        connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        self.close()
        return connection

    def close(self) -> None:
        """Stop listening; no name is left behind."""
        with contextlib.suppress(OSError):
            self._place.unlink()
        self._socket.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the first process said of the start.

    Attributes:
        pid: its pid on this host; 0 where it has none here.
        views: descriptors of directories inside, as the job asked for.
        rest: what it said after that.
    """

    pid: int
    views: Sequence[int]
    rest: bytes = b""


def greet(
    link: socket.socket, uid: int | None, job: Mapping[str, Any], stdin: bytes, stdout: int, stderr: int
) -> Started:
    """Hand over the job and wait until the program runs. Blocks.

    Args:
        link: with the first process.
        uid: whose it is on this host; None: the other end is a runtime that has a kernel of its own.
        job: what to run.
        stdin: bytes for standard input.
        stdout: descriptor for standard output.
        stderr: the same for standard error.

    Raises:
        SandboxError: it was refused; the program does not run.
        SandboxLostError: the first process is gone.
    """
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, peer, _ = _CREDENTIALS.unpack(credentials)
    if uid is None:
        pid = 0
    elif peer != uid:
        raise SandboxError(
            f"the engine runs the sandbox as uid {peer} of this host, not {uid}; switch its userns-remap off"
        )
    link.settimeout(_GREETING_S)
    views: list[int] = []
    try:
        source = _sealed(stdin)
        try:
            text = marshal.dumps(dict(job), _MARSHAL)
            socket.send_fds(link, [len(text).to_bytes(HEADER_BYTES, "big")], [source, stdout, stderr])
            link.sendall(text)
        finally:
            os.close(source)
        return Started(pid=pid, views=views, rest=_answer(link, views))
    except BaseException as error:
        for view in views:
            os.close(view)
        if isinstance(error, OSError):
            raise SandboxLostError(
                f"the container's first process went away before the program ran ({error.strerror or error}); start it again"
            ) from error
        raise


def _answer(link: socket.socket, views: list[int]) -> bytes:
    """Read until the program runs or was refused; answers what came after that, for a program may end at once."""
    received = bytearray()
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, _PACKET_BYTES, _MAX_VIEWS)
        views += descriptors
        if not data:
            raise SandboxLostError("the container ended before the program ran; start it again")
        received += data
        while b"\n" in received:
            line, _, rest = bytes(received).partition(b"\n")
            received = bytearray(rest)
            message: dict[str, Any] = json.loads(line)
            if "refused" in message:
                raise SandboxError(str(message["refused"]))
            if "started" in message:
                return bytes(received)
        if len(received) > _LINE_BYTES_MAX:
            raise SandboxError(
                "the container's first process does not speak as it should; build the image anew"
            )


def _sealed(data: bytes) -> int:
    """Standard input as an anonymous file that nobody can change."""
    import fcntl  # noqa: PLC0415 - only here

    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
