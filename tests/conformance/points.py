"""Counts what a process does, so that a test can stop it at the n-th thing: a crash or a cancel at each moment in turn.

A point is a callback of the event loop, or an operation that Python tells its auditors of: a file opened, renamed or
removed, a process started, a socket connected, a signal sent. It needs no line in what is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TOLD = ("os.", "open", "subprocess.", "socket.", "signal.", "fcntl.", "shutil.", "pathlib.", "tempfile.")


class Points:
    """Armed, it counts; at the chosen point it acts, once.

    Attributes:
        reached: how many points came since it was armed.
    """

    def __init__(self, *, audit: bool) -> None:
        self.reached = 0
        self._at = 0
        self._act: Callable[[], object] | None = None
        if audit:
            sys.addaudithook(self._hear)
        run: Any = asyncio.Handle._run

        def counted(handle: asyncio.Handle) -> None:
            self.reach()
            run(handle)

        asyncio.Handle._run = counted  # type: ignore[method-assign] # there is no hook for it

    def arm(self, at: int, act: Callable[[], object]) -> None:
        """Count from now on and call `act` before point `at`; 0: never."""
        self.reached, self._at, self._act = 0, at, act

    def disarm(self) -> None:
        """Count no longer."""
        self._act = None

    def reach(self) -> None:
        """A point has come."""
        if self._act is None:
            return
        self.reached += 1
        if self.reached == self._at:
            act, self._act = self._act, None
            act()

    def _hear(self, event: str, _: object) -> None:
        if event.startswith(_TOLD):
            self.reach()


def die_with_helpers() -> None:
    """The same for this process and all that it started: nothing of them can clean up after itself."""
    above: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            above[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    below = [os.getpid()]
    for pid in below:
        below += [child for child, parent in above.items() if parent == pid]
    # The programs inside are not told: their ends have to follow.
    for pid in below[1:]:
        with contextlib.suppress(OSError):
            if b"ringfence" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    die()


def die() -> None:
    """End this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)
