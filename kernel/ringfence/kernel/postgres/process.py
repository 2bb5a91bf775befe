"""Processes of the server: starting them, waiting for them, stopping them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.kernel.postgres.accounts import Identity

_LAUNCHER = Path(__file__).with_name("launch.py")
# The whole environment of the server's programs: none of the kernel's.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C", "LC_ALL": "C", "TZ": "UTC"}

FAST_STOP_S = 60.0
"""How long an orderly stop may take before the server is told to stop at once: it writes a checkpoint."""
QUIT_STOP_S = 10.0
"""How long an immediate stop may take before the process is killed."""


async def wait_pidfd(pidfd: int, timeout: float | None = None) -> bool:  # noqa: ASYNC109
    """Waits until the process of a pidfd has ended; false when `timeout` seconds passed before."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return True
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: None if ended.done() else ended.set_result(None))
    try:
        await asyncio.wait_for(ended, timeout)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


class Child:
    """A running child process, waited for by its pidfd: independent of the loop's own child handling."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self.pid = process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    async def wait(self, timeout: float | None = None) -> int | None:  # noqa: ASYNC109
        """Waits for its end and returns its exit code; None when `timeout` seconds passed before."""
        if self._process.returncode is None and not await wait_pidfd(self._pidfd, timeout):
            return None
        code = self._process.wait()
        self.close()
        return code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; nothing happens when the process has ended."""
        self._process.send_signal(number)

    def kill_group(self) -> None:
        """Ends it and its children by force, and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Releases the pidfd."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    async def stop(self) -> int:
        """Ends the server in order: orderly, then at once, then by force. Returns its exit code."""
        for number, patience in (
            (signal.SIGINT, FAST_STOP_S),
            (signal.SIGQUIT, QUIT_STOP_S),
            (signal.SIGKILL, None),
        ):
            self.send(number)
            code = await self.wait(patience)
            if code is not None:
                return code
        raise AssertionError("a killed process was not reaped")


def spawn(
    argv: Sequence[str],
    *,
    directory: int,
    lock: int | None = None,
    identity: Identity,
    output: IO[bytes],
    death_signal: int = 0,
) -> Child:
    """Starts a PostgreSQL program as a direct child.

    Args:
        argv: the program's path and its arguments.
        directory: descriptor of the server's directory; the program finds it as `/proc/self/fd/3`.
        lock: descriptor whose lock the program and all it forks are to hold until they end.
        identity: who it runs as.
        output: receives what it prints.
        death_signal: what it gets when the thread that called this ends, as when the kernel is killed.

    Raises:
        OSError: the launcher could not be started.
    """
    uid = -1 if identity.uid is None else identity.uid
    gid = -1 if identity.gid is None else identity.gid
    words = [uid, gid, directory, -1 if lock is None else lock, int(death_signal), os.getpid()]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_LAUNCHER), *map(str, words), *argv],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(directory,) if lock is None else (directory, lock),
        env=_ENVIRONMENT,
        # A Ctrl-C at the terminal is for the kernel, which then stops the server in order.
        start_new_session=True,
    )
    return Child(process)
