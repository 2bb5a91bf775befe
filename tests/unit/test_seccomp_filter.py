"""The system call filter, run by an interpreter of its own: also for machines that this is not."""

from __future__ import annotations

import errno
import socket
import struct

import pytest
from ringfence.sandbox.native import seccomp

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {
        "read": 0,
        "fork": 57,
        "clone": 56,
        "clone3": 435,
        "socket": 41,
        "socketpair": 53,
        "ioctl": 16,
        "mknodat": 259,
        "prlimit64": 302,
        "setrlimit": 160,
        "memfd_create": 319,
        "execve": 59,
        "openat": 257,
    },
    "aarch64": {
        "read": 63,
        "clone": 220,
        "clone3": 435,
        "socket": 198,
        "socketpair": 199,
        "ioctl": 29,
        "mknodat": 33,
        "prlimit64": 261,
        "setrlimit": 164,
        "memfd_create": 279,
        "execve": 221,
        "openat": 56,
    },
}
DENIED = {
    "x86_64": {
        "ptrace": 101,
        "mount": 165,
        "umount2": 166,
        "unshare": 272,
        "setns": 308,
        "bpf": 321,
        "keyctl": 250,
        "userfaultfd": 323,
        "perf_event_open": 298,
        "io_uring_setup": 425,
        "kexec_load": 246,
        "init_module": 175,
        "pivot_root": 155,
        "chroot": 161,
        "reboot": 169,
        "shmget": 29,
        "msgget": 68,
        "semget": 64,
        "fsopen": 430,
    },
    "aarch64": {
        "ptrace": 117,
        "mount": 40,
        "umount2": 39,
        "unshare": 97,
        "setns": 268,
        "bpf": 280,
        "keyctl": 219,
        "userfaultfd": 282,
        "perf_event_open": 241,
        "io_uring_setup": 425,
        "kexec_load": 104,
        "init_module": 105,
        "pivot_root": 41,
        "chroot": 51,
        "reboot": 142,
        "shmget": 194,
        "msgget": 186,
        "semget": 190,
        "fsopen": 430,
    },
}
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def judge(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the filter returns for one call."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, arch, 0, *padded)
    lines = list(struct.iter_unpack("=HBBI", program))
    position = accumulator = 0
    while True:
        code, yes, no, value = lines[position]
        position += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            taken = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
                code
            ]
            position += yes if taken else no


@pytest.fixture(params=sorted(ARCH))
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def ask(machine: str, name: str, *arguments: int, memfd: bool = True) -> int:
    number = {**NUMBERS[machine], **DENIED[machine]}[name]
    return judge(seccomp.program(memfd=memfd, machine=machine), ARCH[machine], number, *arguments)


def test_ordinary_calls_pass(machine: str) -> None:
    for name in ("read", "execve", "openat", "memfd_create"):
        assert ask(machine, name, 1, 2, 3) == ALLOW


def test_a_foreign_architecture_is_killed(machine: str) -> None:
    program = seccomp.program(machine=machine)
    others = {0x40000003, 0x40000028, *ARCH.values()} - {ARCH[machine]}
    assert {judge(program, other, 0) for other in others} == {KILL}
    if machine == "x86_64":
        assert judge(program, ARCH[machine], 0x40000000 | 59) == KILL


@pytest.mark.parametrize("name", sorted(DENIED["x86_64"]))
def test_calls_that_give_new_ground_fail(machine: str, name: str) -> None:
    assert ask(machine, name, 1, 2, 3, 4, 5, 6) == ERROR | errno.EPERM


def test_clone_makes_no_namespace(machine: str) -> None:
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(machine, "clone", flag | 17) == ERROR | errno.EPERM
    threads = 0x3D0F00
    assert ask(machine, "clone", threads) == ALLOW
    assert ask(machine, "clone", 17) == ALLOW
    assert ask(machine, "clone3") == ERROR | errno.ENOSYS


def test_only_unix_sockets(machine: str) -> None:
    for name in ("socket", "socketpair"):
        assert ask(machine, name, socket.AF_UNIX, 1, 0) == ALLOW
        # The kernel looks at the low half only, and so must the filter.
        assert ask(machine, name, 1 << 32 | socket.AF_UNIX) == ALLOW
        for family in (0, socket.AF_INET, socket.AF_INET6, 16, 17, 38, 40, 1 << 32 | socket.AF_INET):
            assert ask(machine, name, family) == ERROR | errno.EAFNOSUPPORT


def test_no_input_is_pushed_into_terminals(machine: str) -> None:
    assert ask(machine, "ioctl", 0, 0x5401) == ALLOW
    for request in (0x5412, 0x541C, 1 << 32 | 0x5412):
        assert ask(machine, "ioctl", 0, request) == ERROR | errno.EPERM


def test_no_devices_are_made(machine: str) -> None:
    for kind in (0o020000, 0o060000):
        assert ask(machine, "mknodat", 0, 0, kind | 0o600) == ERROR | errno.EPERM
    for kind in (0o010000, 0o100000, 0o140000):
        assert ask(machine, "mknodat", 0, 0, kind | 0o600) == ALLOW


def test_the_limit_of_core_files_stays(machine: str) -> None:
    assert ask(machine, "setrlimit", 4) == ERROR | errno.EPERM
    assert ask(machine, "setrlimit", 7) == ALLOW
    assert ask(machine, "prlimit64", 0, 4, 0, 0x1000) == ALLOW
    assert ask(machine, "prlimit64", 0, 7, 0x1000, 0) == ALLOW
    for pointer in (0x1000, 1 << 40, (1 << 40) + 8):
        assert ask(machine, "prlimit64", 0, 4, pointer, 0) == ERROR | errno.EPERM


def test_memory_files_only_where_they_are_counted(machine: str) -> None:
    assert ask(machine, "memfd_create", memfd=True) == ALLOW
    assert ask(machine, "memfd_create", memfd=False) == ERROR | errno.ENOSYS


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(KeyError):
        seccomp.program(machine="riscv64")
