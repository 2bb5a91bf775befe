"""Attempts to talk to anyone: sockets of every family, the host's listeners, other agents, shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from security.escapes.attempts.base import MARKED, REACHES, Stopped, add, attempt, call, connect

FILTER = ("seccomp filter",)
NET = (*FILTER, "network namespace")
_KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET, 4, 6, 10)
_FAMILIES_MAX = 46
_VSOCK, _ALG = 40, 38


def _opened(family: int, kind: int, protocol: int = 0) -> str:
    with socket.socket(family, kind, protocol) as made:
        return str(made.family)


def _family(name: str, text: str, tries: Callable[[], str], *more: str, **how: Any) -> None:
    add(name, lambda _facts: tries(), (*FILTER, *more), what=text, **how)


_family("inet_socket", "Open an IPv4 socket", lambda: _opened(socket.AF_INET, socket.SOCK_STREAM))
_family("inet6_socket", "Open an IPv6 socket", lambda: _opened(socket.AF_INET6, socket.SOCK_DGRAM))
_family("netlink_socket", "Open a netlink socket", lambda: _opened(socket.AF_NETLINK, socket.SOCK_RAW))
_family(
    "packet_socket",
    "Open a packet socket",
    lambda: _opened(socket.AF_PACKET, socket.SOCK_RAW),
    "capabilities",
)
_family(
    "raw_socket", "Open a raw IP socket", lambda: _opened(socket.AF_INET, socket.SOCK_RAW, 1), "capabilities"
)
# Their modules may be absent, and then Linux itself says that there is no such family.
_family(
    "vsock_socket",
    "Open a socket to the hypervisor",
    lambda: _opened(_VSOCK, socket.SOCK_STREAM),
    control=MARKED,
)
_family(
    "alg_socket",
    "Open a socket to the kernel's ciphers",
    lambda: _opened(_ALG, socket.SOCK_SEQPACKET),
    control=MARKED,
)


@attempt(*FILTER)
def socket_of_any_family(facts: Any) -> str:
    """Open a socket of any family from 0 to 45 but unix, of any kind"""
    won = []
    for family in range(_FAMILIES_MAX):
        if family == socket.AF_UNIX:
            continue
        for kind in _KINDS:
            with suppress(OSError):
                socket.socket(family, kind).close()
                won.append((family, kind))
    if not won:
        raise Stopped("none")
    return str(won)


@attempt(*FILTER)
def family_hidden_in_high_bits(facts: Any) -> str:
    """Hide the family in a number whose upper half a filter may not look at"""
    # Linux takes an int: what is above its 32 bits is dropped, before or after the filter has looked.
    os.close(_raw_socket((1 << 32) | socket.AF_INET))
    return "inet"


def _raw_socket(family: int) -> int:
    import ctypes

    from security.escapes.attempts import base

    number = 41 if base.X86 else 198
    got = base.libc.syscall(ctypes.c_long(number), ctypes.c_long(family), ctypes.c_long(1), ctypes.c_long(0))
    if got < 0:
        raise base.fail(ctypes.get_errno())
    return got


@attempt(*NET, "landlock")
def host_over_tcp(facts: Any) -> str:
    """Connect to a listener on the host's loopback"""
    return connect(("127.0.0.1", facts["tcp"]), socket.AF_INET)


@attempt(*NET)
def host_over_udp(facts: Any) -> str:
    """Ask a name server on the host's loopback"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        client.sendto(
            b"\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04exfi\x04test\x00\x00\x01\x00\x01",
            ("127.0.0.1", facts["udp"]),
        )
        return client.recv(100).decode()


@attempt(*FILTER, control=REACHES)
def cloud_metadata(facts: Any) -> str:
    """Connect to the metadata service of a cloud"""
    with socket.socket() as client:
        client.settimeout(2)
        client.connect(("169.254.169.254", 80))
    return "connected"


@attempt("network namespace", "landlock")
def host_abstract_socket(facts: Any) -> str:
    """Connect to an abstract socket of the host or of another agent"""
    return connect("\0" + facts["abstract"])


@attempt("network namespace", "landlock")
def datagram_to_abstract_socket(facts: Any) -> str:
    """Send a datagram to an abstract socket of the host"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.sendto(b"from inside", "\0" + facts["abstract_datagram"])
    return "sent"


@attempt("network namespace")
def host_interfaces(facts: Any) -> str:
    """Read the host's network counters and addresses"""
    won = [name for name in ("unix", "tcp", "route", "arp", "dev") if _lines(f"/proc/net/{name}", facts)]
    if won:
        return str(won)
    raise Stopped("only its own")


def _lines(name: str, facts: Any) -> bool:
    with suppress(OSError), open(name) as file:
        text = file.read()
        return facts["abstract"] in text or f":{facts['tcp']:04X} " in text
    return False


# -- memory that is shared -----------------------------------------------------------------------------------------------


@attempt(*FILTER, "ipc namespace", user_control="works")
def host_shared_memory(facts: Any) -> str:
    """Attach System V memory of the host"""
    return str(call("shmat", facts["shm"], None, 0o10000))


@attempt(*FILTER)
def own_shared_memory(facts: Any) -> str:
    """Make System V memory, which outlives its process and is counted nowhere"""
    made = call("shmget", 0, 4096, 0o1600)
    call("shmctl", made, 0, None)
    return str(made)


@attempt(*FILTER)
def own_semaphores(facts: Any) -> str:
    """Make System V semaphores"""
    return str(call("semget", 0, 1, 0o1600))


@attempt(*FILTER)
def own_messages(facts: Any) -> str:
    """Make a System V message queue"""
    return str(call("msgget", 0, 0o1600))


@attempt("seccomp filter", "landlock", "ipc namespace")
def host_message_queue(facts: Any) -> str:
    """Open a POSIX message queue of the host"""
    return str(call("mq_open", facts["mq"].encode(), os.O_RDONLY, 0, None))


@attempt("private root")
def host_posix_memory(facts: Any) -> str:
    """Open POSIX shared memory of the host"""
    last: Exception = Stopped("none")
    for top in ("", "/host", "/proc/1/root", "/proc/self/root"):
        try:
            with open(f"{top}{facts['posix_memory']}", "rb") as file:
                return file.read(100).decode()
        except OSError as error:
            last = error
    raise last
