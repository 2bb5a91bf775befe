"""The replies of one stream: how many are owed, and what follows when one is written."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ringfence.kernel.kernel_log import PLACE
from ringfence.kernel.server import frames
from ringfence.kernel.server.gate import Bounds, Hold, Reads
from ringfence.kernel.server.stream import Stream
from ringfence.kernel.settled import Answer
from ringfence.syscalls.errors import Internal
from ringfence.v1 import syscalls_pb2 as pb

log = logging.getLogger(__name__)


class Replies:
    """Writes replies in the order in which they come."""

    def __init__(self, stream: Stream, parks: Callable[[Answer], None]) -> None:
        """Prepare.

        Args:
            stream: where they go.
            parks: told of an answer after which the agent is to be parked, once it is written or withheld.
        """
        self._stream: Stream | None = stream
        self._parks = parks
        self._owed = 0
        self._closed = False

    def expect(self, call_id: int, bounds: Bounds, size: int, *, reads: bool) -> Owed:
        """Count a call.

        Args:
            call_id: the client's.
            bounds: of its agent's door.
            size: bytes that it holds of them.
            reads: whether its answer may be megabytes.
        """
        self._owed += 1
        return Owed(self, call_id, bounds, size, bounds.reads if reads else None)

    def close(self) -> None:
        """No more calls come: the stream ends when nothing is owed."""
        self._closed = True
        if not self._owed and self._stream is not None:
            self._stream.end(frames.OK)

    def abandon(self) -> None:
        """Nobody is there to read: calls may go on for days, and must not keep the stream and its connection meanwhile."""
        self._stream = None

    def reply(self, owed: Owed, answer: Answer) -> None:
        """Write the reply to a call, once."""
        stream = self._stream
        if answer.withheld or stream is None:
            self.sent(owed, answer)
            return
        try:
            data = _response(owed.call_id, answer)
        except Exception:
            # An answer that never comes would hold the caller for ever.
            log.exception("bug in the reply to step %d", answer.step)
            text = f"a bug in Ringfence keeps this answer from being sent; report it with what {PLACE} says of it"
            data = _response(owed.call_id, Answer(step=answer.step, failure=Internal(text)))
        if stream.send_now(data):
            if answer.park or self._closed:
                self.sent(owed, answer)
            else:
                self._owed -= 1
                owed.over()
        else:
            # A client that is gone can't be told; its successor reads the answer from the journal.
            # What waits is kept once: the answer itself is let go.
            park = answer if answer.park else None
            stream.send(data, lambda: self.sent(owed, park))

    def sent(self, owed: Owed, answer: Answer | None) -> None:
        """A reply is written, or nobody is there to take it."""
        self._owed -= 1
        owed.over()
        if answer is not None and answer.park:
            self._parks(answer)
        if self._closed and not self._owed and self._stream is not None:
            self._stream.end(frames.OK)


class Owed(Hold):
    """One call that a stream is owed the reply to, and what it holds of its agent's bounds until that is written."""

    __slots__ = ("_reads", "_replies", "call_id")

    def __init__(
        self, replies: Replies, call_id: int, bounds: Bounds, size: int, reads: Reads | None
    ) -> None:
        # As `Hold` does, without its call: one for every call.
        self._gate, self._size = bounds.gate, size
        self._gate.change(1, size)
        self._replies = replies
        self._reads = reads
        self.call_id = call_id

    def reply(self, answer: Answer) -> None:
        """Take the call's answer, once."""
        if self._reads is not None:
            self._reads.answered(self)
        self._replies.reply(self, answer)

    def over(self) -> None:
        """Hold nothing any more."""
        size = self._size
        if size >= 0:
            self._size = -1
            self._gate.change(-1, -size)
        if self._reads is not None:
            self._reads.leave(self)


def _response(call_id: int, answer: Answer) -> bytes:
    response = pb.StreamResponse()
    reply = response.reply
    reply.id, reply.step = call_id, answer.step
    if answer.replayed:
        reply.replayed = True
    failure = answer.failure
    if failure is None:
        reply.result = answer.result or b"null"
    else:
        reply.failure.reason = failure.reason
        reply.failure.message = failure.message
        reply.failure.metadata.update(failure.metadata)
    return response.SerializeToString()
