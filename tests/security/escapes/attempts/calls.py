"""Attempts on the machine's kernel itself, by calls that open new ground or new attack surface."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import struct
from collections.abc import Callable
from typing import Any

from security.escapes.attempts import base
from security.escapes.attempts.base import (
    MARKED,
    REACHES,
    add,
    attempt,
    call,
    child,
    first,
    libc,
    mount_points,
    pack,
)

FILTER = ("seccomp filter",)
X86_ONLY = ("x86_64",)
_BAD = 1  # an address where nothing is


def _call(
    name: str,
    text: str,
    *arguments: Any,
    control: str = "works",
    call_name: str = "",
    more: tuple[str, ...] = (),
    **how: Any,
) -> None:
    def run(_facts: Any) -> str:
        return str(call(call_name or name, *arguments))

    add(name, run, (*FILTER, *more), what=text, control=control, **how)


# -- keys, tracing, asynchronous calls ------------------------------------------------------------------------------------


@attempt(*FILTER)
def add_key(facts: Any) -> str:
    """Put a key into a keyring, which no process owns"""
    return str(call("add_key", b"user", b"planted", b"x", 1, -1))


_call(
    "request_key",
    "Ask for a key, which may start a program of the host",
    b"user",
    b"none",
    None,
    0,
    control=REACHES,
)
_call("keyctl", "Read a keyring that is shared by all processes of a uid", 0, -4, 1)
_call("bpf", "Load a program into the kernel", 0, bytes(4096 + 8), 4096 + 8, control=REACHES)
_call(
    "perf_event_open",
    "Count events of the processor",
    pack("=IIQQQQQ", 1, 112, 0, 0, 0, 0, 0x62) + bytes(64),
    0,
    -1,
    -1,
    0,
)
_call("io_uring_setup", "Open a ring, whose calls no filter sees", 8, bytes(120))
_call("userfaultfd", "Hold the kernel in a page fault", 1)
_call("memfd_secret", "Make memory that not even the kernel may read", 0, control="either")
_call("fanotify_init", "Watch a whole file system", 0x200, 0)


@attempt(*FILTER)
def name_to_handle(facts: Any) -> str:
    """Get the handle of a file"""
    handle = ctypes.create_string_buffer(pack("=Ii", 128, 0) + bytes(128), 136)
    return str(call("name_to_handle_at", -100, b"/tmp", handle, ctypes.create_string_buffer(8), 0))


_call("open_by_handle_at", "Open a file anywhere by a guessed handle", -100, _BAD, 0, control=REACHES)
_call("quotactl", "Change quotas", 0x7FFFFFFF, None, 0, None, control=REACHES)
_call("quotactl_fd", "Change quotas by a descriptor", 0, 0x7FFFFFFF, 0, None, control=REACHES)
_call("swapon", "Add swap", b"/tmp", 0x40000000, control=REACHES)
_call("swapoff", "Take swap away", b"/tmp", control=MARKED)
_call("reboot", "Restart the machine", 0, 0, 0, None, control=REACHES, more=("capabilities",))
_call("kexec_load", "Load another kernel", 0, 0, None, 0, control=MARKED)
_call("kexec_file_load", "Load another kernel from a file", -1, -1, 0, None, 0, control=MARKED)
_call("init_module", "Load a module", None, 0, b"", control=MARKED)
_call("finit_module", "Load a module from a file", -1, b"", 0, control=MARKED)
_call("delete_module", "Remove a module", b"none", 0, control=MARKED)
_call("acct", "Have every process of the machine recorded in a file", b"/tmp/acct", control=MARKED)
_call("syslog", "Read the kernel's log", 10, None, 0, control=MARKED)
_call("settimeofday", "Set the clock", _BAD, None, control=REACHES)
_call("clock_settime", "Set a clock", 0, _BAD, control=REACHES)
_call("adjtimex", "Steer the clock", bytes(256))
_call("clock_adjtime", "Steer a clock", 0, bytes(256))
_call("vhangup", "Hang up the terminal", control=MARKED)
_call("get_mempolicy", "Learn where memory lies", None, None, 0, None, 0, control="either")
_call("set_mempolicy", "Choose where memory lies", 0, None, 0, control="either")
_call("mbind", "Choose where pages lie", 0, 0, 0, None, 0, 0, control="either")
_call("migrate_pages", "Move pages of a process", 0, 0, None, None, control="either")
_call("move_pages", "Learn where pages of a process lie", 0, 0, None, None, None, 0, control="either")
_call("set_mempolicy_home_node", "Choose where memory starts", 0, 0, 0, 0, control="either")
_call("personality", "Make all memory executable", 0x0400000)
_call("no_randomisation", "Have later programs loaded at fixed addresses", 0x0040000, call_name="personality")

_call("iopl", "Touch the machine's ports", 4, control=REACHES, machines=X86_ONLY)
_call("ioperm", "Touch one of the machine's ports", 0xFFFF, 0xFFFF, 1, control=REACHES, machines=X86_ONLY)
_call("modify_ldt", "Make a segment of its own", 0, bytes(64), 64, machines=X86_ONLY)


# -- devices ----------------------------------------------------------------------------------------------------------------


def _device(name: str, text: str, kind: int, device: int) -> None:
    def run(_facts: Any) -> str:
        call("mknodat", -100, f"/tmp/{name}".encode(), kind | 0o600, device)
        return f"/tmp/{name}"

    add(name, run, FILTER, control=MARKED, what=text)


_device("block_device", "Make a node of the machine's disk", 0o060000, 0xFE00)
_device("char_device", "Make a node of the machine's memory", 0o020000, 0x0101)
# One that Linux gives to everybody, and that an overlay takes for a deletion.
add(
    "whiteout_device",
    lambda _facts: str(call("mknodat", -100, b"/tmp/whiteout", 0o020000, 0)),
    (*FILTER, "landlock"),
    what="Forge a deletion of an overlay",
)


_NODES = [
    "mem",
    "kmem",
    "port",
    "kmsg",
    "vda",
    "sda",
    "nvme0n1",
    "tty",
    "tty0",
    "console",
    "ptmx",
    "fuse",
    "kvm",
    "net/tun",
    "loop-control",
    "uinput",
    "vhost-net",
]


@attempt("private root", "landlock")
def device_files(facts: Any) -> str:
    """Open the machine's memory, disks, terminals or other devices"""
    # Terminals of its own are none of the machine's; a container has such.
    own = ("/dev/ptmx",) if "/dev/pts" in mount_points() else ()
    nodes = [f"{top}/dev/{name}" for top in ("", "/host") for name in _NODES]
    return first(*[_open_node(node) for node in nodes if node not in own])


def _open_node(path: str) -> Callable[[], str]:
    def act() -> str:
        os.close(os.open(path, os.O_RDWR | os.O_NOCTTY))
        return path

    return act


def _terminal(name: str, text: str, request: int, argument: bytes) -> None:
    def run(_facts: Any) -> str:
        # Not a terminal, says Linux, where the filter lets it see the call.
        fcntl.ioctl(0, request, bytearray(argument))
        return "typed"

    add(name, run, FILTER, control=REACHES, what=text)


_terminal("terminal_input", "Type into the operator's terminal by TIOCSTI", 0x5412, b"x")
_terminal("terminal_paste", "Paste into the operator's terminal by TIOCLINUX", 0x541C, b"\x03")


# -- other doors into the kernel ------------------------------------------------------------------------------------------


def _machine_code(code: bytes) -> int:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)()


@attempt(*FILTER, machines=X86_ONLY, control="either")
def call_of_i386(facts: Any) -> str:
    """Call by the numbers of i386, which mean other calls"""
    got = _machine_code(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))
    if got != os.getpid():
        raise OSError(errno.ENOSYS, "no such door")
    return str(got)


@attempt(*FILTER, machines=X86_ONLY, control="either")
def call_of_x32(facts: Any) -> str:
    """Call by the numbers of x32"""
    got = libc.syscall(ctypes.c_long(0x40000000 + 39))
    if got < 0:
        raise base.fail(ctypes.get_errno())
    return str(got)


@attempt(*FILTER)
def loosen_filter(facts: Any) -> str:
    """Install a filter of its own that allows everything, then call what the first one refuses"""
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
    header = struct.pack("=HxxxxxxQ", 1, ctypes.addressof(code))
    call("seccomp", 1, 0, header)
    return str(call("unshare", 0x10000000))


@attempt(*FILTER)
def answer_own_calls(facts: Any) -> str:
    """Install a filter that asks its owner, and let a refused call go on by it"""
    number = 272 if base.X86 else 97
    lines = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x7FC00000), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    header = struct.pack("=HxxxxxxQ", len(lines), ctypes.addressof(code))
    read_end, write_end = os.pipe()

    def ask() -> None:
        result = libc.syscall(ctypes.c_long(number), ctypes.c_long(0x10000000))
        os.write(write_end, str(ctypes.get_errno() if result < 0 else 0).encode())

    def own() -> None:
        listener = call("seccomp", 1, 8, header)
        inner = child(ask)
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        # Where a stricter filter refuses, the question never comes.
        while not any(event & select.POLLIN for _, event in poll.poll(50)):
            if os.waitpid(inner, os.WNOHANG)[0]:
                return
        notice = bytearray(80)
        fcntl.ioctl(listener, 0xC0502100, notice)
        answer = bytearray(struct.pack("=QqiI", int.from_bytes(notice[:8], "little"), 0, 0, 1))
        fcntl.ioctl(listener, 0xC0182101, answer)
        os.waitpid(inner, 0)

    pid = child(own)
    os.close(write_end)
    seen = os.read(read_end, 10)
    os.waitpid(pid, 0)
    if seen == b"0":
        return "continued"
    raise OSError(int(seen or b"0") or errno.EPERM, "refused")


@attempt("landlock", "read-only mounts", kind="program")
def loosen_landlock(facts: Any) -> str:
    """Lay a Landlock ruleset that allows everything over the sandbox's own, then write"""
    attributes = struct.pack("=Q", 0x1FFF)
    ruleset = call("landlock_create_ruleset", attributes, len(attributes), 0)
    top = os.open("/", os.O_PATH)
    call("landlock_add_rule", ruleset, 1, struct.pack("=Qi", 0x1FFF, top), 0)
    call("landlock_restrict_self", ruleset, 0)
    os.close(os.open("/program/loosened", os.O_CREAT | os.O_WRONLY))
    return "/program/loosened"


@attempt("landlock", "read-only mounts", kind="program")
def use_up_landlock(facts: Any) -> str:
    """Stack Landlock rulesets until no more fit, then write"""
    attributes = struct.pack("=Q", 1 << 12)
    layers = 0
    try:
        for _ in range(64):
            ruleset = call("landlock_create_ruleset", attributes, len(attributes), 0)
            call("landlock_restrict_self", ruleset, 0)
            os.close(ruleset)
            layers += 1
    except OSError as error:
        if error.errno not in (errno.E2BIG, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    os.close(os.open("/program/used-up", os.O_CREAT | os.O_WRONLY))
    return f"{layers} layers"
