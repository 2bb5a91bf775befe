"""The door of one agent: a gRPC server of its own on a socket of its own, so that the socket is the identity.

One bidirectional stream carries most calls; unary methods of the table serve callers without the library. A client that
dies cancels nothing: its calls go on, are recorded, and answer the next process from the journal.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from ringfence.kernel.config import CALLS_IN_FLIGHT_MAX, MESSAGE_BYTES_MAX
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.outcomes import Request
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.server.status import abort_with
from ringfence.kernel.server.wire import Context, aio, rpc
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.syscalls.codec import arguments_from_message, result_to_message
from ringfence.syscalls.errors import BadCredential, Internal, InvalidRequest
from ringfence.syscalls.table import Row
from ringfence.v1 import syscalls_pb2 as pb

log = logging.getLogger(__name__)

PROTOCOL = 1
HELLO_S = 10.0
SERVICE = "ringfence.v1.SyscallService"
STREAMS_MAX = 32

_LANE = re.compile(r"[0-9A-Za-z._-]{1,256}").fullmatch

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.max_metadata_size", 16 << 10),
)


class AgentDoor:
    """Serves one agent while one program of it lives."""

    def __init__(
        self, thread: Thread, dispatcher: Dispatcher, on_park: Callable[[Thread, Answer], Awaitable[None]]
    ) -> None:
        self._thread = thread
        self._dispatcher = dispatcher
        self._on_park = on_park
        self._server: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._occurrences: Counter[str] = Counter()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open(self, directory: Path, table: dict[str, Row], uid: int | None) -> None:
        """Listen on `syscall.sock` in `directory`, readable to the agent alone."""
        path = _clear(directory)
        server = aio.server(options=_OPTIONS)
        handlers: dict[str, Any] = {
            "Stream": rpc.stream_stream_rpc_method_handler(
                self._stream,
                request_deserializer=pb.StreamRequest.FromString,
                response_serializer=pb.StreamResponse.SerializeToString,
            )
        }
        for row in table.values():
            handlers[row.method] = rpc.unary_unary_rpc_method_handler(
                self._unary(row),
                request_deserializer=row.request_class.FromString,
                response_serializer=row.response_class.SerializeToString,
            )
        server.add_generic_rpc_handlers((rpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        _admit_agent(path, uid)
        self._server = server

    async def close(self) -> None:
        """Stop listening; calls in flight go on without a client."""
        if self._server is not None:
            await self._server.stop(grace=0.1)
            self._server = None

    # -- the stream -----------------------------------------------------------------------------------------------

    async def _stream(self, _requests: object, context: Context) -> None:
        if not await self._greet(context):
            return
        writing = asyncio.Lock()
        pending: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        def ended(task: asyncio.Task[None]) -> None:
            pending.discard(task)
            self._tasks.discard(task)

        while True:
            if len(pending) >= CALLS_IN_FLIGHT_MAX:
                # Back-pressure before the next read: a flood waits in the client's own buffers.
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            frame = await context.read()
            if frame is aio.EOF:
                break
            if frame.WhichOneof("frame") != "call":
                text = "after the first frame only `call` frames may come"
                await abort_with(context, InvalidRequest(text))
            task = loop.create_task(self._serve(frame.call, context, writing))
            pending.add(task)
            self._tasks.add(task)
            task.add_done_callback(ended)
        if pending:
            await asyncio.wait(pending)

    async def _greet(self, context: Context) -> bool:
        try:
            async with asyncio.timeout(HELLO_S):
                frame = await context.read()
        except TimeoutError:
            await abort_with(context, BadCredential("no `hello` frame came; the stream is closed"))
            return False
        if frame is aio.EOF:
            return False
        if frame.WhichOneof("frame") != "hello" or not self._thread.token_matches(frame.hello.token):
            await abort_with(
                context, BadCredential("the token is not the one of this start; use RINGFENCE_TOKEN")
            )
            return False
        if frame.hello.protocol != PROTOCOL:
            text = f"protocol {frame.hello.protocol} is not served; this kernel speaks protocol {PROTOCOL}"
            await abort_with(context, InvalidRequest(text))
            return False
        thread = self._thread
        checkpoint = thread.replay.checkpoint
        welcome = pb.Welcome(
            agent=thread.id,
            thread=thread.record.thread,
            branch=thread.branch,
            restored=checkpoint is not None,
            checkpoint=b"" if checkpoint is None else checkpoint.state,
            checkpoint_version=0 if checkpoint is None else checkpoint.schema_version,
            next_step=thread.replay.first_step,
            next_child=0 if checkpoint is None else checkpoint.next_child,
        )
        await context.write(pb.StreamResponse(welcome=welcome))
        return True

    async def _serve(self, call: pb.Call, context: Context, writing: asyncio.Lock) -> None:
        if not _LANE(call.lane) or call.lane == OPERATOR_LANE:
            # The operator's lane is neither replayed nor settled with an agent's calls.
            text = "a lane's id is `0`, or its parent's with a dot and a number; at most 256 characters"
            answer = Answer(step=0, failure=InvalidRequest(text))
        else:
            request = Request(
                lane=call.lane,
                lane_step=call.step,
                action=call.action,
                raw=call.arguments,
                deadline_ms=call.deadline_ms,
            )
            answer = await self._answer(request)
        response = pb.StreamResponse()
        reply = response.reply
        reply.id, reply.step, reply.replayed = call.id, answer.step, answer.replayed
        if answer.failure is not None:
            failure = answer.failure
            reply.failure.reason = failure.reason
            reply.failure.message = failure.message
            reply.failure.metadata.update(failure.metadata)
        else:
            reply.result = answer.result or b"null"
        try:
            async with writing:
                await context.write(response)
        except (rpc.RpcError, aio.BaseError, asyncio.InvalidStateError):
            # A client that is gone can't be told; its successor reads the answer from the journal.
            pass
        if answer.park:
            await self._on_park(self._thread, answer)

    async def _answer(self, request: Request) -> Answer:
        try:
            return await self._dispatcher.call(self._thread, request)
        except Exception:
            # A bug must reach the agent as an answer: one that never comes would hold it for ever.
            log.exception("bug in the path of %s of %s", request.action[:64], self._thread.id)
            text = "a bug in Ringfence stopped this call; the kernel's log has the details"
            return Answer(step=0, failure=Internal(text))

    # -- unary ----------------------------------------------------------------------------------------------------

    def _unary(self, row: Row) -> Callable[[Message, Context], Awaitable[Message | None]]:
        async def serve(message: Message, context: Context) -> Message | None:
            metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
            scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
            if scheme.lower() != "bearer" or not self._thread.token_matches(token):
                await abort_with(
                    context, BadCredential("send `authorization: Bearer TOKEN` with RINGFENCE_TOKEN")
                )
            raw = arguments_from_message(row, message)[1]
            # A caller that is gone cancels nothing.
            answer = await asyncio.shield(asyncio.create_task(self._in_turn(row.action, raw)))
            if answer.failure is not None:
                if answer.park:
                    await self._on_park(self._thread, answer)
                await abort_with(context, answer.failure)
            return result_to_message(row, answer.result or b"{}")

        return serve

    async def _in_turn(self, action: str, raw: bytes) -> Answer:
        """Callers without lanes are matched by what they ask and how often: a restarted one finds its answers again.

        The steps of a lane come in order, so of several that ask the same at once each waits for the one before.
        """
        lane = f"call-{hashlib.sha256(action.encode() + bytes(1) + raw).hexdigest()[:24]}"
        async with self._turns[lane]:
            step = self._occurrences[lane]
            answer = await self._answer(Request(lane=lane, lane_step=step, action=action, raw=raw))
            if answer.step:
                # Nothing recorded, as while the database is away: the next one takes this place.
                self._occurrences[lane] += 1
            return answer


def _clear(directory: Path) -> Path:
    """Make the socket's directory and remove what an earlier start left in it."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory.chmod(0o755)
    path = directory / "syscall.sock"
    path.unlink(missing_ok=True)
    return path


def _admit_agent(path: Path, uid: int | None) -> None:
    # The directory is mounted into one sandbox only and its parents are closed to others on the host.
    path.chmod(0o666)
    if uid is not None:
        os.chown(path, uid, -1)
