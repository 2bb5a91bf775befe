"""The doors on the loopback of a sandbox: the first process listens there, and hands the listening socket out.

Nothing of a sandbox carries what goes through it: who gets the socket, the kernel in the end, accepts connections of the
sandbox's own network namespace. That has no other device and no route to anywhere.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

from ringfence.sandbox.native import linux
from ringfence.sandbox.native.job import USERNS_FIX, wall

_SIOCSIFFLAGS = 0x8914
_UP = 0x1
_NAME_BYTES, _REQUEST_BYTES = 16, 40
_BACKLOG = 16
_BUFFER_BYTES = 64 << 10
"""What Linux may hold of one connection that nobody reads yet, before it doubles that."""


def open_doors(port: int, hand: int) -> None:
    """Bring the loopback up, listen there, and give the socket away. In the sandbox's namespaces, with all rights over them.

    Args:
        port: of 127.0.0.1.
        hand: descriptor of the unix socket that gets it.

    Raises:
        Refused: the host refuses.
    """
    with (
        wall("loopback", USERNS_FIX),
        socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener,
        socket.socket(fileno=os.dup(hand)) as receiver,
    ):
        request = struct.pack(f"={_NAME_BYTES}sH", b"lo", _UP)
        linux.syscall(
            "ioctl", listener.fileno(), _SIOCSIFFLAGS, ctypes.create_string_buffer(request, _REQUEST_BYTES)
        )
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        socket.send_fds(receiver, [b"\0"], [listener.fileno()])
