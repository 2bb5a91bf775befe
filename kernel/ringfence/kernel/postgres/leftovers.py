"""What a dead kernel or a dead postmaster left running: is there anything, who is it, and how does it end.

That something lives is told by a lock that the server and all it forks inherit, and hold until the last of
them has ended. Who it is, is told by where a process stands and what it runs, and by the cluster's pid file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.kernel.postgres.errors import PostgresError
from ringfence.kernel.postgres.process import FAST_STOP_S, QUIT_STOP_S, wait_pidfd

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROGRAM = "postgres"
_GONE = " (deleted)"
_CLOCK_SLACK_S = 60
_LOOK_S = 0.05


def take_server_lock(path: Path) -> int:
    """Opens and takes the lock that tells that the server lives. The descriptor is for the server to inherit.

    Raises:
        BlockingIOError: a server lives.
        OSError: the file can't be used.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle


def server_lives(lock: Path) -> bool:
    """Whether any process of the server is there, be it one that this user may not look at."""
    try:
        os.close(take_server_lock(lock))
    except BlockingIOError:
        return True
    return False


def _stands_in(pid: int, data: os.stat_result) -> bool | None:
    """Whether a process stands in a data directory and is PostgreSQL. None: this user may not look."""
    try:
        here = os.stat(f"/proc/{pid}/cwd")  # noqa: PTH116 - a magic link, not a path
        program = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115 - a magic link, not a path
    except PermissionError:
        return None
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
        if name.isdigit() and _stands_in(int(name), place):
            pidfd = _open_pidfd(int(name), stack)
            # Looked at again behind the pidfd: a number used anew since the first look is not it.
            if pidfd is not None and _stands_in(int(name), place):
                found[int(name)] = pidfd
    return found


def _open_pidfd(pid: int, stack: contextlib.ExitStack) -> int | None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, pidfd)
    return pidfd


def server_pids(data: Path) -> list[int]:
    """The running processes of the server of a data directory, by identity and never by name alone."""
    with contextlib.ExitStack() as stack:
        return sorted(_open_servers(data, stack))


def _pid_file(data: Path) -> tuple[int, int] | None:
    """The postmaster's pid and start (Unix seconds) as the cluster's pid file has them."""
    try:
        lines = (data / "postmaster.pid").read_text(encoding="utf-8").split("\n")
        return int(lines[0]), int(lines[2])
    except (OSError, ValueError, IndexError):
        return None


def _began(pid: int) -> float:
    """When a process began, in Unix seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    boot = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        if line.startswith("btime ")
    )
    return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _is_stated(pid: int, began: int, data: Path) -> bool:
    """Whether the process that a pid file names fits it: program, user and start. For want of a closer look."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 - not a path
        return name == _PROGRAM and owner == data.stat().st_uid and abs(_began(pid) - began) < _CLOCK_SLACK_S
    except (OSError, ValueError, IndexError):
        return False


def _hidden_postmaster(data: Path) -> int | None:
    """The process that the cluster's pid file names, if it fits and this user may not look where it stands.

    So it is for root in most containers, which lacks CAP_SYS_PTRACE.
    """
    stated = _pid_file(data)
    if stated is None or not _is_stated(*stated, data) or _stands_in(stated[0], data.stat()) is not None:
        return None
    return stated[0]


async def _end(pidfds: Sequence[int], number: signal.Signals, patience: float | None) -> list[int]:
    """Signals processes and returns those that have not ended when `patience` seconds have passed."""
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # a stopped process hears nothing else
    ended = await asyncio.gather(*(wait_pidfd(pidfd, patience) for pidfd in pidfds))
    return [pidfd for pidfd, gone in zip(pidfds, ended, strict=True) if not gone]


async def _end_batch(batch: dict[int, int], postmaster: int | None) -> None:
    """Ends the processes of one server: in order, then at once, then by force."""
    if postmaster is not None:  # it ends its own backends
        left = await _end([postmaster], signal.SIGINT, FAST_STOP_S)
    else:  # backends without one notice and end, unless they are busy
        left = await _end(list(batch.values()), signal.SIGTERM, QUIT_STOP_S)
    left = await _end(left, signal.SIGQUIT, QUIT_STOP_S)
    if left:
        await _end(list(batch.values()), signal.SIGKILL, None)


async def _wait_unheld(lock: Path, patience: float) -> bool:
    """Waits for the last process of a server to end; false when `patience` seconds passed before."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while server_lives(lock):
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


async def end_leftovers(data: Path, lock: Path) -> list[int]:
    """Ends every process of a server of `data` that is still there, in order, and returns when all are gone.

    The caller holds the kernel's lock on the directory, so whatever runs was left behind by a kernel that died,
    or by a postmaster that died under its backends. Its shared memory is free once the last one has ended.

    Returns:
        The pids that were found.

    Raises:
        PostgresError: something lives that can't be recognised for sure; it is left alone.
    """
    found: set[int] = set()
    while True:
        with contextlib.ExitStack() as stack:
            batch = _open_servers(data, stack)
            stated = _pid_file(data)
            postmaster = batch.get(stated[0]) if stated is not None else None
            hidden = _hidden_postmaster(data)
            if hidden is not None:
                # It fits, and the lock says that a server of this very directory lives. Else it may be another's.
                postmaster = _open_pidfd(hidden, stack) if server_lives(lock) else None
                if postmaster is None or _hidden_postmaster(data) != hidden:
                    raise _in_use(data, hidden)
                batch = {hidden: postmaster}
            if batch:
                found |= batch.keys()
                await _end_batch(batch, postmaster)
            elif await _wait_unheld(lock, QUIT_STOP_S):
                return sorted(found)
            else:
                raise _in_use(data, None)


def _in_use(data: Path, pid: int | None) -> PostgresError:
    who = f"process {pid}" if pid is not None else "processes of an earlier server"
    return PostgresError(
        f"`{data}` is in use by {who}, which this kernel didn't start: stop that, then start again"
    )
