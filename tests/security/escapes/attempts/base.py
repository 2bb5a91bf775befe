"""What an attempt is, and how it is run: in a process of its own, inside a sandbox, with the standard library alone."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

PATIENCE_S = 20
WORKS, REACHES, MARKED = "works", "reaches", "marked"
MARK = errno.ENOANO


class Stopped(Exception):
    """A wall answered in another way than by an error of a system call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One way out that is tried.

    Attributes:
        name: in the tables, unique.
        run: tries it; returns what was won, raises OSError or `Stopped` when a wall stopped it.
        walls: those that stop it. The control takes all of them off, and nothing else.
        control: what the control shows. `works`: without the walls the attempt wins. `reaches`: without them the Linux
            kernel's own code answers, with another error. `marked`: the filter answers with a mark instead of its error,
            so the call was stopped by it and by nothing before it.
        user_walls: the walls where the sandbox has a user namespace, when they differ.
        user_control: the control where the sandbox has a user namespace, when it differs.
        kind: `program`, `command` or `both`.
        alone: it ends its sandbox when it works, so its control has a sandbox of its own.
        machines: architectures that have it; empty: all.
        needs: a path of the host without which there is nothing to try.
        what: one line for people.
    """

    name: str
    run: Callable[[Any], str]
    walls: tuple[str, ...]
    control: str = WORKS
    user_control: str = ""
    user_walls: tuple[str, ...] = ()
    kind: str = "both"
    alone: bool = False
    machines: tuple[str, ...] = ()
    needs: str = ""
    what: str = ""

    def walls_in(self, mode: str) -> frozenset[str]:
        """The walls in a mode."""
        return frozenset(self.user_walls if mode == "user" and self.user_walls else self.walls)

    def control_in(self, mode: str) -> str:
        """The kind of control in a mode."""
        return self.user_control if mode == "user" and self.user_control else self.control


TABLE: dict[str, Attempt] = {}


def attempt(*walls: str, **more: Any) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Enter a function into the table under its own name; its docstring is the line for people."""

    def enter(function: Callable[[Any], str]) -> Callable[[Any], str]:
        add(function.__name__, function, walls, what=(function.__doc__ or "").strip().rstrip("."), **more)
        return function

    return enter


def add(name: str, run: Callable[[Any], str], walls: tuple[str, ...], **more: Any) -> None:
    """Enter an attempt that is one of a family."""
    assert name not in TABLE, name
    TABLE[name] = Attempt(name=name, run=run, walls=walls, **more)


# -- system calls ---------------------------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
X86 = platform.machine() == "x86_64"
# fmt: off
_NUMBERS = {
    "ptrace": (101, 117), "syslog": (103, 116), "setns": (308, 268), "unshare": (272, 97), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, 0), "ioperm": (173, 0),
    "modify_ldt": (154, 0), "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "acct": (163, 89), "quotactl": (179, 60),
    "settimeofday": (164, 170), "adjtimex": (159, 171), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "perf_event_open": (298, 241),
    "bpf": (321, 280), "userfaultfd": (323, 282), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    "vhangup": (153, 58), "personality": (135, 92), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236), "migrate_pages": (256, 238), "move_pages": (279, 239), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186), "clone": (56, 220),
    "clone3": (435, 435), "ioctl": (16, 29), "mknodat": (259, 33), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "capset": (126, 91), "seccomp": (317, 277), "splice": (275, 76), "vmsplice": (278, 75), "fallocate": (285, 47),
    "linkat": (265, 37), "renameat2": (316, 276), "prctl": (157, 167), "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "mount_setattr": (442, 442), "quotactl_fd": (443, 443),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    "memfd_secret": (447, 447), "set_mempolicy_home_node": (450, 450), "close_range": (436, 436),
}
# fmt: on


def call(name: str, *arguments: int | bytes | ctypes.Array[Any] | None) -> int:
    """A system call by number. Raises OSError."""
    number = _NUMBERS[name][0 if X86 else 1]
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def fail(code: int) -> OSError:
    return OSError(code, os.strerror(code))


# -- helpers of attempts ------------------------------------------------------------------------------------------------


def first(*tries: Callable[[], str]) -> str:
    """The first that wins; if none does, the last one's failure."""
    last: Exception = Stopped("nothing to try")
    for attempt_ in tries:
        try:
            return attempt_()
        except (OSError, Stopped) as error:
            last = error
    raise last


def read(path: str, size: int = 4096) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(size)


def read_all(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return file.readall().decode("utf-8", "replace")


def mount_points() -> list[str]:
    """Everything that is mounted, as this process sees it."""
    return [line.split()[4] for line in read_all("/proc/self/mountinfo").splitlines()]


def roots() -> Iterator[str]:
    """Where the host's root could be seen."""
    yield from (
        "",
        "/proc/self/root",
        "/proc/1/root",
        "/proc/1/cwd/..",
        "/proc/self/cwd/../../../..",
        "/host",
    )
    for point in mount_points():
        if point != "/":
            yield point


def find(path: str) -> Iterator[str]:
    """The names under which a file of the host could be reached."""
    for root in roots():
        yield root + path


def status(pid: str = "self") -> dict[str, str]:
    lines = read_all(f"/proc/{pid}/status").splitlines()
    return {key: value.strip() for key, value in (line.split(":", 1) for line in lines)}


def child(work: Callable[[], None]) -> int:
    """Fork; the child does `work` and ends. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with suppress(OSError):
                work()
                code = 0
        finally:
            os._exit(code)
    return pid


def held_open(program: str) -> tuple[int, int]:
    """Run a program that reads its standard input. Returns its pid and what to close for its end."""
    read_end, write_end = os.pipe()

    def become() -> None:
        os.dup2(read_end, 0)
        os.close(write_end)
        os.execv(program, [program])

    pid = child(become)
    os.close(read_end)
    while status(str(pid))["Name"] != program.rpartition("/")[2]:
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise Stopped(f"{program} does not run")
        os.sched_yield()
    return pid, write_end


class Sibling:
    """A process that waits and holds a secret in its memory, for those who reach for other processes."""

    def __init__(self) -> None:
        self.secret = ctypes.create_string_buffer(b"sibling-" + os.urandom(4).hex().encode(), 32)
        self.address = ctypes.addressof(self.secret)
        self.read_end, self._write_end = os.pipe()
        self.pid = child(self._wait)

    def _wait(self) -> None:
        os.close(self._write_end)
        os.read(self.read_end, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write_end)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.read_end)


def connect(target: Any, family: int = socket.AF_UNIX, kind: int = socket.SOCK_STREAM) -> str:
    """What a listener of the host says."""
    with socket.socket(family, kind) as client:
        client.settimeout(5)
        client.connect(target)
        return client.recv(100).decode()


# -- running ---------------------------------------------------------------------------------------------------------------


def _tell(write_end: int, result: dict[str, Any]) -> None:
    os.write(write_end, json.dumps(result).encode()[:60000])


def _try(tried: Attempt, facts: Any, write_end: int) -> None:
    try:
        result = {"won": str(tried.run(facts))[:2000]}
    except Stopped as stop:
        result = {"stopped": str(stop)}
    except OSError as error:
        result = {"stopped": errno.errorcode.get(error.errno or 0, type(error).__name__)}
    except BaseException:  # noqa: BLE001 - a broken attempt proves nothing, and has to say so
        result = {"broken": traceback.format_exc(limit=4)}
    _tell(write_end, result)


def perform(tried: Attempt, facts: Any) -> dict[str, Any]:
    """Run one attempt in a process of its own, which can be killed for it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        signal.alarm(PATIENCE_S)
        _try(tried, facts, write_end)
        os._exit(0)
    os.close(write_end)
    # What it says fits into the pipe; a process it left behind may hold the other end for ever.
    _, raw = os.waitpid(pid, 0)
    os.set_blocking(read_end, False)
    data = b""
    try:
        while part := os.read(read_end, 65536):
            data += part
    except BlockingIOError:
        pass
    os.close(read_end)
    code = os.waitstatus_to_exitcode(raw)
    if code:
        return {"signal": -code} if code < 0 else {"broken": f"exit {code}"}
    return json.loads(data)


def main(facts: Any) -> None:
    """Run the attempts that the facts name; one line of JSON each."""
    facts["first"] = os.getppid() or 1
    for name in facts["attempts"]:
        print(json.dumps({name: perform(TABLE[name], facts)}), flush=True)


def pack(layout: str, *values: int) -> bytes:
    return struct.pack(layout, *values)


def unavailable(text: str) -> Stopped:
    return Stopped(f"not here: {text}")


__all__ = [name for name in dir() if not name.startswith("_")]
assert sys.version_info >= (3, 11)
