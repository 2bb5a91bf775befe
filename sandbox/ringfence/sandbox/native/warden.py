"""The one process outside all sandboxes of a kernel: has them made, watches each in a thread, reports how each ended.

It talks with the kernel over one packet socket of JSON; descriptors come along. When the kernel's end closes, it ends every
sandbox, removes what they left, and goes. When it dies itself, every first process sees its link to it end, and goes too.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import threading
from typing import Any, cast

from ringfence.sandbox.native import linux, users
from ringfence.sandbox.native.firsts import Pool
from ringfence.sandbox.native.job import PACKET_BYTES, Order
from ringfence.sandbox.native.supervisor import KILL, Supervisor

_LENT = 5
"""Most descriptors that come with a packet: a job, the program's standard streams, and who gets the listener of its doors."""
_STACK_BYTES = 256 << 10


class Warden:
    """All sandboxes of one kernel."""

    def __init__(
        self, kernel: socket.socket, warm_environment: dict[str, str] | None, ids: users.Ids | None
    ) -> None:
        self._kernel = kernel
        self._pool = Pool(warm_environment, ids)
        self._lock = threading.Lock()
        self._watched: dict[str, tuple[Supervisor, threading.Thread]] = {}

    def serve(self) -> None:
        """Take orders until the kernel is gone and nothing is left of any sandbox."""
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(
                    self._kernel, PACKET_BYTES, _LENT, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:
                break
            if not packet:
                break
            message = cast("dict[str, Any]", json.loads(packet))
            if "start" in message:
                self._start(message["start"], descriptors)
            else:
                self._order(message["name"], message["order"])
        with self._lock:
            left = list(self._watched.values())
        for supervisor, _ in left:
            supervisor.order(KILL)
        for _, thread in left:
            thread.join()
        self._pool.close()

    def _start(self, order: Order, descriptors: list[int]) -> None:
        supervisor = Supervisor(order, descriptors, self._pool.take, self._emit, sub=self._pool.sub)
        thread = threading.Thread(target=self._watch, args=(order["name"], supervisor), daemon=True)
        with self._lock:
            self._watched[order["name"]] = (supervisor, thread)
        thread.start()

    def _order(self, name: str, order: str) -> None:
        with self._lock:
            found = self._watched.get(name)
        if found is not None:  # otherwise it has ended, and the kernel is being told
            found[0].order(order)

    def _watch(self, name: str, supervisor: Supervisor) -> None:
        last = supervisor.run()
        with self._lock:
            del self._watched[name]
        supervisor.close()
        self._emit({"name": name, **last})

    def _emit(self, event: dict[str, Any]) -> None:
        """Tell the kernel; if it is gone there is no one to tell."""
        with contextlib.suppress(OSError):
            self._kernel.send(json.dumps(event).encode())


def main(descriptor: str, warm_environment: str, sub_uids: str) -> None:
    """Serve the kernel at the other end of a packet socket.

    Args:
        descriptor: number of the socket.
        warm_environment: the environment that warm interpreters are started with, as JSON; `null`: there are none.
        sub_uids: whether programs may run as sub-uids, as JSON.
    """
    kernel = socket.socket(fileno=int(descriptor))
    os.set_inheritable(kernel.fileno(), False)
    linux.close_from(3, frozenset({kernel.fileno()}))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # First processes of sandboxes become children of this process when what forked them goes.
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ids = users.find()[0] if json.loads(sub_uids) and os.geteuid() != 0 else None
    threading.stack_size(_STACK_BYTES)
    # Nothing is ever found by a path that depends on where the kernel was started.
    os.chdir("/")
    Warden(kernel, json.loads(warm_environment), ids).serve()
