"""The replies of one stream: how many are owed, and which wait for their turn to be written."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from ringfence.kernel.server.wire import Context, aio, rpc
from ringfence.kernel.settled import Answer
from ringfence.v1 import syscalls_pb2 as pb

log = logging.getLogger(__name__)


class Replies:
    """Writes replies in the order in which they come, one at a time as gRPC wants it."""

    def __init__(self, context: Context, parks: Callable[[Answer], None]) -> None:
        """Prepare; `write` does it.

        Args:
            context: of the stream.
            parks: told of an answer after which the agent is to be parked, once it is written or withheld.
        """
        self._context = context
        self._parks = parks
        self._ready: deque[tuple[int, Answer, Callable[[], None]]] = deque()
        self._owed = 0
        self._closed = False
        self._wake: asyncio.Future[None] | None = None

    def expect(self, call_id: int, written: Callable[[], None]) -> Callable[[Answer], None]:
        """Count a call.

        Args:
            call_id: the client's.
            written: told when its reply is written, or nobody is there to take it.

        Returns:
            Takes the call's answer, once.
        """
        self._owed += 1

        def reply(answer: Answer) -> None:
            self._ready.append((call_id, answer, written))
            self._wakes()

        return reply

    def close(self) -> None:
        """No more calls come: `write` ends when nothing is owed."""
        self._closed = True
        self._wakes()

    def _wakes(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def write(self) -> None:
        """Write replies as they come, to the last."""
        gone = False
        while not self._closed or self._owed:
            while self._ready:
                call_id, answer, written = self._ready.popleft()
                try:
                    if not gone and not answer.withheld:
                        await self._context.write(_response(call_id, answer))
                except (rpc.RpcError, aio.BaseError, asyncio.InvalidStateError):
                    # A client that is gone can't be told; its successor reads the answer from the journal.
                    gone = True
                except Exception:
                    log.exception("bug in the reply to step %d", answer.step)
                self._owed -= 1
                written()
                if answer.park:
                    self._parks(answer)
            if self._closed and not self._owed:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake


def _response(call_id: int, answer: Answer) -> pb.StreamResponse:
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
    return response
