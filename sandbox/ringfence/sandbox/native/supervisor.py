"""Watches one sandbox from outside until nothing of it is left."""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from ringfence.sandbox.native import reaper
from ringfence.sandbox.native.cgroups import Groups
from ringfence.sandbox.native.identity import Record
from ringfence.sandbox.native.job import UPPER_NAME, Job
from ringfence.sandbox.native.meters import DiskMeter, MemoryMeter, Meter
from ringfence.sandbox.native.output import Sink

KILL, PAUSE, RESUME = b"k", b"p", b"r"
_ORDERS_BYTES = 4096
_MAX_VIEWS = 8
_STOP_INTERVAL_S = 0.1
_STOPPED_TRIES = 5000
_STOPPED_PAUSE_S = 0.001
_SIGKILL_EXIT = 137


def emit(event: dict[str, Any]) -> None:
    """Tell the kernel; if it is gone there is no one to tell."""
    line = json.dumps(event).encode() + b"\n"
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(1, line) :]


class Supervisor:
    """One sandbox from its go to its end."""

    def __init__(
        self, job: Job, groups: Groups, record: Record, link: socket.socket, sinks: list[Sink]
    ) -> None:
        self._job = job
        self._groups = groups
        self._record = record
        self._link = link
        self._sinks = sinks
        init = record["init"]
        if init is None:
            raise ValueError("the record has no first process")
        self._init = init["pid"]
        self._pidfd = os.pidfd_open(self._init)
        self._meters: list[tuple[str, Meter]] = []
        self._proc = -1
        self._status: int | None = None
        self._refusal = ""
        self._ended = ""
        self._paused_at: float | None = None
        self._deadline = time.monotonic() + job["timeout_s"]
        self._handlers: dict[int, Callable[[], bool]] = {}

    def run(self) -> dict[str, Any]:
        """Supervise to the end; returns the last event."""
        try:
            return self._watch()
        except BaseException:
            # INVARIANT: the record is removed only after the last process is dead, whatever goes wrong here.
            self._end("killed")
            os.waitpid(self._init, 0)
            raise

    def _watch(self) -> dict[str, Any]:
        poll = select.poll()
        self._handlers = {0: self._on_order, self._link.fileno(): self._on_packet}
        self._handlers |= {sink.source: sink.take for sink in self._sinks}
        for descriptor in (*self._handlers, self._pidfd):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(self._wait_ms()):
                if descriptor == self._pidfd:
                    return self._finish()
                if not self._handlers[descriptor]():
                    poll.unregister(descriptor)
            self._look()

    def _wait_ms(self) -> float | None:
        now = time.monotonic()
        if self._ended:
            return None
        if self._paused_at is not None:
            return None if "freezer" in self._groups.where else _STOP_INTERVAL_S * 1000
        due = min([self._deadline, *(meter.due for _, meter in self._meters)])
        return max(due - now, 0) * 1000 + 1

    def _look(self) -> None:
        """Whatever is due by now."""
        if self._ended:
            return
        now = time.monotonic()
        if self._paused_at is not None:
            if "freezer" not in self._groups.where:
                # A timer may wake a stopped process again; whoever is found awake is stopped again.
                with contextlib.suppress(OSError):
                    self._stop_all()
            return
        if now >= self._deadline:
            self._end("timeout")
        for reason, meter in self._meters:
            if not self._ended and now >= meter.due and meter.exceeded():
                self._end(reason)

    def _end(self, reason: str) -> None:
        """Kill the first process, and with it all of them. A frozen group has to thaw to die."""
        self._ended = self._ended or reason
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._paused_at is not None and "freezer" in self._groups.where:
            with contextlib.suppress(OSError):
                self._groups.freeze(False)

    def _on_order(self) -> bool:
        orders = os.read(0, _ORDERS_BYTES)
        for position in range(len(orders)):
            order = orders[position : position + 1]
            if order == KILL:
                self._end("killed")
            elif not self._ended and order == PAUSE:
                self._pause()
            elif not self._ended and order == RESUME:
                self._resume()
        if not orders:
            self._end("killed")
        return bool(orders)

    def _on_packet(self) -> bool:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._link, reaper.PACKET_BYTES, _MAX_VIEWS)
        except ConnectionResetError:
            return False  # it died with an order unread
        if not packet:
            return False
        message = json.loads(packet)
        if "views" in message:
            self._set_meters(descriptors)
        elif "refused" in message:
            self._refusal = message["refused"]
        elif "started" in message:
            emit({"event": "started", "init": self._record["init"], **self._facts(message["started"])})
        elif "exit" in message and not self._ended:
            self._status = message["exit"]
        return True

    def _facts(self, landlock: int) -> dict[str, Any]:
        return {"landlock": landlock, "groups": sorted(self._groups.where)}

    def _set_meters(self, views: list[int]) -> None:
        self._proc = views[0]
        if "memory" not in self._groups.where:
            self._meters.append(("memory", MemoryMeter(self._job["memory_bytes"], views[0], views[1])))
        if self._sinks:
            upper = f"{self._job['scratch']}/{UPPER_NAME}"
            limit = self._job["disk_bytes"]
            self._meters.append(("disk", DiskMeter(limit, upper, views[0], views[2], self._output_bytes)))

    def _output_bytes(self) -> int:
        return sum(sink.kept_bytes for sink in self._sinks)

    def _pause(self) -> None:
        if self._paused_at is None:
            try:
                if "freezer" in self._groups.where:
                    self._groups.freeze(True)
                else:
                    self._stop_all()
            except OSError as error:
                emit({"event": "paused", "error": str(error)})
                return
            self._paused_at = time.monotonic()
        emit({"event": "paused"})

    def _resume(self) -> None:
        if self._paused_at is not None:
            try:
                if "freezer" in self._groups.where:
                    self._groups.freeze(False)
                else:
                    self._link.send(reaper.CONTINUE)
            except OSError as error:
                emit({"event": "resumed", "error": str(error)})
                return
            # The clock of the timeout stands still while the sandbox does.
            self._deadline += time.monotonic() - self._paused_at
            self._paused_at = None
        emit({"event": "resumed"})

    def _stop_all(self) -> None:
        """Stop every process but the first, and see that they are stopped."""
        for _ in range(_STOPPED_TRIES):
            awake = [pid for pid, state in self._states() if pid != 1 and state not in "TtZXx"]
            if not awake:
                return
            self._link.send(reaper.STOP)
            time.sleep(_STOPPED_PAUSE_S)
        raise TimeoutError("a process of the sandbox does not stop")

    def _states(self) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        for name in os.listdir(self._proc):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError):
                descriptor = os.open(f"{name}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
                with open(descriptor, "rb") as file:
                    found.append((int(name), file.read().rpartition(b")")[2].split()[0].decode()))
        return found

    def _finish(self) -> dict[str, Any]:
        """The pid namespace is empty: take what is left in pipes, and say how it ended."""
        while self._link.fileno() >= 0 and _readable(self._link.fileno()) and self._on_packet():
            pass
        _, raw = os.waitpid(self._init, 0)
        for sink in self._sinks:
            sink.finish()
        if self._refusal:
            return {"event": "refused", "message": self._refusal}
        reason, code = self._verdict(raw)
        totals = [sink.total_bytes for sink in self._sinks]
        return {"event": "exit", "reason": reason, "code": code, "written": totals}

    def _verdict(self, raw: int) -> tuple[str, int]:
        status = self._status
        code = os.waitstatus_to_exitcode(raw if status is None else status)
        if self._ended and status is None:
            return self._ended, -signal.SIGKILL
        if self._groups.oom_kills() and code in (-signal.SIGKILL, _SIGKILL_EXIT):
            return "memory", -signal.SIGKILL
        if status is None and code >= 0:
            # The first process never leaves by itself without a report.
            return "signal", -signal.SIGKILL
        return ("signal" if code < 0 else "exit"), code


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))
