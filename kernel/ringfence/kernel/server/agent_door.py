"""The door of one agent: a gRPC server of its own on a socket of its own, so that the socket is the identity.

One bidirectional stream carries most calls; unary methods of the table serve callers without the library. A client that
dies cancels nothing: its calls go on, are recorded, and answer the next process from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from ringfence.kernel.config import MESSAGE_BYTES_MAX
from ringfence.kernel.descriptors import Descriptors
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.kernel_log import PLACE
from ringfence.kernel.outcomes import Request, printable
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.server.gate import Complaints, Gate, Hold, Turnstile, lenient
from ringfence.kernel.server.replies import Replies
from ringfence.kernel.server.status import end_with
from ringfence.kernel.server.wire import Context, aio, rpc
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.kernel.waits import show
from ringfence.syscalls.codec import arguments_from_message, result_to_message
from ringfence.syscalls.errors import BadCredential, Internal, InvalidRequest, SyscallError
from ringfence.syscalls.table import Row
from ringfence.v1 import syscalls_pb2 as pb

log = logging.getLogger(__name__)

PROTOCOL = 1
SOCKET = "syscall.sock"
HELLO_S = 10.0
SERVICE = "ringfence.v1.SyscallService"
STREAM = f"/{SERVICE}/Stream"
CONNECTION_STREAMS_MAX = 32
HANDSHAKE_S = 10.0
IDLE_S = 300.0

_LANE = re.compile(r"[0-9A-Za-z._-]{1,256}").fullmatch

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    # Windows that grow with the speed of the line would take in megabytes for each stream that is not read yet.
    ("grpc.http2.bdp_probe", 0),
    # A connection that says nothing, or has nothing to do, gives its place back.
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_concurrent_streams", CONNECTION_STREAMS_MAX),
    ("grpc.max_metadata_size", 16 << 10),
)


class AgentDoor:
    """Serves one agent while one program of it lives."""

    def __init__(
        self,
        thread: Thread,
        dispatcher: Dispatcher,
        on_park: Callable[[Thread, Answer], Awaitable[None]],
        descriptors: Descriptors,
    ) -> None:
        self._thread = thread
        self._dispatcher = dispatcher
        self._on_park = on_park
        self._server: Any = None
        self._descriptors = descriptors
        self._connections = 0
        self._gate = Gate()
        self._complaints = Complaints(log, thread.id)
        self._streams = 0
        self._generation = thread.generation
        self._directory = Path()
        self._tasks: set[asyncio.Task[None]] = set()
        self._occurrences: Counter[str] = Counter()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open(self, directory: Path, table: dict[str, Row], uid: int | None) -> None:
        """Listen on `syscall.sock` in `directory`, readable to the agent alone.

        Raises:
            NoDescriptors: the kernel can't serve one more agent.
        """
        path = _clear(directory)
        self._directory = directory
        self._connections = self._descriptors.take()
        # Above it gRPC closes a connection as soon as it has accepted it.
        bound = ("grpc.max_allowed_incoming_connections", self._connections)
        server = aio.server(options=(*_OPTIONS, bound), interceptors=(Turnstile(STREAM),))
        handlers: dict[str, Any] = {
            "Stream": rpc.stream_stream_rpc_method_handler(
                self._stream,
                request_deserializer=lenient(pb.StreamRequest.FromString),
                response_serializer=pb.StreamResponse.SerializeToString,
            )
        }
        for row in table.values():
            handlers[row.method] = rpc.unary_unary_rpc_method_handler(
                self._unary(row),
                request_deserializer=lenient(row.request_class.FromString),
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
            self._directory.joinpath(SOCKET).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._directory.rmdir()
        if self._connections:
            self._descriptors.give_back(self._connections)
            self._connections = 0

    # -- the stream -----------------------------------------------------------------------------------------------

    async def _stream(self, _requests: object, context: Context) -> None:
        if not await self._greet(context):
            return
        self._streams += 1
        try:
            await self._frames(context)
        finally:
            # Nobody speaks for the lanes of a program whose stream is gone, until it has another.
            self._streams -= 1
            self._lanes(0)

    async def _frames(self, context: Context) -> None:
        replies = Replies(context, self._parks)
        writing = self._keep(replies.write())
        try:
            while True:
                if not self._gate.open:
                    # Back-pressure before the next read: a flood waits in the client's own buffers.
                    await self._gate.wait()
                frame = await context.read()
                if frame is aio.EOF:
                    break
                if frame is not None and frame.WhichOneof("frame") == "lanes":
                    self._lanes(frame.lanes)
                    continue
                if frame is None or frame.WhichOneof("frame") != "call":
                    text = "after the first frame only `call` and `lanes` frames may come"
                    end_with(context, self._misread() if frame is None else InvalidRequest(text))
                    return
                self._take(frame.call, replies)
                # The call has what it needs: the frame may be megabytes, and the next one may not come for hours.
                del frame
        finally:
            # What is still under way is recorded, whether or not there is somebody to tell.
            replies.close()
        await writing

    def _take(self, call: pb.Call, replies: Replies) -> None:
        """Start one call; its reply goes out when there is one."""
        if call.lanes != self._thread.live_lanes:
            self._lanes(call.lanes)
        raw = call.arguments
        hold = Hold(self._gate, len(raw) + len(call.action) + len(call.lane))
        request = Request(
            lane=call.lane,
            lane_step=call.step,
            action=call.action,
            raw=raw,
            deadline_ms=call.deadline_ms,
            shrink=hold.shrink,
        )
        reply = replies.expect(call.id, hold.end)
        if not _LANE(request.lane) or request.lane == OPERATOR_LANE:
            # The operator's lane is neither replayed nor settled with an agent's calls.
            text = "a lane's id is `0`, or its parent's with a dot and a number; at most 256 characters"
            reply(Answer(step=0, failure=InvalidRequest(text)))
        elif not self._dispatcher.begin(self._thread, request, reply):
            self._keep(self._serve(request, reply))

    async def _serve(self, request: Request, reply: Callable[[Answer], None]) -> None:
        reply(await self._answer(request))

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _parks(self, answer: Answer) -> None:
        async def park() -> None:
            await self._on_park(self._thread, answer)

        self._keep(park())

    def _lanes(self, lanes: int) -> None:
        """Take how many lanes of the program go on. With several streams none speaks for all of it."""
        thread = self._thread
        if thread.generation != self._generation:
            return  # a stream of the program before
        thread.live_lanes = lanes if self._streams == 1 else 0
        if thread.waits:
            show(thread)

    async def _greet(self, context: Context) -> bool:
        try:
            async with asyncio.timeout(HELLO_S):
                frame = await context.read()
        except TimeoutError:
            end_with(context, BadCredential("no `hello` frame came; the stream is closed"))
            return False
        if frame is aio.EOF:
            return False
        if frame is None:
            end_with(context, self._misread())
            return False
        if frame.WhichOneof("frame") != "hello" or not self._thread.token_matches(frame.hello.token):
            end_with(context, BadCredential("the token is not the one of this start; use RINGFENCE_TOKEN"))
            return False
        if frame.hello.protocol != PROTOCOL:
            text = f"protocol {frame.hello.protocol} is not served; this kernel speaks protocol {PROTOCOL}"
            end_with(context, InvalidRequest(text))
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

    def _misread(self) -> InvalidRequest:
        self._complaints.say("bytes that are no message came in at its socket")
        return InvalidRequest("the bytes are no message of `ringfence.v1`; see its .proto files")

    async def _answer(self, request: Request) -> Answer:
        try:
            return await self._dispatcher.call(self._thread, request)
        except Exception:  # noqa: BLE001 - a bug is logged, as often as the log can bear
            # A bug must reach the agent as an answer: one that never comes would hold it for ever.
            self._complaints.say(f"bug in the path of {printable(request.action)}", trace=True)
            text = f"a bug in Ringfence stopped this call; report it with what {PLACE} says of it"
            return Answer(step=0, failure=Internal(text))

    # -- unary ----------------------------------------------------------------------------------------------------

    def _unary(self, row: Row) -> Callable[[Message | None, Context], Awaitable[Message]]:
        async def serve(message: Message | None, context: Context) -> Message:
            metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
            scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
            if scheme.lower() != "bearer" or not self._thread.token_matches(token):
                end_with(context, BadCredential("send `authorization: Bearer TOKEN` with RINGFENCE_TOKEN"))
                return row.response_class()
            if message is None:
                end_with(context, self._misread())
                return row.response_class()
            await self._gate.wait()
            # A caller that is gone cancels nothing.
            answer = await asyncio.shield(asyncio.create_task(self._in_turn(row, message)))
            if answer.failure is not None:
                if answer.park:
                    await self._on_park(self._thread, answer)
                if answer.withheld:
                    # Until the program is ended, and this door is closed with it.
                    await asyncio.Event().wait()
                end_with(context, answer.failure)
                return row.response_class()
            return result_to_message(row, answer.result or b"{}")

        return serve

    async def _in_turn(self, row: Row, message: Message) -> Answer:
        """Callers without lanes are matched by what they ask and how often: a restarted one finds its answers again.

        The steps of a lane come in order, so of several that ask the same at once each waits for the one before.
        """
        hold = Hold(self._gate, message.ByteSize())
        refusal: SyscallError | None = None
        try:
            raw = arguments_from_message(row, message)[1]
        except SyscallError as error:
            raw, refusal = message.SerializeToString(deterministic=True), error
        action = row.action
        lane = f"call-{hashlib.sha256(action.encode() + bytes(1) + raw).hexdigest()[:24]}"
        try:
            async with self._turns[lane]:
                step = self._occurrences[lane]
                answer = await self._answer(
                    Request(lane=lane, lane_step=step, action=action, raw=raw, refusal=refusal)
                )
                if answer.step:
                    # Nothing recorded, as while the database is away: the next one takes this place.
                    self._occurrences[lane] += 1
                return answer
        finally:
            hold.end()


def _clear(directory: Path) -> Path:
    """Make the socket's directory and remove what an earlier start left in it."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory.chmod(0o755)
    path = directory / SOCKET
    path.unlink(missing_ok=True)
    return path


def _admit_agent(path: Path, uid: int | None) -> None:
    # The directory is mounted into one sandbox only and its parents are closed to others on the host.
    path.chmod(0o666)
    if uid is not None:
        os.chown(path, uid, -1)
