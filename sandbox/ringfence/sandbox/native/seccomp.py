"""The system call filter, as classic BPF made by hand: no library, no compiler.

It lets through what `calls.ALLOWED` lists, and of `calls.RULED` what makes no namespace, no device, no input for a terminal
and no socket that is not AF_UNIX; where the sandbox has doors on its loopback, also plain TCP. Everything else is refused, what Linux brings later included. Foreign architectures are
killed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import resource
import socket
import struct

from ringfence.sandbox.native import calls, linux

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
_ARGUMENT_BYTES = 8
_X32_BIT = 0x40000000
_NAMESPACE_FLAGS = 0x7E020000
"""All CLONE_NEW* that plain clone knows."""
_DEVICE_BIT = 0o020000
"""Set in the type of character and block devices, in no other."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SECCOMP_SET_MODE_FILTER = 1
_SOCKET_TYPE = 0xF
"""Of the second argument of socket; the rest of it are flags."""


class _Machine:
    """What of the filter differs between architectures."""

    def __init__(self, audit: int, table: str) -> None:
        self.audit = audit
        self.table = table


_MACHINES = {
    "x86_64": _Machine(0xC000003E, calls.X86_64),
    "aarch64": _Machine(0xC00000B7, calls.AARCH64),
}


class _Program:
    """Assembles the filter. Every test loads the number anew, so that no test depends on another."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int]] = []

    def emit(self, code: int, value: int, yes: int = 0, no: int = 0) -> None:
        self._code.append((code, yes, no, value))

    def refuse(self, number: int, error: int) -> None:
        """This call fails with `error`."""
        self.emit(_EQUAL, number, 0, 1)
        self.emit(_RETURN, _ERRNO | error)

    def refuse_when(self, number: int, argument: int, tests: list[tuple[int, int]], error: int) -> None:
        """This call fails with `error` when the low half of an argument meets one of `tests` (opcode, value)."""
        self.emit(_EQUAL, number, 0, 2 * len(tests) + 2)
        self.emit(_LOAD, _ARGUMENT + argument * _ARGUMENT_BYTES)
        for code, value in tests:
            self.emit(code, value, 0, 1)
            self.emit(_RETURN, _ERRNO | error)
        self.emit(_LOAD, _NUMBER)

    def refuse_unless(self, number: int, argument: int, value: int, error: int) -> None:
        """This call fails with `error` unless the low half of an argument is `value`."""
        self.emit(_EQUAL, number, 0, 4)
        self.emit(_LOAD, _ARGUMENT + argument * _ARGUMENT_BYTES)
        self.emit(_EQUAL, value, 1, 0)
        self.emit(_RETURN, _ERRNO | error)
        self.emit(_LOAD, _NUMBER)

    def refuse_sockets_but_tcp(self, number: int) -> None:
        """This call makes sockets of AF_UNIX, and TCP over IPv4 and nothing else: no UDP, no raw one, no MPTCP."""
        self.emit(_EQUAL, number, 0, 13)
        self.emit(_LOAD, _ARGUMENT)
        self.emit(_EQUAL, socket.AF_UNIX, 10, 0)
        self.emit(_EQUAL, socket.AF_INET, 1, 0)
        self.emit(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
        self.emit(_LOAD, _ARGUMENT + _ARGUMENT_BYTES)
        self.emit(_AND, _SOCKET_TYPE)
        self.emit(_EQUAL, socket.SOCK_STREAM, 1, 0)
        self.emit(_RETURN, _ERRNO | errno.EPROTONOSUPPORT)
        self.emit(_LOAD, _ARGUMENT + 2 * _ARGUMENT_BYTES)
        self.emit(_EQUAL, 0, 2, 0)
        self.emit(_EQUAL, socket.IPPROTO_TCP, 1, 0)
        self.emit(_RETURN, _ERRNO | errno.EPROTONOSUPPORT)
        self.emit(_LOAD, _NUMBER)

    def refuse_new_limit(self, number: int, which: int, error: int) -> None:
        """Prlimit64 fails with `error` when it would set the limit `which`; reading it stays possible."""
        self.emit(_EQUAL, number, 0, 8)
        self.emit(_LOAD, _ARGUMENT + _ARGUMENT_BYTES)
        self.emit(_EQUAL, which, 0, 5)
        self.emit(_LOAD, _ARGUMENT + 2 * _ARGUMENT_BYTES)
        self.emit(_EQUAL, 0, 0, 2)
        self.emit(_LOAD, _ARGUMENT + 2 * _ARGUMENT_BYTES + 4)
        self.emit(_EQUAL, 0, 1, 0)
        self.emit(_RETURN, _ERRNO | error)
        self.emit(_LOAD, _NUMBER)

    def verdicts(self, by_number: dict[int, int]) -> None:
        """Return the verdict of the number; of one that is in no table ENOSYS."""
        ends: list[tuple[int, int]] = []
        for number in range(max(by_number) + 1):
            verdict = by_number.get(number, _ERRNO | errno.ENOSYS)
            if ends and ends[-1][1] == verdict:
                ends.pop()
            ends.append((number + 1, verdict))
        for end, verdict in ends:
            self.emit(_AT_LEAST, end, 1, 0)
            self.emit(_RETURN, verdict)
        self.emit(_RETURN, _ERRNO | errno.ENOSYS)

    def bytes(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *line) for line in self._code)


def supported() -> bool:
    """Whether there is a table for this machine."""
    return linux.MACHINE in _MACHINES


def prepare() -> None:
    """Make all filters for this machine, once for every process that is forked from here."""
    if supported():
        for memfd, tcp in itertools.product((False, True), repeat=2):
            program(memfd=memfd, tcp=tcp)


def program(*, memfd: bool = True, tcp: bool = False, machine: str = linux.MACHINE) -> bytes:
    """The filter for `machine`.

    Args:
        memfd: whether memfd_create may be called. It may where a cgroup counts its memory; otherwise such memory
            belongs to no process that could be measured.
        tcp: whether TCP sockets may be made. They may where the sandbox has doors on its loopback, the only device there.
        machine: name as `uname -m` prints it.

    Raises:
        KeyError: no table for this machine.
    """
    return _made(memfd, tcp, machine)


@functools.cache  # by place: by name, what is left out and what is named would be two
def _made(memfd: bool, tcp: bool, machine: str) -> bytes:
    here = _MACHINES[machine]
    numbers = calls.numbers(here.table)
    code = _Program()
    code.emit(_LOAD, _ARCH)
    code.emit(_EQUAL, here.audit, 1, 0)
    code.emit(_RETURN, _KILL)
    code.emit(_LOAD, _NUMBER)
    if machine == "x86_64":
        code.emit(_AT_LEAST, _X32_BIT, 0, 1)
        code.emit(_RETURN, _KILL)
    # The flags of clone3 lie in memory that a filter can't read; with ENOSYS libc falls back to clone.
    code.refuse(numbers["clone3"], errno.ENOSYS)
    code.refuse_when(numbers["clone"], 0, [(_ANY_BIT, _NAMESPACE_FLAGS)], errno.EPERM)
    if tcp:
        code.refuse_sockets_but_tcp(numbers["socket"])
    else:
        code.refuse_unless(numbers["socket"], 0, socket.AF_UNIX, errno.EAFNOSUPPORT)
    code.refuse_unless(numbers["socketpair"], 0, socket.AF_UNIX, errno.EAFNOSUPPORT)
    code.refuse_when(numbers["ioctl"], 1, [(_EQUAL, _TIOCSTI), (_EQUAL, _TIOCLINUX)], errno.EPERM)
    code.refuse_when(numbers["mknodat"], 2, [(_ANY_BIT, _DEVICE_BIT)], errno.EPERM)
    if "mknod" in numbers:
        code.refuse_when(numbers["mknod"], 1, [(_ANY_BIT, _DEVICE_BIT)], errno.EPERM)
    # Whoever may lower the limit of core files to zero has the host's core_pattern run on its memory.
    code.refuse_when(numbers["setrlimit"], 0, [(_EQUAL, resource.RLIMIT_CORE)], errno.EPERM)
    code.refuse_new_limit(numbers["prlimit64"], resource.RLIMIT_CORE, errno.EPERM)
    if not memfd:
        code.refuse(numbers["memfd_create"], errno.ENOSYS)
    code.verdicts({number: _verdict(name) for name, number in numbers.items()})
    return code.bytes()


def _verdict(name: str) -> int:
    if name in calls.ALLOWED or name in calls.RULED:
        return _ALLOW
    return _ERRNO | (errno.ENOSYS if name in calls.ABSENT else errno.EPERM)


def install(filter_program: bytes) -> None:
    """Put the filter on this process for good. Needs no_new_privs.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = struct.pack("=HxxxxxxQ", len(filter_program) // 8, ctypes.addressof(buffer))
    linux.syscall("seccomp", _SECCOMP_SET_MODE_FILTER, 0, header)
