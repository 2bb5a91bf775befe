"""The client core without I/O: calls under way, what a broken stream means, and how long to try again.

Both transports drive it: `session` with threads, `aio_session` with asyncio.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from ringfence.agent import status, wire
from ringfence.agent.errors import Diverged, InvalidRequest, KernelGone, RingfenceError

if TYPE_CHECKING:
    from ringfence.agent.lanes import Lane
    from ringfence.v1.syscalls_pb2 import Reply, StreamRequest, Welcome

PATIENCE_S: Final = 30.0
FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 1.0
PROVEN_S: Final = 5.0
SUSPECT_BYTES: Final = 1 << 20


class Pending(Protocol):
    """One call that has no answer yet. Transports add how its caller is woken."""

    __slots__ = ("error", "frame", "lane", "reply", "size")

    def __init__(self, lane: Lane, size: int) -> None:
        self.lane = lane
        self.size = size
        self.frame: StreamRequest | None = None
        self.reply: Reply | None = None
        self.error: RingfenceError | None = None

    @property
    def number(self) -> int:
        """The call's id on the stream."""
        return 0 if self.frame is None else self.frame.call.id

    @property
    def answered(self) -> bool:
        """Whether its caller can go on."""
        return self.reply is not None or self.error is not None

    @abstractmethod
    def wake(self) -> None:
        """Let the caller go on."""
        ...

    def outcome(self) -> Reply:
        """Give the reply, or raise why there is none."""
        if self.error is not None:
            raise self.error
        if self.reply is None:
            raise KernelGone("the call ended without an answer")
        return self.reply


P = TypeVar("P", bound=Pending)


class Core(Generic[P]):
    """Calls under way over one logical stream, which may be several connections one after the other.

    INVARIANT: a call keeps its lane and step for life. It is sent again after a reconnection until it is
    answered, and the kernel answers from its journal what it had done already.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.pending: dict[int, P] = {}
        self.fatal: RingfenceError | None = None
        self.welcome: Welcome | None = None
        self.lanes = 0  # that go on or wait in a call; 0: not known

    def admit(self, pending: P, action: str, arguments: bytes) -> StreamRequest:
        """Number a new call and give the frame to send."""
        if self.fatal is not None:
            raise self.fatal.again()
        lane = pending.lane
        number = next(self._ids)
        pending.frame = frame = wire.call_frame(
            number=number,
            lane=lane.id,
            step=lane.next_step,
            action=action,
            arguments=arguments,
            lanes=self.lanes,
        )
        lane.next_step += 1
        self.pending[number] = pending
        return frame

    def settle(self, reply: Reply) -> P | None:
        """Take a reply; gives the call it answers, None where its caller gave up or has an answer."""
        pending = self.pending.pop(reply.id, None)
        if pending is not None:
            pending.reply = reply
            if not reply.step and reply.HasField("failure"):
                # Nothing was recorded, as while the database is away: the next call of the lane takes this place.
                self._give_back(pending)
        return pending

    @staticmethod
    def _give_back(pending: P) -> None:
        """Make the place of a call that the kernel never took the next one of its lane again."""
        if pending.frame is not None and pending.lane.next_step == pending.frame.call.step + 1:
            pending.lane.next_step -= 1

    def forget(self, pending: P) -> None:
        """Drop a call whose caller gave up. The kernel still does and records it."""
        self.pending.pop(pending.number, None)

    def greet(self, welcome: Welcome) -> None:
        """Take the welcome of a new connection.

        Raises:
            Diverged: it belongs to another thread or branch, which this process isn't a part of.
        """
        if self.welcome is None:
            self.welcome = welcome
        elif not wire.same_thread(self.welcome, welcome):
            raise Diverged(
                f"the kernel went on with branch {welcome.branch} of `{welcome.agent}`, this process is from"
                f" branch {self.welcome.branch}: let it end"
            )

    def unanswered(self) -> list[StreamRequest]:
        """Give the frames to send again, in the order of the calls."""
        frames = [pending.frame for pending in self.pending.values() if pending.frame is not None]
        # Each says how many lanes there were when it was made.
        return [*frames, wire.lanes_frame(self.lanes)] if frames and self.lanes else frames

    def end(self, error: RingfenceError) -> None:
        """Fail all calls under way, and those that follow, for good."""
        self.fatal = error
        calls, self.pending = list(self.pending.values()), {}
        for pending in calls:
            pending.error = error.again()
            pending.wake()

    def refuse_largest(self, detail: str) -> bool:
        """After a message that one side found too large: fail the call that must have been it.

        Its step is given back, because the kernel never saw it.

        Returns:
            False where no call under way is large.
        """
        largest = max(self.pending.values(), key=lambda pending: pending.size, default=None)
        if largest is None or largest.size < SUSPECT_BYTES:
            return False
        self.pending.pop(largest.number)
        self._give_back(largest)
        largest.error = InvalidRequest(
            f"the kernel takes no message of {largest.size} bytes ({detail}); send it in parts"
        )
        largest.wake()
        return True


class Patience:
    """How long a broken stream is mended: the clock runs from the break until it is of use again."""

    def __init__(self, limit_s: float = PATIENCE_S) -> None:
        self._limit_s = limit_s
        self._ends: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._welcomed = 0.0
        self.detail = "the stream ended"

    def answered(self) -> None:
        """An answer came: all is well again."""
        if self._ends is not None:
            self._ends, self._pause_s = None, FIRST_PAUSE_S

    def welcomed(self, *, owes: bool) -> None:
        """A stream is open. That proves little while answers are owed: one of those calls may break it."""
        self._welcomed = time.monotonic()
        if not owes:
            self.answered()

    def broke(self) -> None:
        """The stream ended. If it had lived for a while, as during a long sleep, the clock starts anew."""
        if self._welcomed and time.monotonic() - self._welcomed >= PROVEN_S:
            self.answered()
        self._welcomed = 0.0

    def left_s(self) -> float:
        """Seconds left; starts the clock.

        Raises:
            KernelGone: none are left.
        """
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + self._limit_s
        if self._ends <= now:
            raise KernelGone(
                f"no kernel answered for {self._limit_s:g} s ({self.detail}): see `ringfence status`,"
                " then start the agent again"
            )
        return self._ends - now

    def pause_s(self) -> float:
        """Give how long to wait before the next attempt; grows with each."""
        pause = min(self._pause_s, self.left_s())
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        return pause


def judge_break(core: Core[Any], patience: Patience, ended: status.Ended) -> RingfenceError | None:
    """Decide what the end of a stream means.

    Returns:
        The error that ends the session for good, None where it is worth connecting again.
    """
    patience.broke()
    if ended.code == "OK":
        patience.detail = "the kernel ended the stream"
        return None
    patience.detail = ended.detail or ended.code.lower()
    failure = status.failure_of(ended)
    if failure is None and ended.code == "RESOURCE_EXHAUSTED":
        if core.refuse_largest(ended.detail):
            return None
        return InvalidRequest(f"the kernel refused the stream: {ended.detail}; send less at once")
    if failure is None and ended.code in status.PASSING:
        return None
    failure = failure or status.by_code(ended.code, ended.detail)
    return None if failure.reason in status.PASSING_REASONS else failure
