"""Measures what a sandbox uses where no control group does it, from outside.

Memory counts private pages (a page shared by forked processes once), what lies in /tmp, and shared anonymous mappings at
their full size, mapped or not: a process can give those pages back to its mapping without giving them to the host; and what
waits in unix sockets, which belongs to no process. Disk counts the upper layer, and files that were removed but are still open or mapped.
"""

# The warden works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH116, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

_KIB = 1024
_BLOCK = 512
_ENTRY_BYTES = 1024
_FASTEST_BYTES_S = 2 << 30
_MEMORY_INTERVAL_S = (0.02, 0.25)
_DISK_INTERVAL_S = (0.05, 0.5)
_DISK_DUTY = 5
# Of linux/sock_diag.h and linux/unix_diag.h.
_DIAG_BY_FAMILY, _REQUEST_DUMP, _SHOW_MEMORY, _MEMORY_ATTRIBUTE, _SENT_AT = 20, 0x301, 0x20, 5, 8
_ALL = 0xFFFFFFFF
_ANSWER_BYTES = 1 << 16
_ALL_DUTY = 10
"""All meters of a process together take at most one part of so many of a processor,"""
_ALL_WAIT_S = 2.0
"""as long as none waits longer than this for it;"""
_COST_MOST_S = 0.005
"""and what one costs more is its own matter: no sandbox can keep the meters of others from looking."""
_SHARED_SOURCES = ("/dev/zero", "/memfd:", "/SYSV", "/anon_hugepage")


_costs: weakref.WeakKeyDictionary[Meter, float] = weakref.WeakKeyDictionary()
"""Processor time that the last look of each meter took."""
_costs_lock = threading.Lock()


class Meter(Protocol):
    """A bound that is looked at again the sooner the closer it is. Each kind measures in its own way."""

    limit_bytes: int
    due: float
    _interval_s: tuple[float, float]

    def __init__(self, limit_bytes: int, interval_s: tuple[float, float]) -> None:
        self.limit_bytes = limit_bytes
        self.due = time.monotonic()
        self._interval_s = interval_s

    @abstractmethod
    def measure(self) -> int:
        """Bytes in use now."""
        ...

    def exceeded(self) -> bool:
        """Measure, plan the next look, and say whether the limit is passed."""
        began, spent = time.monotonic(), time.thread_time()
        used = self.measure()
        now = time.monotonic()
        with _costs_lock:
            _costs[self] = min(time.thread_time() - spent, _COST_MOST_S)
            together = sum(_costs.values())
        shortest, longest = self._interval_s
        wait = min(max((self.limit_bytes - used) / _FASTEST_BYTES_S, shortest), longest)
        turn = min(_ALL_DUTY * together, _ALL_WAIT_S)
        self.due = now + max(wait, _DISK_DUTY * (now - began), turn)
        return used > self.limit_bytes


class MemoryMeter(Meter):
    """The memory of a pid namespace.

    Args:
        limit_bytes: bound.
        proc: descriptor of the namespace's /proc.
        tmp: descriptor of the sandbox's /tmp.
        sockets: netlink socket of the sandbox's network namespace; None: this Linux tells nothing about sockets.
    """

    def __init__(self, limit_bytes: int, proc: int, tmp: int, sockets: int | None) -> None:
        super().__init__(limit_bytes, _MEMORY_INTERVAL_S)
        self._proc = proc
        self._tmp = tmp
        self._sockets = sockets

    def measure(self) -> int:
        """Cheap upper bound first; the exact figure only if that is over the limit."""
        usage = os.fstatvfs(self._tmp)
        fixed = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        if self._sockets is not None:
            fixed += socket_bytes(self._sockets)
        private = other = 0
        pids = list(_pids(self._proc))
        for pid in pids:
            status = _fields(self._proc, f"{pid}/status")
            private += status.get("RssAnon", 0)
            rest = ("VmData", "VmStk", "VmExe", "VmLib")
            other += max(status.get("VmSize", 0) - sum(status.get(name, 0) for name in rest), 0)
        if fixed + private + other <= self.limit_bytes:
            return fixed + private + other
        fixed += sum(_mapped(self._proc, pids, _SHARED_SOURCES).values())
        if fixed + private <= self.limit_bytes:
            return fixed + private
        return fixed + sum(_fields(self._proc, f"{pid}/smaps_rollup").get("Pss_Anon", 0) for pid in pids)


class DiskMeter(Meter):
    """The disk space of a command.

    Args:
        limit_bytes: bound.
        tree: directory of the upper layer.
        proc: descriptor of the pid namespace's /proc.
        workspace: descriptor of the overlay.
        outside: bytes that the command takes elsewhere, for its output.
    """

    def __init__(
        self, limit_bytes: int, tree: str, proc: int, workspace: int, outside: Callable[[], int]
    ) -> None:
        super().__init__(limit_bytes, _DISK_INTERVAL_S)
        self._outside = outside
        self._tree = tree
        self._proc = proc
        self._devices = {os.fstat(workspace).st_dev, os.stat(tree).st_dev}

    def measure(self) -> int:
        """Bytes on disk."""
        pids = list(_pids(self._proc))
        removed = _mapped(self._proc, pids, ("/workspace/",))
        for pid in pids:
            with contextlib.suppress(OSError):
                removed.update(_removed_but_open(self._proc, pid, self._devices))
        return self._outside() + tree_bytes(self._tree) + sum(removed.values())


def socket_bytes(netlink: int) -> int:
    """Memory of what waits in the unix sockets of a network namespace, also of those that are themselves under way in one.

    0 where this Linux has no answer.
    """
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ALL, 0, _SHOW_MEMORY, _ALL, _ALL)
    header = struct.pack("=IHHII", 16 + len(request), _DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0)
    total = 0
    with contextlib.suppress(OSError):
        os.write(netlink, header + request)
        while True:
            data = os.read(netlink, _ANSWER_BYTES)
            place = 0
            while place + 16 <= len(data):
                size, kind = struct.unpack_from("=IH", data, place)
                if kind != _DIAG_BY_FAMILY:
                    return total  # done, or an error
                total += _waiting(data[place + 32 : place + size])
                place += (size + 3) & ~3
            if not data:
                break
    return total


def _waiting(attributes: bytes) -> int:
    """Bytes that one socket has sent and nobody has taken."""
    place = 0
    while place + 4 <= len(attributes):
        size, kind = struct.unpack_from("=HH", attributes, place)
        if kind == _MEMORY_ATTRIBUTE and size >= _SENT_AT + 8:
            return struct.unpack_from("=I", attributes, place + 4 + _SENT_AT)[0]
        place += max((size + 3) & ~3, 4)
    return 0


def tree_bytes(top: str) -> int:
    """Blocks taken by everything below a directory, a file with several names once. Vanishing entries are left out.

    Each name counts at least `_ENTRY_BYTES`, so that empty files without end are over a limit too.
    """
    total = 0
    seen: set[int] = set()
    pending = [top]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    pending.append(entry.path)
                elif facts.st_nlink > 1:
                    if facts.st_ino in seen:
                        total += _ENTRY_BYTES
                        continue
                    seen.add(facts.st_ino)
                total += max(facts.st_blocks * _BLOCK, _ENTRY_BYTES)
    return total


def _pids(proc: int) -> Iterator[int]:
    for name in os.listdir(proc):
        if name.isdigit():
            yield int(name)


def _read(proc: int, path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return ""
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        try:
            return file.read()
        except ProcessLookupError:
            return ""


def _fields(proc: int, path: str) -> dict[str, int]:
    """The lines `Name: 123 kB` of a file, in bytes."""
    found: dict[str, int] = {}
    for line in _read(proc, path).splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":  # noqa: PLR2004
            found[words[0].rstrip(":")] = int(words[1]) * _KIB
    return found


def _mapped(proc: int, pids: list[int], sources: tuple[str, ...]) -> dict[tuple[str, int], int]:
    """Largest extent mapped of each removed or nameless file whose name starts with one of `sources`."""
    extents: dict[tuple[str, int], int] = {}
    for pid in pids:
        ends: dict[tuple[str, int], int] = {}
        for line in _read(proc, f"{pid}/maps").splitlines():
            if not line.endswith(" (deleted)"):
                continue
            addresses, _, offset, device, inode, name = line.split(maxsplit=5)
            if name.startswith(sources):
                start, _, end = addresses.partition("-")
                extent = int(offset, 16) + int(end, 16) - int(start, 16)
                key = (device, int(inode))
                ends[key] = max(ends.get(key, 0), extent)
        for key, extent in ends.items():
            extents[key] = max(extents.get(key, 0), extent)
    return extents


def _removed_but_open(proc: int, pid: int, devices: set[int]) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    directory = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    try:
        names = os.listdir(directory)
    finally:
        os.close(directory)
    for name in names:
        with contextlib.suppress(OSError):
            facts = os.stat(f"{pid}/fd/{name}", dir_fd=proc)
            if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 and facts.st_dev in devices:
                found["open", facts.st_ino] = facts.st_blocks * _BLOCK
    return found
