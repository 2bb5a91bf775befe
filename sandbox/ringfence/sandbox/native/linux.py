"""The system calls of Linux that Python's standard library lacks. Every failure is an OSError that says what failed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
from typing import Any

CLONE_PARENT = 0x00008000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

ATTR_RDONLY = 1
ATTR_NOSUID = 2
ATTR_NODEV = 4
ATTR_NOEXEC = 8
AT_FDCWD = -100
AT_RECURSIVE = 0x8000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_GET_TID_ADDRESS = 40
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522

MACHINE = platform.machine() if hasattr(os, "uname") else ""
_NUMBERS = {
    "x86_64": {"clone": 56, "ioctl": 16, "pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"clone": 220, "ioctl": 29, "pivot_root": 41, "capset": 91, "seccomp": 277},
}
_SAME_EVERYWHERE = {
    "close_range": 436,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.sbrk.restype = ctypes.c_void_p
_held: Any = ctypes.PyDLL(None, use_errno=True)
"""The same, without the interpreter's lock being let go: for a fork."""
_held.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def supported() -> bool:
    """Whether this machine's system call numbers are known."""
    return MACHINE in _NUMBERS


def syscall(name: str, *arguments: int | bytes | ctypes.Array[Any] | None) -> int:
    """Call by number. Integers are passed as longs, bytes as pointers.

    Raises:
        OSError: the kernel refused.
    """
    number = _SAME_EVERYWHERE.get(name) or _NUMBERS[MACHINE][name]
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *words), name)


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags`."""
    _check(_libc.unshare(flags), "unshare")


def program_break() -> int:
    """Address where the heap of this process ends."""
    return _libc.sbrk(0)


def fork_beside(spaces: int) -> int:
    """Fork a child whose parent is this process's own parent, into new namespaces. For a process with one thread.

    INVARIANT: the child runs nothing but our own code, and forks again by `os.fork` for whatever else. What modules have asked
    to be done after a fork is left to that one: with one thread no lock is held by another, and it costs as much as the fork.

    Args:
        spaces: `CLONE_NEW*`.

    Returns:
        As `os.fork`: 0 in the child, elsewhere its pid.

    Raises:
        OSError: the kernel refused.
    """
    place = ctypes.c_ulong()
    # Where libc keeps the number of the thread, which it writes itself when it is asked to fork. Where Linux does not tell,
    # the child keeps its parent's there until it forks, which matters to threads and locks between processes only.
    told = _held.prctl(PR_GET_TID_ADDRESS, ctypes.byref(place), 0, 0, 0) == 0
    flags = spaces | CLONE_PARENT | signal.SIGCHLD
    if told:
        flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
    thread = ctypes.c_void_p(place.value if told else None)
    last = (thread, None) if MACHINE == "x86_64" else (None, thread)
    pid = _held.syscall(ctypes.c_long(_NUMBERS[MACHINE]["clone"]), ctypes.c_ulong(flags), None, None, *last)
    return _check(pid, "clone")


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    """Mount, bind or remount."""
    result = _libc.mount(
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        options.encode() if options else None,
    )
    _check(result, f"mount `{target}`")


def umount(target: str) -> None:
    """Detach a mount at once, busy or not."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount `{target}`")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root and hang the former root at `old`."""
    syscall("pivot_root", os.fsencode(new), os.fsencode(old))


def restrict_mount(target: str, attributes: int, *, recursive: bool = False) -> None:
    """Set `ATTR_*` on a mount, and on all mounts beneath it if `recursive`. Never clears any."""
    words = ctypes.create_string_buffer(attributes.to_bytes(8, "little") + bytes(24), 32)
    flags = AT_RECURSIVE if recursive else 0
    syscall("mount_setattr", AT_FDCWD, os.fsencode(target), flags, words, 32)


def bind(source: str, target: str, attributes: int) -> None:
    """Bind a tree with all its mounts and restrict every one of them."""
    mount(source, target, None, MS_BIND | MS_REC)
    restrict_mount(target, attributes, recursive=True)


def prctl(option: int, *values: int) -> int:
    """Call prctl."""
    padded = [*values, 0, 0, 0, 0][:4]
    return _check(_libc.prctl(option, *[ctypes.c_ulong(value) for value in padded]), f"prctl {option}")


def close_from(lowest: int, keep: frozenset[int] = frozenset()) -> None:
    """Close every descriptor from `lowest` on but those in `keep`."""
    start = lowest
    for kept in sorted(keep):
        if kept > start:
            syscall("close_range", start, kept - 1, 0)
        start = max(start, kept + 1)
    syscall("close_range", start, 0x7FFFFFFF, 0)


def drop_bounding_set() -> None:
    """Empty the capability bounding set. Needs CAP_SETPCAP, so before the capabilities themselves go."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            # INVARIANT: EINVAL past the last capability this kernel knows is the only good end of this loop.
            if capability and ctypes.get_errno() == errno.EINVAL:
                return
            _check(-1, "drop the capability bounding set")


def drop_capabilities() -> None:
    """Empty the ambient, inheritable, permitted and effective sets."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = CAPABILITY_VERSION_3.to_bytes(4, "little") + bytes(4)
    syscall("capset", header, bytes(24))


def exit_process(code: int) -> None:
    """End this process as libc does: what its libraries have asked for is done, and their files are written. Never returns."""
    _libc.exit(code)


def rehearse() -> None:
    """Go through calls that mount, to no effect: there is nothing at an empty path."""
    for call in (
        lambda: mount("tmpfs", "", "tmpfs", MS_NOSUID, "size=4k"),
        lambda: bind("/", "", ATTR_RDONLY),
        lambda: restrict_mount("", ATTR_RDONLY, recursive=True),
        lambda: umount(""),
    ):
        with contextlib.suppress(OSError):
            call()


def syncfs(descriptor: int) -> None:
    """Write everything of the descriptor's file system to disk."""
    _check(_libc.syncfs(descriptor), "syncfs")
