"""Who gets killed in fault tests: a kernel, its agents, the parent of its sandboxes, what forks them, its database."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from support.kernels import KernelProcess, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(name) for name in path.read_text().split()]
    return found


def command(pid: int) -> str:
    """How a process was called; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def wardens(kernel: KernelProcess) -> list[int]:
    """The one process above all sandboxes of a kernel."""
    assert kernel.process is not None
    return [pid for pid in children(kernel.process.pid) if "warden" in command(pid)]


def zygotes(kernel: KernelProcess) -> list[int]:
    """What first processes of sandboxes are forked from."""
    return [pid for warden in wardens(kernel) for pid in children(warden) if "zygote" in command(pid)]


def kill_all(pids: Iterable[int]) -> int:
    """SIGKILL; returns when they are gone, with how many there were."""
    count = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            count += 1
        eventually(lambda pid=pid: _gone(pid), f"process {pid} does not die")
    return count


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def take_over(kernel: KernelProcess, meanwhile: Callable[[], None] = lambda: None) -> KernelProcess:
    """A second kernel on the files of one that stands still past its lease, and then goes on.

    `meanwhile` runs once it stands still. The lock that keeps two kernels out of one directory is removed: it must not be the only thing that does.

    Returns:
        The second one. The first has ended, by itself.
    """
    first = kernel.process
    assert first is not None
    first.send_signal(signal.SIGSTOP)
    kernel.operator.close()
    (kernel.data / "kernel.lock").unlink()
    meanwhile()
    second = KernelProcess(kernel.data, dsn=kernel.dsn, config=kernel.config.read_text())
    second.env = kernel.env
    try:
        second.start()
    finally:
        first.send_signal(signal.SIGCONT)
    try:
        assert first.wait(60) == 1, kernel.log.read_text()[-2000:]
    finally:
        if first.poll() is None:
            first.kill()
            first.wait()
    return second
