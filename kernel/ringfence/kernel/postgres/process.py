"""Processes of the server: starting them, waiting for them, ending those that a dead kernel left behind."""

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
_PROGRAM = "postgres"
# The whole environment of the server's programs: none of the kernel's.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C", "LC_ALL": "C", "TZ": "UTC"}
_GONE = " (deleted)"

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
    identity: Identity,
    output: IO[bytes],
    death_signal: int = 0,
) -> Child:
    """Starts a PostgreSQL program as a direct child.

    Args:
        argv: the program's path and its arguments.
        directory: descriptor of the server's directory; the program sees it as `/proc/self/fd/3`.
        identity: who it runs as.
        output: receives what it prints.
        death_signal: what it gets when the thread that called this ends, as when the kernel is killed.

    Raises:
        OSError: the launcher could not be started.
    """
    uid = -1 if identity.uid is None else identity.uid
    gid = -1 if identity.gid is None else identity.gid
    words = [uid, gid, directory, int(death_signal), os.getpid()]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_LAUNCHER), *map(str, words), *argv],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(directory,),
        env=_ENVIRONMENT,
        # A Ctrl-C at the terminal is for the kernel, which then stops the server in order.
        start_new_session=True,
    )
    return Child(process)


def _is_server(pid: int, data: os.stat_result) -> bool:
    """Whether a process is part of the server of a data directory: it stands in it and is PostgreSQL."""
    try:
        here = os.stat(f"/proc/{pid}/cwd")  # noqa: PTH116 - a magic link, not a path
        program = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115 - a magic link, not a path
    except OSError:
        return False
    same_directory = (here.st_dev, here.st_ino) == (data.st_dev, data.st_ino)
    return same_directory and Path(program.removesuffix(_GONE)).name == _PROGRAM


def _open_servers(data: Path, stack: contextlib.ExitStack) -> dict[int, int]:
    """Opens a pidfd, closed by `stack`, for each process of the server of `data`: pid -> pidfd."""
    try:
        place = data.stat()
    except FileNotFoundError:
        return {}
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - numbers, not paths
        if not name.isdigit() or not _is_server(int(name), place):
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except ProcessLookupError:
            continue
        stack.callback(os.close, pidfd)
        # Looked at again behind the pidfd: a number used anew since the first look is not it.
        if _is_server(int(name), place):
            found[int(name)] = pidfd
    return found


def server_pids(data: Path) -> list[int]:
    """The running processes of the server of a data directory, by identity and never by name alone."""
    with contextlib.ExitStack() as stack:
        return sorted(_open_servers(data, stack))


def _postmaster_pid(data: Path) -> int | None:
    try:
        return int((data / "postmaster.pid").read_text(encoding="ascii").split("\n", 1)[0])
    except (OSError, ValueError):
        return None


async def _end(pidfds: Sequence[int], number: signal.Signals, patience: float | None) -> list[int]:
    """Signals processes and returns those that have not ended when `patience` seconds have passed."""
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # a stopped process hears nothing else
    ended = await asyncio.gather(*(wait_pidfd(pidfd, patience) for pidfd in pidfds))
    return [pidfd for pidfd, gone in zip(pidfds, ended, strict=True) if not gone]


async def end_leftovers(data: Path) -> list[int]:
    """Ends every process of a server of `data` that is still there, in order, and returns when all are gone.

    The caller holds the directory's lock, so whatever runs was left behind by a kernel that died, or by a
    postmaster that died under its backends. Its shared memory is free once the last one has ended.

    Returns:
        The pids that were found.
    """
    found: set[int] = set()
    while True:
        with contextlib.ExitStack() as stack:
            batch = _open_servers(data, stack)
            if not batch:
                return sorted(found)
            found |= batch.keys()
            postmaster = batch.get(_postmaster_pid(data) or 0)
            if postmaster is not None:  # it ends its own backends
                left = await _end([postmaster], signal.SIGINT, FAST_STOP_S)
            else:  # backends without one notice and end, unless they are busy
                left = await _end(list(batch.values()), signal.SIGTERM, QUIT_STOP_S)
            left = await _end(left, signal.SIGQUIT, QUIT_STOP_S)
            if left:
                await _end(list(batch.values()), signal.SIGKILL, None)
