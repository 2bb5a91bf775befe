"""What the tests of sandboxes share: programs that talk, pipes for their output, and what the backend's own processes hold."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from ringfence.sandbox.native import cgroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Box, Running

PATIENCE_S = 60
QUIET_S = 0.3
"""How long nothing has to come for a test to believe that nothing comes."""

IGNORING = (
    "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
    "  except (OSError, ValueError): pass\n"
)
CONNECT = 'import socket\ns = socket.socket(socket.AF_UNIX); s.connect("/run/ringfence/syscall.sock")\n'
ECHO = CONNECT + "while data := s.recv(100): s.sendall(data)\n"


def listen(directory: Path) -> socket.socket:
    """A door like the kernel's, in a socket directory."""
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(PATIENCE_S)
    server.bind(str(directory / "syscall.sock"))
    (directory / "syscall.sock").chmod(0o777)
    server.listen()
    return server


def says(connection: socket.socket, word: bytes) -> bytes:
    """What a program answers."""
    connection.sendall(word)
    return connection.recv(100)


def silent(connection: socket.socket) -> bool:
    """Whether nothing comes for a while."""
    return not select.select([connection], [], [], QUIET_S)[0]


@contextlib.contextmanager
def talking(
    box: Box, code: str = ECHO, *arguments: str, **more: Any
) -> Iterator[tuple[Running, socket.socket]]:
    """A Python program that has connected to its door."""
    sockets = box.directory(box.fresh("sockets"))
    with listen(sockets) as server:
        program = box.python(code, *arguments, socket_dir=sockets, **more)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(PATIENCE_S)
        yield program, connection


@contextlib.contextmanager
def closing_at_its_end(connection: socket.socket) -> Iterator[Future[bytes]]:
    """Do as the kernel does: read to the program's end and close then. Gives what came until then.

    A sandbox host lets a connection that nobody closes here wait for a while, in case that last words are on their way.
    """
    told: Future[bytes] = Future()

    def hear() -> None:
        try:
            heard = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            connection.close()
            told.set_result(heard)
        except BaseException as error:  # noqa: BLE001 - whoever asks for it gets it
            told.set_exception(error)

    hearing = threading.Thread(target=hear)
    hearing.start()
    try:
        yield told
    finally:
        hearing.join()


class Pipe:
    """A pipe that a program writes to; `path` goes into the order that starts it."""

    def __init__(self, box: Box) -> None:
        self.path = box.directory(box.fresh("pipe"), owner=box.kind.kernel_uid) / "pipe"
        os.mkfifo(self.path, 0o600)
        if box.kind.kernel_uid is not None:
            os.chown(self.path, box.kind.kernel_uid, box.kind.kernel_uid)
        self.source = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.source >= 0:
            os.close(self.source)
            self.source = -1

    def has_more(self, within_s: float = PATIENCE_S) -> bool:
        return bool(select.select([self.source], [], [], within_s)[0])

    def read(self, most: int = 1 << 20) -> bytes:
        """The next bytes; empty at the end. Waits for them."""
        assert self.has_more(), "neither output nor its end came"
        return os.read(self.source, most)

    def parts(self, most: int = 1 << 20) -> Iterator[bytes]:
        """All output to its end, in parts."""
        while part := self.read(most):
            yield part

    def drain(self) -> int:
        """Take what is there now; how much it was."""
        taken = 0
        while self.has_more(QUIET_S) and (part := os.read(self.source, 1 << 20)):
            taken += len(part)
        return taken


# -- the backend's own processes --------------------------------------------------------------------------------------


def parents() -> dict[int, int]:
    """Every process of this host and its parent."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def helpers(box: Box) -> list[int]:
    """The process that owns the backend and all below it, without what runs inside of sandboxes."""
    above = parents()
    found = [box.host.process.pid]
    for pid in found:
        found += [child for child, parent in above.items() if parent == pid]
    return [pid for pid in found if pid not in set(box.alive())]


def status_bytes(pid: int, name: str) -> int:
    """A size of /proc/PID/status; 0 for a process that is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def peaks(box: Box) -> Iterator[Callable[[], int]]:
    """What the backend's processes grew by at most meanwhile: the largest of them, in bytes."""
    grown: dict[int, int] = {}
    first: dict[int, int] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            for pid in helpers(box):
                peak = status_bytes(pid, "VmHWM")
                # A process starts with the peak of the one that started it, so what it added is what counts.
                grown[pid] = max(grown.get(pid, 0), peak - first.setdefault(pid, peak))

    for pid in helpers(box):
        first[pid] = status_bytes(pid, "VmHWM")
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield lambda: max(grown.values(), default=0)
    finally:
        done.set()
        watcher.join()


# -- what is left behind on the host -----------------------------------------------------------------------------------


def eventually(true: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait for what other processes bring about."""
    until = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > until:
            pytest.fail(what())
        time.sleep(0.01)


def mounts() -> set[str]:
    """Of this host: number and place of each, but for those of an engine's containers, which are asked for as such."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    found = {f"mount {line.split()[0]} {line.split()[4]}" for line in lines}
    return {mount for mount in found if "/docker/" not in mount}


def groups(data: Path) -> set[str]:
    """Control groups of the sandboxes of a data directory; others on this host come and go."""
    mark = cgroups.label(str(data / "sandboxes"), "")
    found: set[str] = set()
    for top, names, _ in os.walk("/sys/fs/cgroup"):
        if Path(top).name == "ringfence":
            found |= {f"group {Path(top, name)}" for name in names if name.startswith(mark)}
            names.clear()
    return found


def _held(group: str) -> bool:
    """Whether processes are in it; one that is gone by now is no trace either."""
    place = Path(group.removeprefix("group "))
    try:
        return bool((place / "cgroup.procs").read_text())
    except OSError:
        return not place.exists()


def sockets(place: Path) -> set[str]:
    """Unix sockets with a name below a directory."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {f"socket {line.split()[-1]}" for line in lines if str(place) in line}


def files(place: Path) -> set[str]:
    """Everything below a directory."""
    return {f"file {path}" for path in place.rglob("*")}


class Traces:
    """What sandboxes could leave on this host, as it was when this was made."""

    def __init__(self, box: Box) -> None:
        self._box = box
        # What a backend makes once and keeps is there from now on.
        box.program(["/bin/true"]).wait()
        self._before = self._look()

    def _look(self) -> set[str]:
        data = self._box.data
        # Those of a spare sandbox, which comes a moment after the last start, hold its two processes: `groups` counts them too.
        empty = {group for group in groups(data) if not _held(group)}
        return {*mounts(), *empty, *sockets(self._box.place), *files(data)}

    def new(self) -> list[str]:
        """What has come since."""
        return sorted({*self._look() - self._before, *self._box.left()})
