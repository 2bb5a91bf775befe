"""Control groups of version 2: where they can be made, with which controllers, and how.

A group hands out controllers only while it has no processes of its own, but for the root of the whole tree. So of the groups
from the kernel's own up to the top the one is taken that gives most, the nearest first: limits around it hold for agents too.
Where that is the kernel's own group and nobody else is in it (a systemd unit with `Delegate=yes`), the kernel and all that it
has started move into a leaf of it first.

All of the file system is behind `Files`, so that a model of Linux' rules can stand in for it in tests.
"""

# The warden works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH102, PTH106, PTH110, PTH120, PTH119, PTH123

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

SHARED = "ringfence"
LEAF = "ringfence-kernel"
SWITCHES = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max", "freezer": "cgroup.freeze"}
"""By controller the file whose being writable shows that a group has it. Freezing needs none and is always there."""
_MOVE_TRIES = 100
_MAKE_TRIES = 5


class Files:
    """What of a file system control groups need."""

    def read(self, path: str) -> str:
        """The text of a file."""
        with open(path, encoding="utf-8") as file:
            return file.read()

    def write(self, path: str, value: object) -> None:
        """Write one value, in one call."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, str(value).encode())
        finally:
            os.close(descriptor)

    def mkdir(self, path: str) -> None:
        """Make a group, unless it is there."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove a group without processes and without groups in it."""
        os.rmdir(path)

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return os.path.exists(path)

    def writable(self, path: str) -> bool:
        """Whether this user may write it, or make something in it."""
        return os.access(path, os.W_OK)


def parents(mount: str, own: str) -> Iterator[str]:
    """Groups to make the shared one in: the kernel's own, then all above it up to the top of the mount.

    Args:
        mount: where version 2 is mounted.
        own: the kernel's group as /proc/self/cgroup has it.
    """
    place = own.rstrip("/")
    if os.path.basename(place) == LEAF:
        place = os.path.dirname(place)
    # Outside of what this cgroup namespace shows: nothing there is ours.
    if place.startswith("/.."):
        place = ""
    while place and place != "/":
        yield f"{mount}{place}"
        place = os.path.dirname(place)
    yield mount


def make(
    files: Files, mount: str, own: str, name: str, wanted: list[str], is_ours: Callable[[int], bool]
) -> tuple[str, list[str]]:
    """Make a group for one sandbox.

    Args:
        files: the file system.
        mount: where version 2 is mounted.
        own: the kernel's group.
        name: of the group.
        wanted: controllers, `freezer` among them where it is wanted.
        is_ours: whether a process is the kernel or was started by it: it may be moved.

    Returns:
        Its directory and what of `wanted` it has; an empty directory where this host permits nothing.
    """
    best, most, moves = "", frozenset[str](), False
    for parent in parents(mount, own):
        offered, move = _offer(files, parent, frozenset(wanted), is_ours)
        if ("memory" in offered, len(offered)) > ("memory" in most, len(most)):
            best, most, moves = parent, offered, move
    if not best:
        return "", []
    for _ in range(_MAKE_TRIES):
        try:
            if moves:
                _move_out(files, best, is_ours)
            return _make_in(files, best, name, most)
        except FileNotFoundError:
            continue  # another kernel stopped and removed the shared one just now
        except OSError:
            break
    discard(files, best, name)
    return "", []


def discard(files: Files, parent: str, name: str) -> None:
    """Remove a group that is of no use, and the shared one where nobody else is in it."""
    for directory in (f"{parent}/{SHARED}/{name}", f"{parent}/{SHARED}"):
        with contextlib.suppress(OSError):
            files.rmdir(directory)


def _offer(
    files: Files, parent: str, wanted: frozenset[str], is_ours: Callable[[int], bool]
) -> tuple[frozenset[str], bool]:
    """What groups in `parent` could have, and whether processes have to move out of it for that. Changes nothing."""
    # Who moves a process has to be able to write to the group that holds both where it is and where it goes.
    if not (files.writable(parent) and files.writable(f"{parent}/cgroup.procs")):
        return frozenset(), False
    always = wanted & {"freezer"}
    try:
        there = wanted & set(files.read(f"{parent}/cgroup.controllers").split())
        given = there & set(files.read(f"{parent}/cgroup.subtree_control").split())
        if given == there:
            return there | always, False
        if not files.writable(f"{parent}/cgroup.subtree_control"):
            return given | always, False
        if not files.exists(f"{parent}/cgroup.events"):
            return there | always, False  # the root of the whole tree may have processes
        inside = [int(pid) for pid in files.read(f"{parent}/cgroup.procs").split()]
    except (OSError, ValueError):
        return always, False
    if all(is_ours(pid) for pid in inside):
        return there | always, bool(inside)
    return given | always, False


def _move_out(files: Files, parent: str, is_ours: Callable[[int], bool]) -> None:
    leaf = f"{parent}/{LEAF}"
    files.mkdir(leaf)
    for _ in range(_MOVE_TRIES):
        inside = files.read(f"{parent}/cgroup.procs").split()
        if not inside:
            return
        for pid in inside:
            # A pid of 0 is a process of another pid namespace: it can't be named, and is not ours.
            if is_ours(int(pid)):
                with contextlib.suppress(ProcessLookupError):
                    files.write(f"{leaf}/cgroup.procs", pid)


def _make_in(files: Files, parent: str, name: str, offered: frozenset[str]) -> tuple[str, list[str]]:
    shared = f"{parent}/{SHARED}"
    directory = f"{shared}/{name}"
    files.mkdir(shared)
    for controller in sorted(offered - {"freezer"}):
        for place in (parent, shared):
            # One that is refused is found missing below; the others are worth having.
            with contextlib.suppress(OSError):
                files.write(f"{place}/cgroup.subtree_control", f"+{controller}")
    files.mkdir(directory)
    has = [controller for controller in SWITCHES if controller in offered]
    has = [controller for controller in has if files.writable(f"{directory}/{SWITCHES[controller]}")]
    if not has:
        discard(files, parent, name)
        return "", []
    return directory, has
