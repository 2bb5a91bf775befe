"""The host as attempts find it: a process with a secret, listeners, shared memory, a queue. Ends with its standard input.

Started with a token on its command line; says what there is as one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {"x86_64": (29, 30, 31, 240, 241), "aarch64": (194, 196, 195, 180, 181)}
_SHMGET, _SHMAT, _SHMCTL, _MQ_OPEN, _MQ_UNLINK = _NUMBERS[os.uname().machine]


def answer(server: socket.socket, canary: bytes) -> None:
    while True:
        with suppress(OSError):
            if server.type == socket.SOCK_STREAM:
                connection, _ = server.accept()
                connection.sendall(canary)
                connection.close()
            else:
                data, sender = server.recvfrom(4096)
                if data and sender:
                    server.sendto(canary, sender)


def listen(family: int, kind: int, address: Any, canary: bytes) -> socket.socket:
    server = socket.socket(family, kind)
    server.bind(address)
    if kind == socket.SOCK_STREAM:
        server.listen()
    threading.Thread(target=answer, args=(server, canary), daemon=True).start()
    return server


def main(place: Path, canary: str) -> None:
    data = canary.encode()
    name = f"ringfence-{os.getpid()}-{os.urandom(4).hex()}"
    held = ctypes.create_string_buffer(data, 200)
    listen(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + name, data)
    listen(socket.AF_UNIX, socket.SOCK_DGRAM, "\0" + name + "-d", data)
    listen(socket.AF_UNIX, socket.SOCK_STREAM, str(place / "operator.sock"), data)
    (place / "operator.sock").chmod(0o777)
    tcp = listen(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0), data)
    udp = listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0), data)
    memory = libc.syscall(_SHMGET, 0, 4096, 0o1644)
    if memory >= 0:
        # Attached and removed at once: it lives as long as this process, and no longer.
        libc.syscall(_SHMAT, memory, None, 0)
        libc.syscall(_SHMCTL, memory, 0, None)
    queue = f"ringfence-{os.urandom(4).hex()}"
    os.umask(0)
    libc.syscall(_MQ_OPEN, queue.encode(), os.O_CREAT | os.O_RDWR, 0o644, None)
    os.umask(0o022)
    posix_memory = Path("/dev/shm") / f"ringfence-{os.urandom(4).hex()}"
    posix_memory.write_text(canary)
    os.chdir(place)
    facts = {
        "victim_pid_here": os.getpid(),
        "victim_pid": os.getpid(),
        "victim_address": ctypes.addressof(held),
        "abstract": name,
        "abstract_datagram": name + "-d",
        "socket": str(place / "operator.sock"),
        "tcp": tcp.getsockname()[1],
        "udp": udp.getsockname()[1],
        "shm": memory,
        "mq": queue,
        "host_name": os.uname().nodename,
        "posix_memory": str(posix_memory),
    }
    print(json.dumps(facts), flush=True)
    try:
        sys.stdin.read()
    finally:
        posix_memory.unlink()
        libc.syscall(_MQ_UNLINK, queue.encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["CANARY"])
