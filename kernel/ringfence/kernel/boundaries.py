"""Step boundaries of `direct` programs: what a program changed on its overlay is judged and taken into the workspace.

A boundary is made before each call of the agent that leaves a mark, when it is paused or exported, and at the program's
end. The program is frozen meanwhile. Where nothing changed there is no step.

INVARIANT: what a boundary refuses never enters the workspace, and its program runs no instruction more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ringfence.kernel.divergence import left_out
from ringfence.kernel.facts import Taint
from ringfence.kernel.outcomes import Request
from ringfence.kernel.recovery import close_unasked
from ringfence.kernel.redoing import Redo
from ringfence.kernel.replay import BOUNDARY_LANE, Replay
from ringfence.kernel.settled import Answer
from ringfence.sandbox.changes import ChangesError
from ringfence.sandbox.direct import DirectLayer
from ringfence.sandbox.trees import copy_tree
from ringfence.sandbox.types import Exit, ExitReason, SandboxError
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls.base import Effect
from ringfence.syscalls.errors import (
    CallFailed,
    Fenced,
    InvalidRequest,
    JournalUnavailable,
    Killed,
)

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.dispatch import Dispatcher
    from ringfence.kernel.processes import Processes
    from ringfence.kernel.thread import Thread
    from ringfence.syscalls.table import Row

log = logging.getLogger(__name__)

ACTION = "workspace.commit"
LANE = BOUNDARY_LANE
RETRY_S = 0.5
STOP_S = 5.0
"""How long an ordered stop waits for one; then what was not committed is dropped, as after any death."""
ITS_OWN = frozenset({"fs.write", "fs.append", "fs.move", "fs.delete", "exec.run"})
_PASSING = (JournalUnavailable, Fenced, Killed)
"""Failures that say nothing about what the program changed."""


class Boundaries:
    """Makes the boundaries of this kernel's direct agents."""

    def __init__(
        self,
        core: Core,
        processes: Processes,
        dispatcher: Dispatcher,
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
    ) -> None:
        self._core = core
        self._processes = processes
        self._dispatcher = dispatcher
        self._spawn = spawn
        self._locks: WeakKeyDictionary[Thread, asyncio.Lock] = WeakKeyDictionary()
        self._holds: WeakKeyDictionary[Thread, int] = WeakKeyDictionary()
        self._condemned: WeakKeyDictionary[Thread, int] = WeakKeyDictionary()
        self._redone: WeakKeyDictionary[Thread, Redo] = WeakKeyDictionary()

    # -- the start of a program -----------------------------------------------------------------------------------

    async def begin(self, thread: Thread) -> bool:
        """Lay out the overlay of a program that is about to be started.

        Returns:
            False: a person has to decide about what an earlier program changed; that one's overlay stays until then.

        Raises:
            SandboxError: it can't be made.
        """
        layer = thread.environment.direct
        if layer is None:
            return True
        if any(flight.row.action == ACTION for flight in thread.flights.values()):
            return False
        try:
            async with thread.environment.lock():
                await asyncio.to_thread(layer.renew, lambda base: _make_base(thread, base))
        except (OSError, WorkspaceError) as error:
            raise SandboxError(f"the program's overlay can't be made: {error}") from error
        layer.hold = lambda: self.hold(thread)
        self._redone.pop(thread, None)
        if not layer.own:
            self._redone[thread] = Redo(self._core, thread, layer.hold)
            thread.replay.one_way = True
        layer.strayed = str if layer.own else lambda: left_out(thread)
        if layer.own:
            await close_unasked(self._core, thread, LANE)
            thread.replay = _nothing_again(thread.replay)
        facts = thread.facts
        if facts.taint is None and facts.paths:
            # It reads files without a call, so whatever one of them would taint it by counts from the start.
            facts.taint = Taint(step=0, source=f"the file `{next(iter(facts.paths))}`")
        return True

    # -- boundaries -----------------------------------------------------------------------------------------------

    async def before(self, thread: Thread, request: Request) -> Answer | None:
        """Make the boundary that comes before a call, where one does. None: the call may go on."""
        layer = thread.environment.direct
        row = self._core.table.get(request.action)
        if layer is None or row is None or request.lane == LANE or not _bounds(row):
            return None
        if await self._again(thread, (request.lane, request.lane_step), afresh=row.action != ACTION):
            return None  # it was made already, and so was its boundary
        refusal = "" if row.action == ACTION else _no_place(row, layer)
        if refusal:
            return Answer(step=0, failure=InvalidRequest(refusal))
        self._goes_on(thread)
        if row.action == ACTION:
            return None
        answer = await self.make(thread, f"before {row.action}")
        return None if answer is None else Answer(step=0, failure=answer.failure)

    async def _again(self, thread: Thread, place: tuple[str, int], *, afresh: bool) -> bool:
        """Whether a call was made before, so that its boundary was too: the program's files are as they were then.

        Args:
            thread: whose.
            place: of the call.
            afresh: whether one that is decided once more, such as one that was refused at last, counts too.
        """
        flight, held, cut = (
            thread.by_lane.get(place),
            thread.replay.find(*place),
            thread.replay.unfinished.get(place),
        )
        known = held or (thread.replay.outcomes.get(place) if afresh and cut is None else None)
        step = flight.step if flight else known.step if known else cut.intent.step if cut else 0
        redo = self._redone.get(thread)
        if step and redo is not None:
            await redo.at(step)
        # INVARIANT: where its files are not those of then, a call that is decided once more comes behind a boundary.
        return (
            flight is not None
            or held is not None
            or (known is not None and redo is not None and not redo.over)
        )

    def _goes_on(self, thread: Thread) -> None:
        """Note that a program is where it was before, or has ended: from here on what it has counts."""
        layer, redo = thread.environment.direct, self._redone.pop(thread, None)
        if layer is not None:
            layer.redoing = False
        if redo is not None:
            redo.end()

    async def make(self, thread: Thread, why: str) -> Answer | None:
        """Make a boundary now; whatever can't be committed ends the program.

        Args:
            thread: whose.
            why: what for, as people see it in `steps`.

        Returns:
            None: all that was changed is in the workspace. Otherwise what stood in the way.
        """
        generation = thread.generation
        try:
            async with self._lock(thread), self.hold(thread):
                answer = await self._commit(thread, why)
                if answer is not None and not isinstance(answer.failure, _PASSING):
                    self._condemned[thread] = generation
        except SandboxError as error:
            answer = Answer(step=0, failure=CallFailed(f"{error}; what it changed is not in the workspace"))
        if answer is not None and not isinstance(answer.failure, _PASSING) and thread.program is not None:
            self._spawn(self._condemn(thread, answer, generation))
        return answer

    async def _commit(self, thread: Thread, why: str) -> Answer | None:
        layer = thread.environment.direct
        assert layer is not None  # noqa: S101 - looked at by all who come here
        try:
            if layer.redoing or not await asyncio.to_thread(layer.changes):
                return None
        except ChangesError as error:
            log.info("%s: %s", thread.id, error)  # the call says it where it is recorded
        step = self._next(thread)
        layer.why = why
        try:
            request = Request(lane=LANE, lane_step=step, action=ACTION, raw=b"{}")
            answer = await self._dispatcher.call(thread, request)
        finally:
            layer.why = ""
        return None if answer.failure is None else answer

    @staticmethod
    def _next(thread: Thread) -> int:
        """The place of the next boundary: that of one which a crash cut off, or the first that is free."""
        begun = [step for lane, step in thread.replay.unfinished if lane == LANE]
        fresh = max(thread.next_of(LANE), thread.replay.last.get(LANE, -1) + 1)
        thread.lanes[LANE] = max([fresh, *begun])
        return max(begun, default=fresh)

    async def now(self, thread: Thread, why: str) -> None:
        """Make a boundary of a program that lives. Where a person is asked, nobody waits for the answer here."""
        if thread.environment.direct is None or thread.program is None:
            return
        task = asyncio.ensure_future(self.make(thread, why))
        self._spawn(_awaited(task))
        while not task.done() and not thread.waits:
            await asyncio.wait({task}, timeout=0.02)

    async def at_stop(self, thread: Thread) -> None:
        """Make a last boundary before an ordered stop of the kernel ends a program that resumes by itself."""
        layer = thread.environment.direct
        if layer is None or not layer.own:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.now(thread, "at the kernel's stop")

    async def refuse_end(self, thread: Thread, ended: Exit) -> bool:
        """Make the last boundary of a program that has ended by itself; what any other end leaves is dropped.

        Returns:
            True: what it changed was refused, and the agent says so; or somebody else says what becomes of it.
        """
        layer = thread.environment.direct
        if layer is None:
            return False
        if ended.reason is not ExitReason.EXIT or (ended.code and layer.redoing):
            await self.drop(thread)
            return False
        self._goes_on(thread)
        generation = thread.generation
        answer = await self.make(thread, "at the program's end")
        while (
            answer is not None and isinstance(answer.failure, JournalUnavailable) and not self._core.stopping
        ):
            await asyncio.sleep(RETRY_S)
            answer = await self.make(thread, "at the program's end")
        if answer is not None and thread.generation == generation:
            await self.refused(thread, answer)
        elif answer is None:
            await self.drop(thread)
        return answer is not None

    async def drop(self, thread: Thread) -> None:
        """Remove what a program without a process left on its overlay, unless a person has to decide about it."""
        layer = thread.environment.direct
        waits = any(flight.row.action == ACTION for flight in thread.flights.values())
        if layer is None or thread.program is not None or waits:
            return
        try:
            async with thread.environment.lock():
                await asyncio.to_thread(layer.discard)
        except OSError as error:
            log.warning("what %s left on its overlay can't be removed: %s", thread.id, error)

    # -- holding and ending the program ---------------------------------------------------------------------------

    def _lock(self, thread: Thread) -> asyncio.Lock:
        return self._locks.setdefault(thread, asyncio.Lock())

    @contextlib.asynccontextmanager
    async def hold(self, thread: Thread) -> AsyncGenerator[None]:
        """Keep a program frozen while the block is entered; several may.

        Raises:
            SandboxError: it can't be frozen.
        """
        self._holds[thread] = self._holds.get(thread, 0) + 1
        try:
            if thread.program is not None:
                await thread.program.pause()
            yield
        finally:
            self._holds[thread] -= 1
            await self.thaw(thread)

    async def thaw(self, thread: Thread) -> None:
        """Let a program go on, unless something keeps it still.

        Raises:
            SandboxError: it can't be thawed.
        """
        condemned = self._condemned.get(thread) == thread.generation
        if thread.program is None or thread.frozen or self._holds.get(thread, 0) or condemned:
            return
        await thread.program.resume()

    async def _condemn(self, thread: Thread, answer: Answer, generation: int) -> None:
        """End a program whose changes were refused: they are dropped, and the agent says why."""
        async with thread.operation:
            if thread.generation != generation or thread.state == "killed":
                return  # an operator was faster
            await self._processes.end_program(thread)
            await self.refused(thread, answer)

    async def refused(self, thread: Thread, answer: Answer) -> None:
        """Leave an agent without a program as one whose changes were refused."""
        failure = answer.failure
        if failure is None or isinstance(failure, _PASSING):
            return  # whoever ended the call says what becomes of the agent
        layer = thread.environment.direct
        if layer is not None:
            await asyncio.to_thread(layer.discard)
        if answer.park:
            await self._processes.settle(thread, "parked", waiting_for=answer.park, error=failure.message)
            return
        path, action = failure.metadata.get("path", ""), failure.metadata.get("action", "")
        named = path and path not in failure.message
        what = f"{action} on `{path}`: {failure.message}" if named else failure.message
        text = f"{what}; what it changed since its last boundary is dropped"
        await self._processes.settle(thread, "failed", error=text, ended_at=datetime.now(UTC))


async def _awaited(task: asyncio.Future[Any]) -> None:
    await asyncio.wait({task})


def _no_place(row: Row, layer: DirectLayer) -> str:
    """Why a direct agent can't make a call; empty: it can."""
    if row.action in ITS_OWN:
        what = f"`{row.action}` is for agents that don't write their files themselves"
        return f"{what}: this one's workspace is direct, use its own files"
    if row.action == "checkpoint.save" and not layer.own:
        # It would go on from there on files of before.
        what = "a checkpoint doesn't hold the files of a `direct` workspace"
        return f"{what}: write `restart: {{resume: own}}` in the manifest, or go on by replay without one"
    return ""


def _bounds(row: Row) -> bool:
    """Whether a call comes behind a boundary: it leaves a mark, or looks at the workspace."""
    return row.effect is not Effect.READ or row.intent or row.action.startswith("fs.")


def _nothing_again(known: Replay) -> Replay:
    """The past as a program finds it that resumes by itself: no call of its is answered from the record."""
    unfinished = {place: one for place, one in known.unfinished.items() if place[0] == LANE}
    last = {LANE: known.last[LANE]} if LANE in known.last else {}
    # What it saved itself is its own to go on from.
    return Replay(
        last=last,
        unfinished=unfinished,
        checkpoint=known.checkpoint,
        saved=known.saved,
        past=known.past,
        taken_back=known.taken_back,
    )


def _make_base(thread: Thread, base: Path) -> None:
    """Copy what a program may see of the live workspace."""
    environment = thread.environment
    hidden = set(environment.masked())
    copy_tree(environment.workspace.root, base, skip=lambda path: path in hidden, uid=environment.uid)
