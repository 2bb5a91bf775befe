"""Watches one sandbox from outside until nothing of it is left. Runs in a thread of the warden."""

# The warden works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, cast

from ringfence.sandbox.native import forms, identity, landlock, reaper, users
from ringfence.sandbox.native.cgroups import Groups
from ringfence.sandbox.native.firsts import FirstProcess, Kind, Lost
from ringfence.sandbox.native.job import PACKET_BYTES, UPPER_NAME, Order, Refused, wall
from ringfence.sandbox.native.meters import DiskMeter, MemoryMeter, Meter
from ringfence.sandbox.native.output import Sink, command_sinks, lay_overlay

KILL, PAUSE, RESUME = "kill", "pause", "resume"
_MAX_VIEWS = 8
_OF_COMMAND = 2
"""Descriptors that come with a command: a program brings those for its output too."""
_STOP_INTERVAL_S = 0.1
_STOPPED_TRIES = 5000
_WAITING_TRIES = 200
_PAUSE_S = 0.001
_PATIENCE_MS = 10
_SIGNAL_PATIENCE_S = 5.0
_SIGKILL_EXIT = 137


class Supervisor:
    """One sandbox from its order to its end.

    Args:
        order: what to make.
        descriptors: the job and the program's standard streams, or without output for a command; taken over.
        take: gives a first process.
        emit: tells the kernel.
        sub: whether there are sub-uids for programs.
    """

    def __init__(
        self,
        order: Order,
        descriptors: list[int],
        take: Callable[[Kind], FirstProcess],
        emit: Callable[[dict[str, Any]], None],
        *,
        sub: bool,
    ) -> None:
        self._order = order
        self._lent = descriptors
        self._on_overlay = bool(order["lower"]) and len(descriptors) > _OF_COMMAND
        self._sub = sub
        self._take = take
        self._tell = emit
        self._orders: collections.deque[str] = collections.deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._groups = Groups({})
        self._sinks: list[Sink] = []
        self._first: FirstProcess | None = None
        self._pidfd = -1
        self._meters: list[tuple[str, Meter]] = []
        self._proc = -1
        self._views: list[int] = []
        self._status: int | None = None
        self._refusal = ""
        self._ended = ""
        self._signals = [0, 0]  # that the first process was asked to send to all, and that it has sent
        self._paused_at: float | None = None
        self._deadline = 0.0
        self._handlers: dict[int, Callable[[], bool]] = {}

    def order(self, order: str) -> None:
        """Ask for KILL, PAUSE or RESUME, from any thread. Must not be called after `close`."""
        self._orders.append(order)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Let go of what orders come by, and of what leads back to this object."""
        os.close(self._bell)
        self._handlers.clear()

    def run(self) -> dict[str, Any]:
        """Make and watch the sandbox; returns the last event, when nothing of it is left."""
        try:
            self._make()
            last = self._watch()
        except Refused as refusal:
            # What can't be done to a process because it is gone was not refused.
            gone = isinstance(refusal.__cause__, ProcessLookupError)
            last = {"event": "lost" if gone else "refused", "message": str(refusal)}
        except ProcessLookupError:
            last = {"event": "lost", "message": "its first process died"}
        except Lost as lost:
            last = {"event": "lost", "message": str(lost)}
        except BaseException as error:  # noqa: BLE001 - whatever it is, the kernel has to be told
            last = {"event": "lost", "message": f"its supervisor failed: {type(error).__name__}: {error}"}
        finally:
            self._let_go()
        return last

    def _let_go(self) -> None:
        # INVARIANT: the record is removed only after the last process is dead, whatever went wrong before.
        if self._first is not None:
            self._end("killed")
            self._first.discard()
        for sink in self._sinks:
            sink.close()
        for descriptor in (self._pidfd, *self._views, *self._lent):
            if descriptor >= 0:
                os.close(descriptor)
        self._groups.remove()
        identity.remove_record(self._order["records"], self._order["name"])

    def _make(self) -> None:
        """Have a first process, and give it its job once a later kernel could find it."""
        order = self._order
        with wall(
            "first process", "raise the limits of processes and memory around the kernel, or end other agents"
        ):
            # Commands change files of the kernel's user, and stay that user.
            user = users.form(order["uid"], sub=self._sub and not order["lower"])
            readonly, tcp = tuple(order["readonly"]), bool(order["loopback"])
            self._first = self._take(Kind(order["warm"], order["records"], user, readonly, tcp))
        self._groups = self._first.groups
        lay_overlay(order)
        if order["lower"] and not self._on_overlay:
            self._sinks = command_sinks(order)
        self._groups.limit(order["memory_bytes"], order["pids"] + 1, order["cpu"])
        # INVARIANT: held against what this sandbox has, not against what a probe found: a group may fail to be made now.
        forms.demand(order["require"], self._forms(), user_namespaces=order["uid"] is None)
        self._lent += [sink.take_writer() for sink in self._sinks]
        self._first.settle()
        pid = self._first.pid
        self._pidfd = os.pidfd_open(pid)
        with contextlib.suppress(OSError):  # it has died; the watch sees that
            socket.send_fds(self._link, [json.dumps(sorted(self._groups.where)).encode()], self._lent)
        while self._lent:
            os.close(self._lent.pop())
        # While it builds the sandbox.
        record: identity.Record = {
            "name": order["name"],
            "agent": order["agent"],
            "boot": identity.boot_id(),
            "launcher": identity.process(os.getpid()),
            "init": identity.process(pid),
            "groups": self._groups.directories(),
            "freezer": self._groups.where.get("freezer"),
        }
        with wall("identity record", "the data directory must be writable and have room"):
            # INVARIANT: no program runs before its record is on disk, so a later kernel finds everything.
            identity.write_record(order["records"], record)
        self._deadline = time.monotonic() + order["timeout_s"]
        with contextlib.suppress(OSError):  # as above
            self._link.send(b"run")

    @property
    def _link(self) -> socket.socket:
        return cast("FirstProcess", self._first).link

    def _watch(self) -> dict[str, Any]:
        poll = select.poll()
        self._handlers = {self._bell: self._on_order, self._link.fileno(): self._on_packet}
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
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._paused_at is not None and "freezer" in self._groups.where:
            with contextlib.suppress(OSError):
                self._groups.freeze(False)

    def _on_order(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._orders:
            order = self._orders.popleft()
            if order == KILL:
                self._end("killed")
            elif not self._ended:
                self._pause() if order == PAUSE else self._resume()
        return True

    def _on_packet(self) -> bool:
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                self._link, PACKET_BYTES, _MAX_VIEWS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False  # it died with an order unread
        if not packet:
            return False
        message = json.loads(packet)
        if "views" in message:
            self._set_meters(descriptors, message["views"])
        elif "refused" in message:
            self._refusal = message["refused"]
        elif "started" in message:
            self._emit(
                "started",
                pid=cast("FirstProcess", self._first).pid,
                landlock=message["started"],
                groups=sorted(self._groups.where),
                forms=self._forms(),
            )
        elif "sent" in message:
            self._signals[1] += 1
        elif "exit" in message and not self._ended:
            self._status = message["exit"]
        return True

    def _emit(self, event: str, **facts: Any) -> None:
        self._tell({"name": self._order["name"], "event": event, **facts})

    def _forms(self) -> dict[str, str]:
        # A program on an overlay is the kernel's user, as a command is; of that nobody asks.
        uid = users.form(self._order["uid"], sub=self._sub and not self._on_overlay)
        return forms.held(self._groups.where, landlock=landlock.version(), uid=uid)

    def _set_meters(self, views: list[int], places: int) -> None:
        self._views = views
        self._proc = views[0]
        if "memory" not in self._groups.where:
            sockets = views[places] if len(views) > places else None
            meter = MemoryMeter(self._order["memory_bytes"], views[0], views[1], sockets)
            self._meters.append(("memory", meter))
        if self._order["lower"]:
            upper = f"{self._order['scratch']}/{UPPER_NAME}"
            limit = self._order["disk_bytes"]
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
                self._emit("paused", error=str(error))
                return
            self._paused_at = time.monotonic()
        self._emit("paused")

    def _resume(self) -> None:
        if self._paused_at is not None:
            try:
                if "freezer" in self._groups.where:
                    self._groups.freeze(False)
                else:
                    self._signal_all(reaper.CONTINUE)
            except OSError as error:
                self._emit("resumed", error=str(error))
                return
            # The clock of the timeout stands still while the sandbox does.
            self._deadline += time.monotonic() - self._paused_at
            self._paused_at = None
        self._emit("resumed")

    def _stop_all(self) -> None:
        """Stop every process but the first, and see that they are stopped.

        One that waits without end in Linux itself, as after vfork, stops on its way back: until then it runs nothing.
        """
        for tries in range(_STOPPED_TRIES):
            stopped = "TtZXx" if tries < _WAITING_TRIES else "TtZXxD"
            awake = [pid for pid, state in self._states() if pid != 1 and state not in stopped]
            if not awake:
                return
            self._signal_all(reaper.STOP)
            time.sleep(_PAUSE_S)
        raise TimeoutError("a process of the sandbox does not stop")

    def _signal_all(self, order: bytes) -> None:
        """Have the first process send a signal to all others; returns when it has.

        INVARIANT: no signal is on its way when an order is answered, so none reaches the processes behind a later one.
        """
        self._link.send(order)
        self._signals[0] += 1
        until = time.monotonic() + _SIGNAL_PATIENCE_S
        while self._signals[1] < self._signals[0]:
            if KILL in self._orders or time.monotonic() > until:
                raise TimeoutError("the first process of the sandbox does not answer")
            if _readable(self._link.fileno(), _PATIENCE_MS) and not self._on_packet():
                raise ConnectionResetError("the first process of the sandbox is gone")

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
        first = cast("FirstProcess", self._first)
        raw = first.reap()
        first.link.close()
        self._first = None
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


def _readable(descriptor: int, wait_ms: int = 0) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(wait_ms))
