"""The stream for asyncio.

One task of the library's own keeps the connection: it and the writer it starts have no lane, and gRPC's own
tasks are created from it, so that none of them takes a creation index from the program's tasks. Callers
only wait for a future: a cancelled caller can't cut a write in two, which would end the stream for all.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
import grpc.aio
from ringfence.agent import wire
from ringfence.agent.core import PATIENCE_S, Core, Patience, Pending, judge_break
from ringfence.agent.errors import KernelGone, NoLane, RingfenceError
from ringfence.v1.syscalls_pb2 import StreamRequest, StreamResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.agent.lanes import Lane
    from ringfence.v1.syscalls_pb2 import Reply, Welcome

QUIET_S: Final = 0.5
EOF: Final[object] = cast("Any", grpc.aio).EOF


class _Waiting(Pending):
    """A call whose task waits for a future."""

    __slots__ = ("future",)

    def __init__(self, lane: Lane, size: int, future: asyncio.Future[None]) -> None:
        super().__init__(lane, size)
        self.future = future

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _Outbox:
    """Frames to send, in order, and a way to wait for them that costs nothing while there are some."""

    def __init__(self) -> None:
        self._frames: collections.deque[StreamRequest] = collections.deque()
        self._wanted: asyncio.Future[None] | None = None

    def put(self, frame: StreamRequest) -> None:
        self._frames.append(frame)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    def refill(self, frames: list[StreamRequest]) -> None:
        """Replace what is there by all that has no answer."""
        self._frames.clear()
        for frame in frames:
            self.put(frame)

    async def get(self) -> StreamRequest:
        while not self._frames:
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        return self._frames.popleft()


class AsyncSession:
    """All calls of a process, from any number of tasks of one event loop. Make it with `open`."""

    def __init__(self, settings: wire.Settings, patience_s: float) -> None:
        self._settings = settings
        self._core: Core[_Waiting] = Core()
        self._patience = Patience(patience_s)
        self._outbox = _Outbox()
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
        self._outbox.put(self._core.admit(pending, action, arguments))
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
        if waiting and self.busy is not None:
            self._outbox.put(wire.lanes_frame(len(waiting) + self.busy(waiting)))

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
        failure: grpc.RpcError | None = None
        try:
            await self._connection()
        except grpc.RpcError as error:
            failure = error
        except TimeoutError:
            self._core.end(wire.silent_error(self._settings))
        except RingfenceError as error:
            self._core.end(error)
        if self._core.fatal is None:
            await self._after_break(failure)

    async def _after_break(self, failure: grpc.RpcError | None) -> None:
        fatal = judge_break(self._core, self._patience, failure)
        try:
            if fatal is None:
                await asyncio.sleep(self._patience.pause_s())
        except KernelGone as gone:
            fatal = gone
        if fatal is not None:
            self._core.end(fatal)

    async def _connection(self) -> None:
        """Run one connection to its end."""
        async with grpc.aio.insecure_channel(self._settings.target, options=wire.CHANNEL_OPTIONS) as channel:
            call = cast("Any", channel).stream_stream(
                wire.STREAM,
                request_serializer=StreamRequest.SerializeToString,
                response_deserializer=StreamResponse.FromString,
            )()
            async with asyncio.timeout(self._patience.left_s()):
                with contextlib.suppress(asyncio.InvalidStateError):  # then reading says why
                    await call.write(wire.hello_frame(self._settings))
                first = await call.read()
            if first is EOF:
                return
            self._core.greet(first.welcome)
            frames = self._core.unanswered()
            self._patience.welcomed(owes=bool(frames))
            self._outbox.refill(frames)
            if not self._ready.done():
                self._ready.set_result(None)
            await self._pump(call)

    async def _pump(self, call: Any) -> None:
        """Move frames both ways until the stream breaks."""
        writer = asyncio.create_task(self._write(call), name="ringfence-writer")
        try:
            while (frame := await call.read()) is not EOF:
                self._patience.answered()
                answered = self._core.settle(frame.reply)
                if answered is not None:
                    answered.wake()
                    if self._core.pending:
                        self._look_when_quiet()
        finally:
            writer.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await writer

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outbox.get())
