"""Runs operations over the stream for threads: encode, call in the caller's lane, decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ringfence.agent import wire
from ringfence.agent.errors import RingfenceError

if TYPE_CHECKING:
    from ringfence.agent.lanes import ThreadLanes
    from ringfence.agent.operations import Operation, Script
    from ringfence.agent.session import Session
    from ringfence.v1.syscalls_pb2 import Reply

T = TypeVar("T")


class Caller:
    """What the namespaces call through."""

    def __init__(self, session: Session, lanes: ThreadLanes) -> None:
        self._session = session
        self.lanes = lanes

    def run(self, operation: Operation[T]) -> T:
        """Make one call.

        Raises:
            RingfenceError: typed, as the kernel gives it.
        """
        return operation.decode(wire.result_of(self._reply(operation)))

    def step(self, operation: Operation[None]) -> int:
        """Make one call of which only the step it got is of interest.

        Raises:
            RingfenceError: typed, as the kernel gives it.
        """
        reply = self._reply(operation)
        wire.result_of(reply)
        return reply.step

    def _reply(self, operation: Operation[Any]) -> Reply:
        lane = self.lanes.current()
        arguments = wire.encode(operation.action, operation.arguments)
        return self._session.call(lane, operation.action, arguments)

    def script(self, script: Script[T]) -> T:
        """Make the calls of a script, one after the other, and give what it returns."""
        sent: Any = None
        failed: RingfenceError | None = None
        while True:
            try:
                operation = script.send(sent) if failed is None else script.throw(failed)
            except StopIteration as end:
                return end.value
            try:
                sent, failed = self.run(operation), None
            except RingfenceError as error:
                failed = error
