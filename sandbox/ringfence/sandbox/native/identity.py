"""Who a process is beyond its pid, and the records by which a later kernel finds what an earlier one left."""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH104, PTH108, PTH123

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
from typing import TypedDict

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PARENT_FIELD, _START_TIME_FIELD = 1, 19
"""Indices among the fields that follow the name in /proc/PID/stat."""


class Process(TypedDict):
    """A pid and the clock tick of the boot at which it started: together never the same twice in a boot."""

    pid: int
    start: int


class Record(TypedDict):
    """One sandbox, written before its program runs and removed after its end.

    Attributes:
        boot: id of the boot that the processes belong to.
        launcher: the warden that watches it.
        init: first process of the pid namespace; None until it is known. When it dies, all of the namespace does.
        groups: control group directories.
        freezer: controller directory and version that can thaw it; None: there is none.
    """

    name: str
    agent: str
    boot: str
    launcher: Process
    init: Process | None
    groups: list[str]
    freezer: tuple[str, int] | None


@functools.cache
def boot_id() -> str:
    """The id of this boot."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """Clock tick at which `pid` started, None if there is no such process."""
    return _fact(pid, _START_TIME_FIELD)


def parent(pid: int) -> int | None:
    """Pid of its parent, None if there is no such process."""
    return _fact(pid, _PARENT_FIELD)


def _fact(pid: int, field: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name stands in parentheses and may hold any byte, a closing parenthesis too.
            return int(file.read().rpartition(b")")[2].split()[field])
    except (FileNotFoundError, ProcessLookupError):
        return None


def process(pid: int) -> Process:
    """The identity of a running process.

    Raises:
        ProcessLookupError: it is gone.
    """
    start = start_time(pid)
    if start is None:
        raise ProcessLookupError(f"process {pid} is gone")
    return {"pid": pid, "start": start}


def open_process(identity: Process) -> int | None:
    """A pidfd for exactly this process, None if it is gone; another one with its pid is never returned."""
    try:
        descriptor = os.pidfd_open(identity["pid"])
    except ProcessLookupError:
        return None
    # INVARIANT: the start time is read after the pidfd is open, so the pid can't change hands between the two.
    if start_time(identity["pid"]) != identity["start"]:
        os.close(descriptor)
        return None
    return descriptor


def kill_process(identity: Process) -> int | None:
    """Send SIGKILL to exactly this process.

    Returns:
        A pidfd to wait on with `wait_dead`, None if it was gone already.

    Raises:
        PermissionError: it belongs to another user.
    """
    descriptor = open_process(identity)
    if descriptor is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    return descriptor


def wait_dead(descriptor: int, timeout_s: float) -> None:
    """Wait until the process of a pidfd is dead, and close the pidfd.

    Raises:
        TimeoutError: it did not die.
    """
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError("a process does not die")
    finally:
        os.close(descriptor)


def write_record(directory: str, record: Record) -> None:
    """Write a record whole, replacing the one of the same name.

    It is not synced: it matters only as long as this boot lasts, and so long every process sees what is written.
    """
    path = f"{directory}/{record['name']}.json"
    descriptor = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(record).encode())
    finally:
        os.close(descriptor)
    os.rename(f"{path}.tmp", path)


def remove_record(directory: str, name: str) -> None:
    """Forget a sandbox that is gone."""
    for suffix in (".json.tmp", ".json"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{directory}/{name}{suffix}")
