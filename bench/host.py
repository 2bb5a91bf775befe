"""The machine: pinning, processor time, children that never outlive the run, a scratch directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Asks for a signal at its parent's death, and becomes another program, unless it has come too late."""
_TICKS = os.sysconf("SC_CLK_TCK")
WAIT_S = 120.0


class BenchError(Exception):
    """A measurement can't be taken. `str()` is one line that says why."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run.

    Attributes:
        quick: short runs.
        scratch: directory for everything that is written; removed at the end.
        say: gets a line for a person who waits.
    """

    quick: bool
    scratch: Path
    say: Callable[[str], None]
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def seconds(self, quick: float, full: float) -> float:
        """How long to measure."""
        return quick if self.quick else full

    def directory(self, name: str) -> Path:
        """A fresh directory that sandboxed agents with uids of their own can pass through."""
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch))
        path.chmod(0o711)
        return path


@contextlib.contextmanager
def scratch(parent: str | None) -> Iterator[Path]:
    """A directory for the run. On the disk, not in memory: durable commits are what is measured."""
    path = Path(tempfile.mkdtemp(prefix="rfb-", dir=parent))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# -- processors -------------------------------------------------------------------------------------------------------


def two_cores() -> bool:
    """Whether kernel and generator can each have a core."""
    return len(os.sched_getaffinity(0)) >= 2


def pin(pid: int, *cpus: int) -> None:
    """Pin every thread of a process, where there are cores to choose from. What it starts from then on inherits that."""
    if not two_cores():
        return
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used so far, all threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def used_seconds(pids: Sequence[int]) -> float:
    """Processor time that processes have used so far, with all threads and with children that have ended.

    The table of processes rounds down to ticks, which of a process that lives briefly is half of what it used.
    """
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own, ended = (int(fields[at]) + int(fields[at + 1]) for at in (11, 13))
            told = [task.read_text().split()[0] for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
            total += max(own / _TICKS, sum(map(int, told)) / 1e9) + ended / _TICKS
    return total


def idle_share(seconds: float = 1.0) -> float:
    """Share of the machine that nobody uses just now: the room there is for measuring."""

    def look() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return numbers[3] + numbers[4], sum(numbers)

    idle, whole = look()
    time.sleep(seconds)
    idle_then, whole_then = look()
    return (idle_then - idle) / max(1, whole_then - whole)


def fdatasync_seconds(directory: Path, times: int = 50) -> float:
    """The median of appending a page to a file and making it durable: no commit can be faster."""
    with tempfile.TemporaryFile(dir=directory) as file:

        def append() -> None:
            os.write(file.fileno(), bytes(8192))
            os.fdatasync(file.fileno())

        return median([timed(append) for _ in range(times)])


def facts(directory: Path) -> dict[str, Any]:
    """What the figures depend on; the disk is the one of `directory`."""
    return {
        "fdatasync_us": round(fdatasync_seconds(directory) * 1e6),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(n, 2) for n in os.getloadavg()],
        "idle_share": round(idle_share(), 2),
        "linux": os.uname().release,
        "python": sys.version.split()[0],
        "root": os.geteuid() == 0,
    }


# -- children ---------------------------------------------------------------------------------------------------------


def child(argv: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    """Start a process that is told to end when this one dies, however it dies."""
    # INVARIANT: nothing of this process runs between fork and exec. With `preexec_fn` the handlers of gRPC do, which start its
    # threads anew in the child: every now and then one met a descriptor that was closed already, and ended it.
    become = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid())]
    return subprocess.Popen([*become, *argv], text=True, **more)


@contextlib.contextmanager
def serving(
    module: str, *options: str, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Run `python -m MODULE`, which prints one line of JSON when it serves and ends when its input does.

    `env` is added to this process's own.
    """
    with log.open("ab") as errors:
        process = child(
            [sys.executable, "-m", module, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(env or {})},
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise BenchError(f"`python -m {module}` did not start: {last_line(log)}")
        yield process, json.loads(line)
    finally:
        end(process)


def end(process: subprocess.Popen[Any], seconds: float = 60.0) -> None:
    """End a child in order, then by force."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def last_line(log: Path) -> str:
    """Why a child failed, as far as it said."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    # The very last line may be a library's, about an end that something else has caused.
    return " | ".join(line[:300] for line in lines[-6:]) if lines else "it said nothing"


def eventually(
    true: Callable[[], bool],
    what: str,
    within_s: float = WAIT_S,
    every_s: float = 0.005,
    *,
    moves: Callable[[], object] | None = None,
) -> float:
    """Poll for a state of another process; gives the seconds it took.

    Args:
        true: the state.
        what: what is said where it does not come.
        within_s: how long to wait for it; with `moves`, for how long that may stay as it is, and ten times as long in all.
        every_s: between two looks.
        moves: how far it has come.

    Raises:
        BenchError: it did not come.
    """
    began = moved = time.monotonic()
    seen: object = None
    while not true():
        now = time.monotonic()
        if moves is not None and (found := moves()) != seen:
            seen, moved = found, now
        if now - moved > within_s or now - began > 10 * within_s:
            raise BenchError(f"{what} within {within_s:.0f} s")
        time.sleep(every_s)
    return time.monotonic() - began


# -- figures ----------------------------------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    """The middle value; 0 for none."""
    return statistics.median(values) if values else 0.0


def rank(values: Sequence[float], share: float) -> float:
    """A percentile by the nearest-rank method; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def timed(work: Callable[[], Any]) -> float:
    """Seconds that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
