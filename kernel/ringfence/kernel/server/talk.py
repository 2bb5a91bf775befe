"""The stream that carries most calls: a greeting, then calls in any number, answered as their answers come."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError
from ringfence.kernel.outcomes import Request
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.server import frames
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.server.replies import Replies
from ringfence.kernel.server.status import end_with
from ringfence.kernel.server.stream import Stream
from ringfence.kernel.settled import Answer
from ringfence.syscalls.errors import BadCredential, InvalidRequest, SyscallError
from ringfence.v1 import syscalls_pb2 as pb

PROTOCOL: Final = 1
HELLO_S = 10.0
"""Time for a stream to say who it is."""

_READS = frozenset({"fs.read", "artifacts.get", "object.get"})
_LANE = re.compile(r"[0-9A-Za-z._-]{1,256}").fullmatch


class Talk:
    """Answers one stream."""

    def __init__(self, desk: Desk, stream: Stream) -> None:
        self._desk = desk
        self._stream = stream
        self._greeted = False
        self._open = False
        self._lane = "0"  # of the call before: looked at once for all that follow in it
        self._replies = Replies(stream, desk.park)
        self._hello: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """It is its turn."""
        self._hello = asyncio.get_running_loop().call_later(HELLO_S, self._silent)
        self._stream.serve()

    def message(self, data: bytes) -> None:
        """Take a frame."""
        try:
            frame = pb.StreamRequest.FromString(data)
        except DecodeError:
            end_with(self._stream, self._desk.misread())
            return
        kind = frame.WhichOneof("frame")
        if kind == "call" and self._greeted:
            self._take(frame.call)
        elif not self._greeted:
            self._greet(frame, kind)
        elif kind == "lanes":
            self._desk.bounds.calm.spend(1)  # it carries no call
            self._desk.lanes(frame.lanes)
        else:
            text = "after the first frame only `call` and `lanes` frames may come"
            end_with(self._stream, InvalidRequest(text))

    def ended(self) -> None:
        """No more calls come: what is owed is still answered."""
        if self._greeted:
            self._leave()
            self._replies.close()
        else:
            self._stream.end(frames.OK)

    def gone(self) -> None:
        """The stream is over. What is still under way is recorded, whether or not there is somebody to tell."""
        if self._hello is not None:
            self._hello.cancel()
        self._leave()
        self._replies.abandon()
        self._desk.bounds.streams.leave(self)

    def _leave(self) -> None:
        if self._open:
            self._open = False
            self._desk.stream_ends()

    def _silent(self) -> None:
        if self._stream.unheard:
            # It came, and waits until calls of others end.
            self._hello = asyncio.get_running_loop().call_later(HELLO_S, self._silent)
            return
        end_with(self._stream, BadCredential("no `hello` frame came; the stream is closed"))

    def _greet(self, frame: pb.StreamRequest, kind: str | None) -> None:
        thread = self._desk.thread
        error: SyscallError | None = None
        if kind != "hello" or not thread.token_matches(frame.hello.token):
            error = BadCredential("the token is not the one of this start; use RINGFENCE_TOKEN")
        elif frame.hello.protocol != PROTOCOL:
            text = f"protocol {frame.hello.protocol} is not served; this kernel speaks protocol {PROTOCOL}"
            error = InvalidRequest(text)
        if error is not None:
            end_with(self._stream, error)
            return
        if self._hello is not None:
            self._hello.cancel()
        self._greeted = self._open = True
        self._desk.stream_opens()
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
        self._stream.send(pb.StreamResponse(welcome=welcome).SerializeToString())

    def _take(self, call: pb.Call) -> None:
        """Start one call; its reply goes out when there is one."""
        desk = self._desk
        if call.lanes != desk.thread.live_lanes:
            desk.lanes(call.lanes)
        lane, action, raw = call.lane, call.action, call.arguments
        reads = action in _READS
        owed = self._replies.expect(call.id, desk.bounds, len(raw) + len(action) + len(lane), reads=reads)
        reply = owed.reply
        request = Request(lane, call.step, action, raw, call.deadline_ms, owed.shrink)
        if lane != self._lane:
            if not _LANE(lane) or lane == OPERATOR_LANE:
                # The operator's lane is neither replayed nor settled with an agent's calls.
                text = "a lane's id is `0`, or its parent's with a dot and a number; at most 256 characters"
                reply(Answer(step=0, failure=InvalidRequest(text)))
                return
            self._lane = lane
        if not reads or desk.bounds.reads.enter(owed):
            self._begin(request, reply)
        else:
            desk.bounds.reads.take(owed, partial(self._begin, request, reply))

    def _begin(self, request: Request, reply: Callable[[Answer], None]) -> None:
        desk = self._desk
        try:
            begun = desk.dispatcher.begin(desk.thread, request, reply)
        except Exception:  # noqa: BLE001 - a bug is logged, as often as the log can bear
            reply(Answer(step=0, failure=desk.bug(request.action)))
            return
        if not begun:
            desk.keep(desk.serve(request, reply))
