"""The replies of one stream: how many are owed, and what follows when one is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from ringfence.kernel.kernel_log import PLACE
from ringfence.kernel.server import frames
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
        self._stream = stream
        self._parks = parks
        self._owed = 0
        self._closed = False

    def expect(self, call_id: int, written: Callable[[], None]) -> Callable[[Answer], None]:
        """Count a call.

        Args:
            call_id: the client's.
            written: told when its reply is written, or nobody is there to take it.

        Returns:
            Takes the call's answer, once.
        """
        self._owed += 1
        return partial(self._reply, call_id, written)

    def close(self) -> None:
        """No more calls come: the stream ends when nothing is owed."""
        self._closed = True
        if not self._owed:
            self._stream.end(frames.OK)

    def _reply(self, call_id: int, written: Callable[[], None], answer: Answer) -> None:
        park = answer if answer.park else None
        if answer.withheld:
            self._sent(written, park)
            return
        try:
            data = _response(call_id, answer)
        except Exception:
            # An answer that never comes would hold the caller for ever.
            log.exception("bug in the reply to step %d", answer.step)
            text = f"a bug in Ringfence keeps this answer from being sent; report it with what {PLACE} says of it"
            data = _response(call_id, Answer(step=answer.step, failure=Internal(text)))
        if self._stream.send_now(data):
            self._sent(written, park)
        else:
            # A client that is gone can't be told; its successor reads the answer from the journal.
            # What waits is kept once: the answer itself is let go.
            self._stream.send(data, partial(self._sent, written, park))

    def _sent(self, written: Callable[[], None], park: Answer | None) -> None:
        self._owed -= 1
        written()
        if park is not None:
            self._parks(park)
        if self._closed and not self._owed:
            self._stream.end(frames.OK)


def _response(call_id: int, answer: Answer) -> bytes:
    response = pb.StreamResponse()
    reply = response.reply
    reply.id, reply.step, reply.replayed = call_id, answer.step, answer.replayed
    failure = answer.failure
    if failure is None:
        reply.result = answer.result or b"null"
    else:
        reply.failure.reason = failure.reason
        reply.failure.message = failure.message
        reply.failure.metadata.update(failure.metadata)
    return response.SerializeToString()
