"""The system call filter, run by an interpreter of its own: also for machines that this is not."""

from __future__ import annotations

import errno
import re
import shutil
import socket
import struct
import subprocess

import pytest
from ringfence.sandbox.native import calls, confine, seccomp

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
        elif code == 0x54:
            accumulator &= value
        else:
            taken = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
                code
            ]
            position += yes if taken else no


TABLES = {"x86_64": calls.X86_64, "aarch64": calls.AARCH64}
LISTS = {"allowed": calls.ALLOWED, "ruled": calls.RULED, "refused": calls.REFUSED, "absent": calls.ABSENT}
# Newer than Linux 6.1: what was decided about each, so that no change of it goes unseen.
NEW = {
    "cachestat": errno.ENOSYS,
    "fchmodat2": 0,
    "map_shadow_stack": 0,
    "futex_wake": errno.ENOSYS,
    "futex_wait": errno.ENOSYS,
    "futex_requeue": errno.ENOSYS,
    "statmount": errno.ENOSYS,
    "listmount": errno.ENOSYS,
    "lsm_get_self_attr": errno.ENOSYS,
    "lsm_set_self_attr": errno.ENOSYS,
    "lsm_list_modules": errno.ENOSYS,
    "mseal": 0,
    "setxattrat": 0,
    "getxattrat": 0,
    "listxattrat": 0,
    "removexattrat": 0,
    "open_tree_attr": errno.EPERM,
    "file_getattr": errno.ENOSYS,
    "file_setattr": errno.ENOSYS,
}
NOT_ON_AARCH64 = "uretprobe uprobe fork open ioperm modify_ldt arch_prctl mknod"


@pytest.fixture(params=sorted(ARCH))
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def ask(machine: str, name: str, *arguments: int, memfd: bool = True, tcp: bool = False) -> int:
    number = {**NUMBERS[machine], **DENIED[machine]}[name]
    program = seccomp.program(memfd=memfd, tcp=tcp, machine=machine)
    return judge(program, ARCH[machine], number, *arguments)


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


def test_with_doors_tcp_and_nothing_else(machine: str) -> None:
    no_protocol, no_family = ERROR | errno.EPROTONOSUPPORT, ERROR | errno.EAFNOSUPPORT
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    for kind in (1, 1 | flags, 1 << 32 | 1):
        for protocol in (0, socket.IPPROTO_TCP):
            assert ask(machine, "socket", socket.AF_INET, kind, protocol, tcp=True) == ALLOW
        for protocol in (socket.IPPROTO_UDP, 132, 262, 1 << 32 | 262):
            assert ask(machine, "socket", socket.AF_INET, kind, protocol, tcp=True) == no_protocol
    for kind in (0, 2, 3, 5, 10, 2 | flags, 17):
        assert ask(machine, "socket", socket.AF_INET, kind, 0, tcp=True) == (
            ALLOW if kind & 0xF == 1 else no_protocol
        )
    for family in (0, socket.AF_INET6, 16, 17, 38, 40, 1 << 32 | socket.AF_INET6):
        assert ask(machine, "socket", family, 1, 0, tcp=True) == no_family
    assert ask(machine, "socket", socket.AF_UNIX, 2, 0, tcp=True) == ALLOW
    assert ask(machine, "socketpair", socket.AF_INET, 1, 0, tcp=True) == no_family
    # All else is as without doors.
    for number in range(600):
        if number != NUMBERS[machine]["socket"]:
            with_doors, without = (seccomp.program(tcp=tcp, machine=machine) for tcp in (True, False))
            assert judge(with_doors, ARCH[machine], number, 2, 2, 2) == judge(
                without, ARCH[machine], number, 2, 2, 2
            )


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


def test_every_call_is_decided_about_once() -> None:
    names = {name for table in TABLES.values() for name in calls.numbers(table)}
    assert set().union(*LISTS.values()) == names
    assert sum(len(listed) for listed in LISTS.values()) == len(names)
    assert not set(NOT_ON_AARCH64.split()) & set(calls.numbers(calls.AARCH64))


def test_every_number_gets_the_verdict_of_its_name(machine: str) -> None:
    numbers = calls.numbers(TABLES[machine])
    names = {number: name for name, number in numbers.items()}
    assert len(names) == len(numbers)
    wanted = {"allowed": ALLOW, "refused": ERROR | errno.EPERM, "absent": ERROR | errno.ENOSYS}
    program = seccomp.program(machine=machine)
    beyond = [0x3FFFFFFF, *(1 << bit for bit in range(10, 30))]
    seen: set[str] = set()
    for number in [*range(1024), *beyond]:
        name = names.get(number, "")
        kind = next((kind for kind, listed in LISTS.items() if name in listed), "absent")
        if kind == "ruled":
            continue
        seen.add(name)
        for word in (0, 1, (1 << 64) - 1):
            assert judge(program, ARCH[machine], number, *[word] * 6) == wanted[kind], (number, name)
    assert seen == {"", *numbers} - calls.RULED


def test_a_number_with_the_bit_of_another_calling_convention_never_passes(machine: str) -> None:
    program = seccomp.program(machine=machine)
    for bit in (30, 31):
        for number in (0, 1, 56, 59, 512, 0xFFFF):
            assert judge(program, ARCH[machine], 1 << bit | number) in (KILL, ERROR | errno.ENOSYS)


def test_calls_newer_than_linux_6_1_are_decided_about(machine: str) -> None:
    newer = {name: number for name, number in calls.numbers(TABLES[machine]).items() if number > 450}
    assert set(newer) == set(NEW)
    program = seccomp.program(machine=machine)
    found = {name: judge(program, ARCH[machine], number) for name, number in newer.items()}
    assert found == {name: ERROR | error if error else ALLOW for name, error in NEW.items()}


def test_the_filter_is_well_formed(machine: str) -> None:
    for memfd, tcp in ((True, False), (False, False), (False, True)):
        lines = list(struct.iter_unpack("=HBBI", seccomp.program(memfd=memfd, tcp=tcp, machine=machine)))
        assert len(lines) <= 4096
        assert lines[-1][0] == 0x06
        for position, (code, yes, no, value) in enumerate(lines):
            assert code in (0x20, 0x15, 0x35, 0x45, 0x06, 0x54)
            if code in (0x15, 0x35, 0x45):
                assert position + 1 + max(yes, no) < len(lines)
            elif code == 0x20:
                assert value < 64
                assert value % 4 == 0


_ARM = "RENAMEAT NEW_STAT SET_GET_RLIMIT TIME32_SYSCALLS SYS_CLONE3 MEMFD_SECRET"
HEADERS = {
    "x86_64": ["-include", "asm/unistd_64.h"],
    "aarch64": [
        *("-include", "asm-generic/unistd.h", "-D__BITS_PER_LONG=64"),
        *(f"-D__ARCH_WANT_{name}" for name in _ARM.split()),
    ],
}


def test_the_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler to read the kernel headers with")
    done = subprocess.run(
        [compiler, "-E", "-dM", *HEADERS[machine], "-x", "c", "-"],
        check=False,
        input="",
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        pytest.skip("the kernel headers of this machine are not installed")
    defined = dict(re.findall(r"^#define (__NR\w+) (\w+)$", done.stdout, re.MULTILINE))
    found: dict[str, int] = {}
    for name in defined:
        value = name
        while not value.isdigit():
            value = defined[value]
        found[name.removeprefix("__NR_")] = int(value)
    known = calls.numbers(TABLES[machine])
    checked = {name: found[name] for name in known.keys() & found.keys()}
    assert len(checked) > 290
    assert checked == {name: known[name] for name in checked}
    # A header as new as this table knows no call that is missing in it.
    missing = {name for name, number in found.items() if number <= 469} - known.keys()
    assert {
        name for name in missing if not name.startswith(("__NR3264", "syscalls", "arch_specific"))
    } == set()


def test_no_sandbox_makes_a_filter_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zygote has made them before it forks: to make one takes longer than all else that a first process does."""
    installed: list[bytes] = []
    monkeypatch.setattr(seccomp, "install", installed.append)
    monkeypatch.setattr(confine, "_bound", lambda *_: None)
    seccomp.prepare()
    made = seccomp._made.cache_info().misses
    for memfd in (False, True):
        confine.filter_calls(memfd=memfd)
        confine.filter_calls(memfd=memfd, tcp=False)
        confine.filter_calls(memfd=memfd, tcp=True)
    assert seccomp._made.cache_info().misses == made
    assert len(set(installed)) == 4
