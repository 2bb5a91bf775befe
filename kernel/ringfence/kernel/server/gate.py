"""What one agent may make the kernel hold at its door: streams, calls, and bytes of arguments.

Nothing is refused for it: whoever is beyond a bound waits, and what it sends waits in its own buffers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError
from ringfence.kernel.config import ARGUMENT_BYTES_IN_FLIGHT_MAX, CALLS_IN_FLIGHT_MAX
from ringfence.kernel.server.wire import aio

STREAMS_MAX = 16
"""Streams of one agent that are served at a time; the library opens one for each process."""

UNARY_MAX = 16
"""Calls without a stream of one agent that are served at a time."""

COMPLAIN_EVERY_S = 60.0
"""How often the kernel's log gets a line about what comes in at one agent's door."""


class Hold:
    """What one call holds of its agent's bounds."""

    __slots__ = ("_gate", "_size")

    def __init__(self, gate: Gate, size: int) -> None:
        self._gate = gate
        self._size = size
        gate.change(1, size)

    def shrink(self, size: int) -> None:
        """The call has let go of its arguments but for `size` bytes."""
        if size < self._size:
            self._gate.change(0, size - self._size)
            self._size = size

    def end(self) -> None:
        """The call is over. More than once does nothing."""
        if self._size >= 0:
            self._gate.change(-1, -self._size)
            self._size = -1


class Gate:
    """Calls under way of one agent, over all its streams.

    Attributes:
        open: whether one more call may be read. It may then be larger than what is left, once for each stream.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._bytes = 0
        self._room = asyncio.Event()
        self.open = True

    async def wait(self) -> None:
        """Wait until it is open."""
        while not self.open:
            await self._room.wait()

    def change(self, calls: int, size: int) -> None:
        """Count what a call takes or gives back."""
        self._calls += calls
        self._bytes += size
        is_open = self._calls < CALLS_IN_FLIGHT_MAX and self._bytes < ARGUMENT_BYTES_IN_FLIGHT_MAX
        if is_open is not self.open:
            self.open = is_open
            if is_open:
                self._room.set()
            else:
                self._room.clear()


class Turnstile(aio.ServerInterceptor):
    """Lets a bounded number of streams and unary calls in, before anything of theirs is read."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._streams = asyncio.Semaphore(STREAMS_MAX)
        self._unary = asyncio.Semaphore(UNARY_MAX)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Wait for a place and keep it as long as gRPC's own task for this call lives."""
        places = self._streams if details.method == self._stream else self._unary
        await places.acquire()
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs every call in a task of its own
        task.add_done_callback(lambda _task: places.release())
        return await continuation(details)


class Complaints:
    """The lines of the kernel's log about one agent's door: at most one a minute, whatever comes in."""

    def __init__(self, log: logging.Logger, agent: str) -> None:
        self._log = log
        self._agent = agent
        self._silent_until = 0.0
        self._withheld = 0

    def say(self, text: str, *, trace: bool = False) -> None:
        """Write a line, with the traceback of the exception being handled where `trace` is set."""
        if time.monotonic() < self._silent_until:
            self._withheld += 1
            return
        more = f" ({self._withheld} more since the last line)" if self._withheld else ""
        self._log.log(
            logging.ERROR if trace else logging.WARNING, "%s: %s%s", self._agent, text, more, exc_info=trace
        )
        self._silent_until = time.monotonic() + COMPLAIN_EVERY_S
        self._withheld = 0


def lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserializer that gives None for bytes that are no message: gRPC's own answer to an exception is a traceback."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return None

    return read
