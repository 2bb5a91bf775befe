"""Keeps track of every process that the demo causes, so that "nothing is left running" can be checked and made true."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


class Warden:
    """Makes this process the parent of all orphans among its descendants, and reaps them as init would.

    A process can leave its session and its parent, but not the subtree: what is not among the descendants is gone.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "this system has no child subreaper")
        self._stop = threading.Event()
        self._own: set[int] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._reap, name="demo warden", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reaping."""
        self._stop.set()
        self._thread.join()

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        """Start a child that the caller waits for, its output in a pipe; every other child is reaped here.

        It has a session of its own: Ctrl-C is for the demo, which then ends its children in order.
        """
        with self._lock:
            child = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
            self._own.add(child.pid)
        return child

    def _reap(self) -> None:
        while not self._stop.wait(_POLL_S):
            for pid, parent, state in processes():
                if parent != os.getpid() or state != "Z":
                    continue
                # INVARIANT: under the lock a child of `popen` is known before it can be taken for an orphan.
                with self._lock, contextlib.suppress(ChildProcessError):
                    if pid not in self._own:
                        os.waitpid(pid, os.WNOHANG)

    def descendants(self) -> list[int]:
        """Living descendants of this process."""
        children: dict[int, list[int]] = {}
        for pid, parent, state in processes():
            if state != "Z":
                children.setdefault(parent, []).append(pid)
        found: list[int] = []
        pending = [os.getpid()]
        while pending:
            mine = children.get(pending.pop(), [])
            found += mine
            pending += mine
        return found

    def end_all(self, within_s: float = 10.0) -> list[str]:
        """Kill every descendant that is left; returns what they were."""
        left = self.descendants()
        named = [f"{pid} {describe(pid)}" for pid in left]
        until = time.monotonic() + within_s
        while left and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
            left = self.descendants()
        return named


def processes() -> list[tuple[int, int, str]]:
    """Pid, parent and state letter of every process that can be seen."""
    found: list[tuple[int, int, str]] = []
    for entry in list(Path("/proc").iterdir()):
        if not entry.name.isdecimal():
            continue
        try:
            text = Path(entry, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        found.append((int(entry.name), int(parent), state))
    return found


def describe(pid: int) -> str:
    """The command line of a process, short."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return "gone"
    return words.decode(errors="replace").strip()[:120] or "without a command line"


def mounts_below(*roots: Path) -> list[str]:
    """Mount points of this host at or below some directories."""
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    points = [line.split()[4] for line in text.splitlines()]
    return [point for point in points if any(Path(point).is_relative_to(root) for root in roots)]


def sockets_below(*roots: Path) -> list[str]:
    """Unix sockets of this host that are bound at or below some directories."""
    text = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    paths = [line.split(maxsplit=7)[7] for line in text.splitlines()[1:] if len(line.split(maxsplit=7)) > 7]  # noqa: PLR2004
    return [path for path in paths if any(Path(path).is_relative_to(root) for root in roots)]


def remove(root: Path) -> None:
    """Remove a directory, also where commands that were cut off left directories closed to their owner."""
    for place, _, _ in os.walk(root):
        with contextlib.suppress(OSError):
            for path in list(Path(place).iterdir()):
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(root, ignore_errors=True)
