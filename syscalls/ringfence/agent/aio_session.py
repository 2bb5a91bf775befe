"""The stream for asyncio.

One task of the library's own keeps the connection: it has no lane, so that it takes no creation index from
the program's tasks. Callers write without waiting and then only wait for a future: a cancelled caller can't
cut a write in two, which would end the stream for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError
from ringfence.agent import wire
from ringfence.agent.core import PATIENCE_S, Core, Patience, Pending, judge_break
from ringfence.agent.errors import KernelGone, NoLane, RingfenceError
from ringfence.agent.http2 import Exchange
from ringfence.agent.status import Ended
from ringfence.v1.syscalls_pb2 import StreamRequest, StreamResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.agent.lanes import Lane
    from ringfence.v1.syscalls_pb2 import Reply, Welcome

QUIET_S: Final = 0.5
READ_BYTES: Final = 256 << 10


class _Waiting(Pending):
    """A call whose task waits for a future."""

    __slots__ = ("future",)

    def __init__(self, lane: Lane, size: int, future: asyncio.Future[None]) -> None:
        super().__init__(lane, size)
        self.future = future

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _Link:
    """One connection with a call on it. Make it with `open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._exchange = Exchange(wire.STREAM, most_bytes=wire.MESSAGE_BYTES)

    @classmethod
    async def open(cls, settings: wire.Settings) -> _Link:
        """Connect.

        Raises:
            Ended: nothing listens there.
        """
        try:
            return cls(*await asyncio.open_unix_connection(settings.socket, limit=READ_BYTES))
        except OSError as error:
            raise Ended("UNAVAILABLE", f"{error.strerror}: `{settings.socket}`") from None

    def send(self, frame: StreamRequest) -> None:
        """Send a frame; never waits."""
        self._exchange.send(frame.SerializeToString())
        self._write()

    def _write(self) -> None:
        if self._exchange.outgoing:
            self._writer.write(bytes(self._exchange.outgoing))
            self._exchange.outgoing.clear()

    async def receive(self) -> list[StreamResponse]:
        """Wait for the next frames.

        Raises:
            Ended: the stream is over.
        """
        while True:
            if self._exchange.ended is not None:
                raise self._exchange.ended
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                data = b""  # it was reset
            messages = self._exchange.receive(data)
            self._write()
            if messages:
                try:
                    return [StreamResponse.FromString(message) for message in messages]
                except DecodeError:
                    raise Ended("INTERNAL", "the kernel sent what is no frame") from None

    async def close(self) -> None:
        """Give the call up. Waits for nobody, also not for a kernel that reads no more."""
        self._exchange.cancel()
        self._write()
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class AsyncSession:
    """All calls of a process, from any number of tasks of one event loop. Make it with `open`."""

    def __init__(self, settings: wire.Settings, patience_s: float) -> None:
        self._settings = settings
        self._core: Core[_Waiting] = Core()
        self._patience = Patience(patience_s)
        self._link: _Link | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._keeper: asyncio.Task[None] | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self.busy: Callable[[frozenset[str]], int] | None = None

    @classmethod
    async def open(cls, settings: wire.Settings, *, patience_s: float = PATIENCE_S) -> AsyncSession:
        """Connect and wait for the welcome. Has to be called before lanes are given to new tasks.

        Raises:
            KernelGone: nothing answers within `patience_s`.
            BadCredential: the token isn't the one of this start.
        """
        session = cls(settings, patience_s)
        session._keeper = asyncio.create_task(session._keep(), name="ringfence-stream")
        try:
            await session._ready
        except BaseException:
            await session.close()
            raise
        fatal = session._core.fatal
        if fatal is not None:
            await session.close()
            raise fatal.again()
        return session

    @property
    def welcome(self) -> Welcome:
        """What the kernel said first."""
        if self._core.welcome is None:
            raise wire.closed_error()
        return self._core.welcome

    async def call(self, lane: Lane, action: str, arguments: bytes) -> Reply:
        """Make one call in a lane and wait for its answer.

        Raises:
            RingfenceError: the session ended. A failure of the call itself is in the reply.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise NoLane("the call comes from another event loop than the one of `agent.boot_async()`")
        pending = _Waiting(lane, len(arguments), self._loop.create_future())
        frame = self._core.admit(pending, action, arguments)
        if self._link is not None:  # else it is sent when there is one again
            self._link.send(frame)
        self._look_when_quiet()
        try:
            await pending.future
        except asyncio.CancelledError:
            self._core.forget(pending)
            raise
        return pending.outcome()

    def _look_when_quiet(self) -> None:
        if self._quiet is None and self.busy is not None:
            self._quiet = self._loop.call_later(QUIET_S, self._report)

    def _report(self) -> None:
        """Tell the kernel how many lanes go on, when nothing has come or gone for a while.

        A call can't say it: what other tasks will do in this turn of the loop isn't known then.
        """
        self._quiet = None
        waiting = frozenset(pending.lane.id for pending in self._core.pending.values())
        if waiting and self.busy is not None and self._link is not None:
            self._link.send(wire.lanes_frame(len(waiting) + self.busy(waiting)))

    async def close(self, *, flush_s: float = 0.0) -> None:
        """Wait up to `flush_s` seconds for calls of other tasks, then end the stream."""
        waiting = [pending.future for pending in self._core.pending.values()]
        if waiting and flush_s:
            await asyncio.wait(waiting, timeout=flush_s)
        self._core.end(wire.closed_error())
        if self._quiet is not None:
            self._quiet.cancel()
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    async def _keep(self) -> None:
        """Keep a stream open until the session ends for good."""
        try:
            while self._core.fatal is None:
                await self._attempt()
        finally:
            if self._core.fatal is None:  # a bug or a foreign cancellation: nobody may wait for ever
                self._core.end(KernelGone("the task that keeps the stream ended; start the agent again"))
            if not self._ready.done():
                self._ready.set_result(None)

    async def _attempt(self) -> None:
        """Open a stream and use it to its end, then wait where it is worth trying again."""
        try:
            await self._connection()
        except Ended as ended:
            await self._after_break(ended)
        except TimeoutError:
            self._core.end(wire.silent_error(self._settings))
        except RingfenceError as error:
            self._core.end(error)

    async def _after_break(self, ended: Ended) -> None:
        fatal = judge_break(self._core, self._patience, ended)
        try:
            if fatal is None:
                await asyncio.sleep(self._patience.pause_s())
        except KernelGone as gone:
            fatal = gone
        if fatal is not None:
            self._core.end(fatal)

    async def _connection(self) -> None:
        """Run one connection to its end.

        Raises:
            Ended: it has come.
        """
        async with asyncio.timeout(self._patience.left_s()) as patience:
            link = await _Link.open(self._settings)
            try:
                link.send(wire.hello_frame(self._settings))
                first, *frames = await link.receive()
                patience.reschedule(None)
                self._greet(link, first.welcome)
                while True:
                    self._settle(frames)
                    frames = await link.receive()
            finally:
                self._link = None
                await link.close()

    def _greet(self, link: _Link, welcome: Welcome) -> None:
        self._core.greet(welcome)
        owed = self._core.unanswered()
        self._patience.welcomed(owes=bool(owed))
        for frame in owed:
            link.send(frame)
        self._link = link
        if not self._ready.done():
            self._ready.set_result(None)

    def _settle(self, frames: list[StreamResponse]) -> None:
        for frame in frames:
            self._patience.answered()
            answered = self._core.settle(frame.reply)
            if answered is not None:
                answered.wake()
                if self._core.pending:
                    self._look_when_quiet()
