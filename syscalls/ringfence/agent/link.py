"""One call over one socket, for threads: any of them writes, one at a time reads. No thread of its own."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from ringfence.agent import wire
from ringfence.agent.http2 import Exchange
from ringfence.agent.status import Ended

if TYPE_CHECKING:
    from collections.abc import Iterable

READ_BYTES: Final = 256 << 10


class Link:
    """A connection with a call on it.

    Args:
        settings: where the kernel is.
        path: of the method.
        metadata: more header lines for the kernel.
        connected: a socket that leads to the kernel already, and is this one's from now on.

    Raises:
        Ended: nothing listens there.
    """

    def __init__(
        self,
        settings: wire.Settings,
        path: str,
        metadata: Iterable[tuple[str, str]] = (),
        connected: socket.socket | None = None,
    ) -> None:
        self._exchange = Exchange(path, most_bytes=wire.MESSAGE_BYTES, metadata=metadata)
        self._messages: list[bytes] = []
        self._mutex = threading.Lock()  # over the exchange and what follows
        self._reading = False
        self._closed = False
        self._socket = connected or _connect(settings.socket)
        self._socket.setblocking(False)
        # Rung by who leaves bytes for the reader to write, or gives the call up.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._poll.register(self._socket, select.POLLIN)

    def send(self, message: bytes, *, last: bool = False) -> None:
        """Send a message, at once or, where there is no room, by whoever reads next. Never waits.

        Args:
            message: serialised.
            last: whether nothing follows it.
        """
        with self._mutex:
            if self._closed:
                return
            try:
                self._exchange.send(message, last=last)
                if not self._write() and self._reading:
                    os.eventfd_write(self._bell, 1)
            except BaseException:  # interrupted by a signal: nobody knows what was written
                self._socket.shutdown(socket.SHUT_RDWR)
                raise

    def finish(self) -> None:
        """Say that no more messages come. Never waits."""
        with self._mutex:
            if self._closed:
                return
            self._exchange.finish()
            if not self._write() and self._reading:
                os.eventfd_write(self._bell, 1)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next message. One thread at a time.

        Raises:
            Ended: there is no other; `OK`: the kernel ended the call in order.
            TimeoutError: nothing came for so long.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._mutex:
            if self._closed:
                raise Ended("CANCELLED", "the connection is closed")
            self._reading = True
        try:
            while not self._messages:
                self._step(deadline)
            return self._messages.pop(0)
        finally:
            with self._mutex:
                self._reading = False
                if self._closed:
                    self._release()

    def _step(self, deadline: float | None) -> None:
        """Wait until something can be done, and do it."""
        with self._mutex:
            ended = self._exchange.ended
            wanted = select.POLLIN if self._write() else select.POLLIN | select.POLLOUT
            if ended is not None:
                raise ended
            self._poll.modify(self._socket, wanted)
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        found = self._poll.poll(left_ms)
        if not found and left_ms is not None:
            raise TimeoutError
        with self._mutex, contextlib.suppress(BlockingIOError):
            for descriptor, events in found:
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
                elif events & ~select.POLLOUT:
                    self._messages += self._exchange.receive(self._read())

    def _read(self) -> bytes:
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return b""  # it was reset

    def _write(self) -> bool:
        """Write what can be written; whether nothing is left."""
        waiting = self._exchange.outgoing
        try:
            while waiting:
                done = self._socket.send(waiting)
                del waiting[:done]
        except BlockingIOError:
            return False
        except OSError:
            waiting.clear()  # the reader sees the end, after what came before it
        return True

    def close(self) -> None:
        """Give the call up, from any thread; who waits in `receive` sees its end."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._exchange.cancel()
            self._write()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            os.eventfd_write(self._bell, 1)
            if not self._reading:
                self._release()

    def _release(self) -> None:
        self._socket.close()
        os.close(self._bell)


def _connect(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        found.connect(path)
    except OSError as error:
        found.close()
        raise Ended("UNAVAILABLE", f"{error.strerror}: `{path}`") from None
    return found
