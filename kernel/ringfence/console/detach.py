"""Starts a kernel in the background, and follows one to its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from ringfence.console.errors import ConsoleError, ExitCode, os_error_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ringfence.console.session import Session

_POLL_S = 0.05
_STATUS_TIMEOUT_S = 5.0
_LOG_BYTES_MAX = 16 << 20
_TAIL_BYTES = 64 << 10
_PREFIX = "ringfence: "


def start_in_background(session: Session, arguments: Sequence[str], dsn: str | None) -> dict[str, Any]:
    """Start `ringfence up` in a session of its own and wait until it answers.

    There is no deadline: a database recovering from a crash takes its time, and the child says so by living.

    Args:
        session: names the data directory, which is created where it doesn't exist.
        arguments: further arguments of `up`; paths in them are absolute.
        dsn: handed over in the environment, because a command line is visible to every user.

    Returns:
        The kernel's status.

    Raises:
        ConsoleError: the kernel ended before it answered; carries its message and exit code.
    """
    log_path = session.data / "kernel.log"
    try:
        session.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = _open_log(log_path)
    except OSError as error:
        raise ConsoleError(
            f"`{session.data}` can't be a data directory: {os_error_text(error)}; give another with `--data`",
            ExitCode.USAGE,
        ) from None
    environment = dict(os.environ)
    if dsn is not None:
        environment["RINGFENCE_DSN"] = dsn
    with log:
        offset = log.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "ringfence.console", "up", "--data", str(session.data), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=session.data,
            env=environment,
            start_new_session=True,
        )
    try:
        return _await_answer(session, child, log_path, offset)
    except BaseException:
        # Nobody learned of this kernel, so nobody would stop it.
        if child.poll() is None:
            child.terminate()
        raise


def wait_until_gone(pidfd: int | None, session: Session) -> None:
    """Wait until a kernel has left.

    Args:
        pidfd: descriptor of its process; None where this host can't see it, then its socket is watched.
        session: how to reach it.
    """
    if pidfd is not None:
        select.select([pidfd], [], [])
        return
    while True:
        try:
            session.dial().close()
        except ConsoleError:
            return
        time.sleep(_POLL_S)


def pidfd_of(pid: object) -> int | None:
    """Open a descriptor of a kernel's process; None where it can't be seen from here. To be closed."""
    if not isinstance(pid, int) or pid <= 1:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _open_log(path: Path) -> Any:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES_MAX:
            path.replace(path.with_suffix(".log.1"))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")


def _await_answer(session: Session, child: subprocess.Popen[bytes], log: Path, offset: int) -> dict[str, Any]:
    while True:
        code = child.poll()
        if code is not None:
            raise _ended(code, log, offset)
        with contextlib.suppress(ConsoleError):
            status = _status(session)
            # INVARIANT: only our own child counts. Another kernel of this directory makes the child end.
            if status.get("pid") == child.pid:
                return status
        time.sleep(_POLL_S)


def _status(session: Session) -> dict[str, Any]:
    client = session.dial()
    try:
        return client.call("Status", _STATUS_TIMEOUT_S)
    finally:
        client.close()


def _ended(code: int, log: Path, offset: int) -> ConsoleError:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # It may have been turned over meanwhile; then all of it is new.
        file.seek(max(offset if offset <= size else 0, size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    if said and code > 0:
        return ConsoleError("\n".join(said), code)
    if code < 0:
        with contextlib.suppress(ValueError):
            return ConsoleError(
                f"the kernel was ended by {signal.Signals(-code).name} while it started; see `{log}`"
            )
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return ConsoleError(f"the kernel ended while it started: {last}; see `{log}`", max(code, ExitCode.UNWELL))
