"""What all streams of one agent share: whom they ask, what is counted over them, and what the log hears of them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import Message
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.divergence import Strays
from ringfence.kernel.kernel_log import PLACE
from ringfence.kernel.outcomes import Request, printable
from ringfence.kernel.past import PAST_UNREAD
from ringfence.kernel.replay import is_programs
from ringfence.kernel.server.gate import Bounds, Complaints, Hold
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.kernel.waits import show
from ringfence.policy.ignoring import Ignoring
from ringfence.syscalls.codec import arguments_from_message
from ringfence.syscalls.errors import Internal, InvalidRequest, SyscallError
from ringfence.syscalls.hearing import Hearing
from ringfence.syscalls.table import Row

log = logging.getLogger(__name__)

UNHEARD_MAX = 1024
"""Kinds of calls of one start of which an answer that nobody heard is kept for who asks the same."""

ASIDE_BYTES = 16 << 10
"""Arguments as long are searched beside the event loop."""
_SEARCHERS = ThreadPoolExecutor(2, thread_name_prefix="ringfence ignore")
"""Threads of their own: what an agent's patterns take keeps nothing waiting but such calls."""


def lane_of(action: str, raw: bytes, left: bytes | None) -> str:
    """The lane of calls without one: of all that ask the same.

    Args:
        action: of the table.
        raw: arguments in canonical form.
        left: of them, without what is ignored; None: all of them count.
    """
    # INVARIANT: where nothing is ignored it is the name that it always was, so that older journals answer.
    what = (
        action.encode() + bytes(1) + raw
        if left is None
        else b"alike" + bytes(1) + action.encode() + bytes(1) + left
    )
    return f"call-{hashlib.sha256(what).hexdigest()[:24]}"


class Desk:
    """Takes the calls of one agent while one program of it lives.

    Attributes:
        bounds: of this agent's door.
        closed: set when the program has ended, or the kernel stops.
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
        self._tasks: set[asyncio.Task[Any]] = set()
        self._occurrences: Counter[str] = Counter()
        self._unheard: dict[str, list[int]] = {}
        self._ignoring = Ignoring(thread.manifest.restart.ignore)
        self._search = asyncio.Lock()  # one agent takes one thread
        self._strays: Strays | None = None
        # Only those that somebody waits in or has: nobody can have the kernel keep one for each of many calls.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.closed = asyncio.Event()
        self.bounds = Bounds()
        self.dispatcher = dispatcher
        self.thread = thread

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something to its end, whoever is there to see it."""
        self.hold(asyncio.create_task(work))

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Keep a task from being forgotten before it ends."""
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
        """Answer a caller without lanes that sent a message."""
        refusal: SyscallError | None = None
        try:
            raw = arguments_from_message(row, message)[1]
        except SyscallError as error:
            raw, refusal = message.SerializeToString(deterministic=True), error
        hold = Hold(self.bounds.gate, message.ByteSize())
        try:
            return await self.in_order(row.action, raw, refusal)
        finally:
            hold.end()

    async def likeness(self, action: str, raw: bytes) -> bytes | None:
        """What is left of a call without what the manifest ignores of it; None: all of it counts."""
        if len(raw) < ASIDE_BYTES:
            return self._ignoring.likeness(action, raw)
        async with self._search:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_SEARCHERS, self._ignoring.likeness, action, raw)

    async def in_order(
        self,
        action: str,
        raw: bytes,
        refusal: SyscallError | None = None,
        placed: Callable[[str, int], None] | None = None,
    ) -> Answer:
        """Answer a caller without lanes: matched by what it asks and how often, so that a restarted one finds its answers again.

        The steps of a lane come in order, so of several that ask the same at once each waits for the one before.

        Args:
            action: the row's.
            raw: the arguments in canonical form.
            refusal: why they are none.
            placed: told the lane and the step in it, before anything is done.
        """
        left = None if refusal is not None else await self.likeness(action, raw)
        return await self.in_lane(action, raw, left, refusal, placed)

    async def in_lane(
        self,
        action: str,
        raw: bytes,
        left: bytes | None,
        refusal: SyscallError | None = None,
        placed: Callable[[str, int], None] | None = None,
    ) -> Answer:
        """The same where the caller's `likeness` is known already, as `left`."""
        lane = lane_of(action, raw, left)
        turn = self._turns.setdefault(lane, asyncio.Lock())
        async with turn:
            step = self._again(lane)
            if placed is not None:
                placed(lane, step)
            if refusal is None and self.thread.replay.last:
                self._strays = self._strays or self.dispatcher.strays(self.thread, self._ignoring)
                await self._strays.look(lane, step, action, raw)
            answer = await self.answer(
                Request(
                    lane=lane,
                    lane_step=step,
                    action=action,
                    raw=raw,
                    refusal=refusal,
                    alike=left is not None,
                )
            )
            if answer.step and step == self._occurrences[lane]:
                # Nothing recorded, as while the database is away: the next one takes this place.
                self._occurrences[lane] += 1
            return answer

    async def posted(
        self, action: str, raw: bytes, gone: Callable[[], bool], hearing: Hearing | None = None
    ) -> tuple[Answer, Callable[[], None]]:
        """Answer a call that came in at a door as a request of its own, matched in the same way.

        Args:
            action: of the table.
            raw: arguments as JSON, the same bytes for the same arguments.
            gone: whether whoever asked has left. What nobody heard goes to the next who asks the same: a client that
                lost its connection makes the call again.
            hearing: hears the call while it runs.

        Returns:
            The answer, and what to call where it could not be brought.
        """
        places: list[tuple[str, int]] = []

        def placed(lane: str, step: int) -> None:
            places.append((lane, step))
            if hearing is not None:
                self.thread.doors.parts[lane, step] = hearing

        await self.bounds.gate.wait()
        hold = Hold(self.bounds.gate, len(raw))
        try:
            answer = await self.in_order(action, raw, placed=placed)
        finally:
            hold.end()
            if places and self.thread.doors.parts.get(places[0]) is hearing:
                self.thread.doors.parts.pop(places[0], None)

        def unheard() -> None:
            lane, step = places[0]
            kept = self._unheard.get(lane, [])
            if answer.step and step not in kept and len(self._unheard) < UNHEARD_MAX:
                self._unheard[lane] = [*kept, step]

        # INVARIANT: nothing waits between the end of the turn and this: the next of the turn finds it.
        if gone():
            unheard()
        return answer, unheard

    def _again(self, lane: str) -> int:
        """The step of the next call of a lane: one whose answer nobody heard, or a new one."""
        if lane not in self._occurrences:
            self._occurrences[lane] = self._first(lane)
        kept = self._unheard.pop(lane, [])
        if len(kept) > 1:
            self._unheard[lane] = kept[1:]
        return kept[0] if kept else self._occurrences[lane]

    def _first(self, lane: str) -> int:
        """The step at which this start of the program comes into a lane.

        Behind a checkpoint that is not the first of all: the same may have been asked before it, and is not asked again.
        """
        thread = self.thread
        if thread.replay.checkpoint is None or thread.generation != self._generation:
            return 0
        recorded = thread.replay.first_of(lane)
        flying = [at for name, at in thread.by_lane if name == lane]
        first = min(flying if recorded is None else [recorded, *flying], default=0)
        # INVARIANT: the thread comes to the same step next, or would take this one for a gap.
        return thread.lanes.setdefault(lane, first)
