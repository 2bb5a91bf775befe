"""First processes of sandboxes, as the warden has them: forked by a zygote on request, and a spare of each kind kept ready.

A spare has done all that is the same for every sandbox, which is most of the work of a start, and waits for a job.
"""

# The warden works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from ringfence.sandbox.native import launcher, users, zygote
from ringfence.sandbox.native.cgroups import Groups, label
from ringfence.sandbox.native.job import GROUPS_FIX, PACKET_BYTES, First, Refused, wall

_ZYGOTE_DESCRIPTOR = 3
_CREDENTIALS = struct.Struct("=iII")
"""Pid, uid and gid of who has sent a packet, as Linux tells them."""
_KINDS_MOST = 4
"""Of no more kinds at a time is a spare one kept, those that were asked for last."""
_QUIET_S = 0.05
"""Spare ones are made when nothing was started for so long: they must not be in the way of what starts."""


class Lost(Exception):
    """The sandbox died before its program ran, without having been refused. It may be made again."""


class Kind(NamedTuple):
    """What tells spare first processes apart.

    Attributes:
        warm: forked from a warm interpreter.
        records: as in `Job`.
        user: the form of the wall `uid`.
        readonly: as in `Order`.
        tcp: whether the program may make TCP sockets.
    """

    warm: bool
    records: str
    user: str
    readonly: tuple[str, ...] = ()
    tcp: bool = False


class FirstProcess:
    """One first process, asked for or there. Belongs to one thread at a time.

    Attributes:
        link: to it.
        pid: as this process sees it; 0: not known yet, see `settle`.
        groups: the control groups of its sandbox, without limits yet.
        shown: directories that it is to show as soon as it can.
        tcp: as in `Kind`.
    """

    def __init__(self, link: socket.socket, lease: users.Lease | None) -> None:
        self.link = link
        self.pid = 0
        self.groups = Groups({})
        self.shown: tuple[str, ...] = ()
        self.tcp = False
        self._lease = lease

    def settle(self, *, spare: bool = False) -> None:
        """Wait until it is there, and have it enter its control groups.

        Args:
            spare: it will wait for a job, and can rehearse what is to come.

        Raises:
            Refused: it can't be had.
            Lost: it died.
        """
        if self.pid:
            return
        self.pid = self._meet()
        if self._lease is not None:
            self._map()
        with wall("control groups", GROUPS_FIX):
            opened = self.groups.admit(self.pid)
        try:
            with contextlib.suppress(OSError):  # it has died, which whoever gives it a job sees
                told = json.dumps([self.shown, sorted(self.groups.where), spare, self.tcp])
                socket.send_fds(self.link, [told.encode()], opened)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _meet(self) -> int:
        """Hear its first word; its pid is Linux' own word."""
        packet, told, _, _ = self.link.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        if not packet:
            raise Lost("it died, or the process that sandboxes are forked from did")
        if packet != zygote.HERE:
            raise Refused(json.loads(packet)["refused"])
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)  # descriptors come later in its place
        return _CREDENTIALS.unpack(told[0][2])[0]

    def _map(self) -> None:
        """Write the maps of its user namespace, for which it waits; it goes if that is refused."""
        answer = b"refused"
        try:
            cast("users.Lease", self._lease).write(self.pid)
            answer = launcher.MAPPED
        finally:
            with contextlib.suppress(OSError):  # it has died; what it says next tells so
                self.link.send(answer)

    def _give_back(self) -> None:
        if self._lease is not None:
            self._lease.close()

    def waits(self) -> bool:
        """Whether it still waits for a job, having said nothing."""
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        return not poll.poll(0)

    def discard(self) -> None:
        """Let go of one that has no job, or end of one that has; returns when it is dead."""
        with contextlib.suppress(Refused, Lost, OSError):
            self.settle()
        self.link.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # ours, and not waited for: the pid is still its own
            self.reap()
        self._give_back()
        self.groups.remove()

    def reap(self) -> int:
        """Take the status of one that is dead or dying."""
        pid, self.pid = self.pid, 0
        try:
            return os.waitpid(pid, 0)[1]
        finally:
            self._give_back()


class Starter:
    """Starts zygotes.

    INVARIANT: by one thread that lives as long as this process. To Linux it is a thread that is a process's parent: when
    that ends, so do all first processes that were forked by the zygotes it has started (PR_SET_PDEATHSIG).
    """

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def start(self, argv: list[str], env: dict[str, str], link: int) -> None:
        """Start one, with its end of a link to this process.

        Raises:
            OSError: no process can be started.
        """
        failed: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

        def work() -> None:
            actions = [(os.POSIX_SPAWN_DUP2, link, _ZYGOTE_DESCRIPTOR)]
            try:
                os.posix_spawn(argv[0], argv, env, file_actions=actions, setsid=True)
            except OSError as error:
                failed.put(error)
            else:
                failed.put(None)

        self._orders.put(work)
        if (error := failed.get()) is not None:
            raise error

    def _serve(self) -> None:
        while True:
            self._orders.get()()


class Zygote:
    """One zygote, started when it is needed and again when it has died."""

    def __init__(self, starter: Starter, argv: list[str], env: dict[str, str], *, greets: bool) -> None:
        self._starter = starter
        self._argv = argv
        self._env = env
        self._greets = greets
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._refused = 0

    def fork(self, first: First, records: str, lease: users.Lease | None) -> FirstProcess | None:
        """Ask for a first process.

        Args:
            first: what it is to be.
            records: as in `Job`.
            lease: its sub-uid, if it is to have one; taken over by what is returned.

        Returns:
            None: this zygote can't be had.

        Raises:
            OSError: no process can be started.
        """
        directory = os.open(records, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            lent = [theirs.fileno(), directory]
            with self._lock:
                if self._send(first, lent) or (self._start() and self._send(first, lent)):
                    return FirstProcess(ours, lease)
            ours.close()
            return None
        finally:
            theirs.close()
            os.close(directory)

    def _send(self, first: First, lent: list[int]) -> bool:
        if self._link is None:
            return False
        try:
            socket.send_fds(self._link, [json.dumps(first).encode()], lent)
        except OSError:
            self._link.close()  # it died since the last one
            self._link = None
            return False
        return True

    def _start(self) -> bool:
        if self._refused > 1:
            return False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._starter.start(self._argv, self._env, theirs.fileno())
        if self._greets and ours.recv(PACKET_BYTES) != zygote.READY:
            # It can't import what agents need, or it was killed, which is worth one more attempt.
            self._refused += 1
            ours.close()
            return False
        self._link = ours
        return True


class Pool:
    """Both zygotes, and a spare first process of each kind that was asked for.

    Args:
        warm_environment: the environment of warm interpreters; None: there are none.
        ids: sub-uids for programs; None: there are none.
    """

    def __init__(self, warm_environment: dict[str, str] | None, ids: users.Ids | None) -> None:
        self._leases = None if ids is None else users.Leases(ids)
        starter = Starter()
        cold = launcher.command("zygote", "main", str(_ZYGOTE_DESCRIPTOR))
        self._cold = Zygote(starter, cold, {}, greets=False)
        self._warm: Zygote | None = None
        if warm_environment is not None:
            environment = launcher.warm_environment(warm_environment)
            warm = launcher.warm_command(_ZYGOTE_DESCRIPTOR)
            self._warm = Zygote(starter, warm, environment, greets=True)
        self._lock = threading.Lock()
        self._spares: dict[Kind, FirstProcess | None] = {}
        self._asked = threading.Event()
        self._adding = threading.Lock()
        self._closed = False
        self._mounts = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        threading.Thread(target=self._refill, daemon=True).start()

    @property
    def sub(self) -> bool:
        """Whether there are sub-uids."""
        return self._leases is not None

    def take(self, kind: Kind) -> FirstProcess:
        """Give a first process, a spare one where there is one. It may have to `settle`.

        Raises:
            OSError: no zygote can be started.
            Refused: no sub-uid is free.
        """
        with self._lock:
            stale = self._stale()
            spare = self._spares.pop(kind, None)
            if len(self._spares) == _KINDS_MOST and (oldest := self._spares.pop(next(iter(self._spares)))):
                stale.append(oldest)
            self._spares[kind] = None
        self._asked.set()
        for each in stale:
            each.discard()
        if spare is not None:
            if spare.waits():
                return spare
            spare.discard()
        return self._fork(kind)

    def close(self) -> None:
        """End the spare ones; returns when nothing is left of any."""
        # INVARIANT: none is half made when this process ends: nobody would remove its control groups before the next kernel.
        with self._adding, self._lock:
            self._closed = True
            left = [spare for spare in self._spares.values() if spare is not None]
            self._spares.clear()
        for spare in left:
            spare.discard()

    def _fork(self, kind: Kind) -> FirstProcess:
        first: First = {"user": kind.user}
        lease = self._leases.take() if self._leases is not None and kind.user == users.SUB else None
        try:
            found: FirstProcess | None = None
            if kind.warm and self._warm is not None:
                found = self._warm.fork(first, kind.records, lease)
            if found is None:
                found = cast("FirstProcess", self._cold.fork(first, kind.records, lease))
        except BaseException:
            if lease is not None:
                lease.close()
            raise
        found.shown, found.tcp = kind.readonly, kind.tcp
        # While it is being forked. By the name of this process, see `cgroups.sweep`.
        found.groups = Groups.create(label(kind.records, f"{os.getpid()}.{os.urandom(8).hex()}"))
        return found

    def _stale(self) -> list[FirstProcess]:
        """Spares that were made before the host's mounts changed: they would show a job what was there before."""
        poll = select.poll()
        poll.register(self._mounts, select.POLLPRI)
        if not poll.poll(0):
            return []
        stale = [spare for spare in self._spares.values() if spare is not None]
        self._spares = dict.fromkeys(self._spares)
        return stale

    def _refill(self) -> None:
        while True:
            self._asked.wait()
            while self._asked.is_set():
                self._asked.clear()
                time.sleep(_QUIET_S)
            for kind in [kind for kind, spare in list(self._spares.items()) if spare is None]:
                with self._adding, contextlib.suppress(OSError, Refused, Lost):
                    self._add(kind)

    def _add(self, kind: Kind) -> None:
        if self._closed:
            return
        spare = self._fork(kind)
        try:
            spare.settle(spare=True)
        except BaseException:
            spare.discard()
            raise
        with self._lock:
            if not self._closed and self._spares.get(kind) is None:
                self._spares[kind] = spare
                return
        spare.discard()
