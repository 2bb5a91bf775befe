"""A cable between two TCP ends that a test can cut, and pull out for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Cable:
    """Carries connections to an address.

    Attributes:
        address: where this end is.
        carried: connections that came since it was made.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.carried = 0
        self._plugged = True
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Every connection breaks; new ones are carried."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def pull(self) -> None:
        """Every connection breaks, and new ones break at once."""
        self._plugged = False
        self.cut()

    def plug(self) -> None:
        self._plugged = True

    def close(self) -> None:
        self._plugged = False
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._plugged:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target, 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self.carried += 1
            with self._lock:
                self._ends += [near, far]
            left = [2]
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(one, other, left), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, one: socket.socket, other: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if left[0] == 0:
                one.close()
                other.close()
                self._ends = [end for end in self._ends if end not in (one, other)]


@contextlib.contextmanager
def cable_to(target: str) -> Iterator[Cable]:
    cable = Cable(target)
    try:
        yield cable
    finally:
        cable.close()
