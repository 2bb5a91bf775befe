"""What all streams of one agent share: whom they ask, what is counted over them, and what the log hears of them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import Message
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.kernel_log import PLACE
from ringfence.kernel.outcomes import Request, printable
from ringfence.kernel.past import PAST_UNREAD
from ringfence.kernel.replay import is_programs
from ringfence.kernel.server.gate import Bounds, Complaints, Hold
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.kernel.waits import show
from ringfence.syscalls.codec import arguments_from_message
from ringfence.syscalls.errors import Internal, InvalidRequest, SyscallError
from ringfence.syscalls.table import Row

log = logging.getLogger(__name__)


class Desk:
    """Takes the calls of one agent while one program of it lives.

    Attributes:
        bounds: of this agent's door.
        dispatcher: runs the calls.
        thread: whose calls they are.
    """

    def __init__(
        self, thread: Thread, dispatcher: Dispatcher, on_park: Callable[[Thread, Answer], Awaitable[None]]
    ) -> None:
        self._on_park = on_park
        self._complaints = Complaints(log, thread.id)
        self._streams = 0
        self._generation = thread.generation
        self._tasks: set[asyncio.Task[None]] = set()
        self._occurrences: Counter[str] = Counter()
        # Only those that somebody waits in or has: nobody can have the kernel keep one for each of many calls.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.bounds = Bounds()
        self.dispatcher = dispatcher
        self.thread = thread

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something to its end, whoever is there to see it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def park(self, answer: Answer) -> None:
        """Have the agent parked after an answer."""

        async def park() -> None:
            await self._on_park(self.thread, answer)

        self.keep(park())

    # -- streams ------------------------------------------------------------------------------------------------

    def stream_opens(self) -> None:
        """A stream has said who it is."""
        self._streams += 1

    def stream_ends(self) -> None:
        """Nobody speaks for the lanes of a program whose stream is gone, until it has another."""
        self._streams -= 1
        self.lanes(0)

    def lanes(self, lanes: int) -> None:
        """Take how many lanes of the program go on. With several streams none speaks for all of it."""
        thread = self.thread
        if thread.generation != self._generation:
            return  # a stream of the program before
        thread.live_lanes = lanes if self._streams == 1 else 0
        if thread.releases is not None:
            thread.releases.lanes_changed()
        if thread.waits:
            show(thread)

    # -- calls --------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Answer:
        """Run one call to its answer, also where there is a bug in its way."""
        try:
            return await self.dispatcher.call(self.thread, request)
        except PAST_UNREAD as error:
            return Answer(step=0, failure=error)
        except Exception:  # noqa: BLE001 - a bug is logged, as often as the log can bear
            # A bug must reach the agent as an answer: one that never comes would hold it for ever.
            return Answer(step=0, failure=self.bug(request.action))

    async def serve(self, request: Request, reply: Callable[[Answer], None]) -> None:
        """Run one call, and give its answer out when its turn comes."""
        releases = self.thread.releases
        if releases is None or self.thread.generation != self._generation or not is_programs(request.lane):
            reply(await self.answer(request))
            return
        releases.asked(request.lane)
        answer = await self.answer(request)
        if not answer.step or answer.park or answer.withheld:
            reply(answer)
        else:
            releases.turn(request.lane, answer.pos, partial(reply, answer))

    def bug(self, action: str) -> Internal:
        """Write the exception being handled to the log; gives what the agent hears of it."""
        self._complaints.say(f"bug in the path of {printable(action)}", trace=True)
        return Internal(f"a bug in Ringfence stopped this call; report it with what {PLACE} says of it")

    def misread(self) -> InvalidRequest:
        """Give the error for bytes that are no message."""
        self._complaints.say("bytes that are no message came in at its socket")
        return InvalidRequest("the bytes are no message of `ringfence.v1`; see its .proto files")

    async def in_turn(self, row: Row, message: Message) -> Answer:
        """Answer a caller without lanes: matched by what it asks and how often, so that a restarted one finds its answers again.

        The steps of a lane come in order, so of several that ask the same at once each waits for the one before.
        """
        hold = Hold(self.bounds.gate, message.ByteSize())
        refusal: SyscallError | None = None
        try:
            raw = arguments_from_message(row, message)[1]
        except SyscallError as error:
            raw, refusal = message.SerializeToString(deterministic=True), error
        action = row.action
        lane = f"call-{hashlib.sha256(action.encode() + bytes(1) + raw).hexdigest()[:24]}"
        turn = self._turns.setdefault(lane, asyncio.Lock())
        try:
            async with turn:
                step = self._occurrences[lane]
                answer = await self.answer(
                    Request(lane=lane, lane_step=step, action=action, raw=raw, refusal=refusal)
                )
                if answer.step:
                    # Nothing recorded, as while the database is away: the next one takes this place.
                    self._occurrences[lane] += 1
                return answer
        finally:
            hold.end()
