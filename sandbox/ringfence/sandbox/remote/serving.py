"""Runs a sandbox host as a process of its own, from its address to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from ringfence.sandbox.remote.host import HostSettings, SandboxHost
from ringfence.sandbox.types import SandboxError

_BACKLOG = 128
_FIRST_PASSED_FD = 3


def listen(address: str) -> socket.socket:
    """A listening TCP socket.

    Args:
        address: `host:port`; or `fd:N`, a socket that was inherited, such as from a socket unit of systemd (N is 3).

    Raises:
        SandboxError: the address is none, or taken.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 1 << 16:
        raise SandboxError(f"`{address}` is no address to listen on; write `host:port`")
    try:
        if host == "fd":
            if int(port) < _FIRST_PASSED_FD:
                raise SandboxError(f"`{address}` is no inherited socket; they begin at `fd:3`")
            return socket.socket(fileno=int(port))
        host = host.removeprefix("[").removesuffix("]")
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0], backlog=_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SandboxError(f"`{address}` can't be listened on: {reason}; name another address") from error


def shown(listener: socket.socket) -> str:
    """Where a socket listens, as `host:port`."""
    name = listener.getsockname()
    return f"[{name[0]}]:{name[1]}" if listener.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"


async def run(settings: HostSettings, listener: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; errors as for `SandboxHost.serve`."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine runs in one
    asked: list[int] = []

    def stop(number: int) -> None:
        asked.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    os.umask(0o077)
    try:
        await SandboxHost(settings).serve(listener, started)
    except asyncio.CancelledError:
        if not asked:
            raise
    finally:
        listener.close()
