"""Starts agents' programs, watches them end, and starts them again as the manifest says."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from ringfence.kernel.boundaries import Boundaries
from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.descriptors import Descriptors, NoDescriptors
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.journal.copyrows import forget_words
from ringfence.kernel.journal.types import AgentKey, Unavailable
from ringfence.kernel.launch import (
    confined_by,
    enter,
    kept_from_start,
    missing_files,
    program_spec,
    restartable,
    why_ended,
)
from ringfence.kernel.linger import Linger
from ringfence.kernel.logs import LogPump
from ringfence.kernel.lookahead import Lookahead
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.parking import parker
from ringfence.kernel.problems import lost_files
from ringfence.kernel.recovery import close_let_go, settle_again
from ringfence.kernel.releases import begin_releases
from ringfence.kernel.retries import Retry
from ringfence.kernel.revocation import cancel
from ringfence.kernel.server.agent_door import AgentDoor, by_path
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.kernel.tuning import Rests
from ringfence.kernel.turns import Turns
from ringfence.kernel.waits import show
from ringfence.sandbox.types import Exit, ExitReason, SandboxError, SandboxLostError
from ringfence.syscalls.errors import JournalUnavailable, Killed

log = logging.getLogger(__name__)

RunEnd = Callable[..., Coroutine[Any, Any, None]]
"""`(thread, outcome, *, error, exit_code, ended_at)`"""

BACKOFF_S = 0.2
BACKOFF_S_MAX = 30.0
RETRY_S = 0.5


@dataclass(slots=True)
class _Running:
    """The kernel's side of one live program."""

    door: AgentDoor
    pumps: list[asyncio.Task[None]]
    watcher: asyncio.Task[None] | None = None
    ending: bool = False
    generation: int = 0


class Processes:
    """Programs of this kernel's agents."""

    def __init__(self, core: Core, layout: Layout, ownership: Ownership, dispatcher: Dispatcher) -> None:
        self._core = core
        self._layout = layout
        self._ownership = ownership
        self._dispatcher = dispatcher
        self._descriptors = Descriptors()
        self._rows = by_path(core.table)
        self._running: dict[AgentKey, _Running] = {}
        self._logs: WeakValueDictionary[tuple[AgentKey, str], LogPump] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.turns = Turns(core, ownership, self.start_or_fail, self._spawn)
        self.lookahead = Lookahead(core, ownership.load_replay)
        self.boundaries = Boundaries(core, self, dispatcher, self._spawn)
        core.boundary = self.boundaries.before
        self.linger = Linger(core, self, self._spawn)
        self._rests = Rests(forget_words)
        self.on_end: RunEnd | None = None  # set by who begins the runs of scheduled agents
        core.on_rest, core.wake = self.linger.rests, self.wake
        core.mailboxes.arrived, core.mailboxes.sleeping = self.linger.message_came, self.linger.adopted

    # -- state ----------------------------------------------------------------------------------------------------

    async def set_state(
        self,
        thread: Thread,
        state: str,
        *,
        waiting_for: str = "",
        error: str = "",
        asleep: bool = False,
        wake_at: datetime | None = None,
        **more: Any,
    ) -> None:
        """Change an agent's state in memory and in the database. Whoever sets one says whether it is asleep in it."""
        thread.state, thread.waiting_for, thread.error, thread.asleep = state, waiting_for, error, asleep
        # INVARIANT: one at a time, and the newest state last: a kernel that starts later believes what is stored.
        async with thread.storing:
            await self._core.store.set_agent(
                thread.key,
                state=thread.state,
                waiting_for=thread.waiting_for,
                error=thread.error,
                asleep=thread.asleep,
                wake_at=wake_at if thread.asleep else None,
                **more,
            )
        await thread.announce()

    def process_state(self, thread: Thread) -> str:
        """`live`, `frozen` or `none`."""
        if thread.program is None:
            return "none"
        return "frozen" if thread.frozen else "live"

    def log_of(self, thread: Thread, stream: str) -> LogPump:
        """The log of `stdout` or `stderr`."""
        place = (thread.key, stream)
        path = self._layout.agent(thread.id) / "logs" / f"{stream}.log"
        return self._logs.get(place) or self._logs.setdefault(place, LogPump(path))

    # -- start ----------------------------------------------------------------------------------------------------

    async def start(self, thread: Thread) -> None:
        """Start the agent's program; a thread with a past continues by replay. It is `pending` until its turn comes.

        A sandbox that dies while it is made counts as an end of the program; its restart policy may leave it `pending`.

        Raises:
            SandboxError: the sandbox can't be had as asked; the agent is `failed` with the reason.
        """
        if thread.program is not None:
            return  # two asked at once
        if why := kept_from_start(self._core, thread):
            raise SandboxError(why)
        try:
            if not await self.turns.taken(thread):
                self._spawn(self.lookahead.read(thread))
                return
        except SandboxError as error:
            await self._fail(thread, error)
        try:
            await self._start(thread)
        finally:
            self.turns.started(thread)

    async def _start(self, thread: Thread) -> None:
        if why := await missing_files(thread, self._layout):
            await self._fail(thread, SandboxError(why))
        await settle_again(self._core, thread)
        thread.generation += 1
        if not self.lookahead.take(thread) and (thread.generation > 1 or not thread.loaded):
            await self._ownership.load_replay(thread)
        if thread.unreadable:
            await self._fail(thread, SandboxError(thread.unreadable))
        thread.lanes.clear()
        thread.live_lanes, thread.parking = 0, None
        thread.replay.asks_anew, thread.asks_anew = thread.asks_anew, False
        try:
            if not await self.boundaries.begin(thread):
                await self.set_state(thread, "parked", waiting_for=thread.waiting_for, asleep=True)
                return
        except SandboxError as error:
            await self._fail(thread, error)
        begin_releases(thread)
        # Calls of an earlier start that wait for an operator: their program is gone, the new one asks for itself.
        await thread.announce_resolved()
        token = thread.new_token()
        door = AgentDoor(thread, self._dispatcher, parker(self, thread, self._spawn), self._descriptors)
        await self._open(door, self._layout.socket_dir(thread.key), thread)
        fds: list[int] = []
        pumps: list[asyncio.Task[None]] = []
        try:
            for stream in ("stdout", "stderr"):
                read_fd, write_fd = os.pipe()
                fds.append(write_fd)
                pumps.append(asyncio.create_task(self.log_of(thread, stream).run(read_fd)))
            spec = program_spec(thread, self._layout, token, fds)
            thread.program = await enter(self._core, thread, spec, door)
        except SandboxError as error:
            await door.close()
            if isinstance(error, SandboxLostError) and restartable(thread):
                await self._await_restart(thread, str(error), None)
                return
            await self._fail(thread, error)
        finally:
            for fd in fds:
                os.close(fd)
        thread.frozen = False
        running = _Running(door=door, pumps=pumps, generation=thread.generation)
        self._running[thread.key] = running
        try:
            await self.insist(lambda: self._record_start(thread))
        finally:
            # Whatever became of the record: a program that lives is watched.
            running.watcher = self._spawn(self._watch(thread, running))

    async def _open(self, door: AgentDoor, directory: Path, thread: Thread) -> None:
        try:
            await door.open(directory, self._rows, thread.environment.uid)
        except NoDescriptors as error:
            await self._fail(thread, SandboxError(str(error)))

    async def _fail(self, thread: Thread, error: SandboxError) -> NoReturn:
        await self.set_state(thread, "failed", error=str(error), ended_at=datetime.now(UTC))
        raise error

    async def _record_start(self, thread: Thread) -> None:
        await self.set_state(thread, "running", started_at=datetime.now(UTC), ended_at=None, exit_code=None)
        show(thread)
        facts = {"generation": thread.generation, "restarts": thread.restarts, "sandbox": confined_by(thread)}
        await self._core.event(thread.key, "agent.start", thread.id, **facts)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def insist(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Do what has to be recorded about a process that lives or has ended: waits for the database as long as it takes."""
        while True:
            try:
                await work()
            except (Unavailable, JournalUnavailable):
                if self._core.stopping:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return

    # -- the end of a program -------------------------------------------------------------------------------------

    async def _watch(self, thread: Thread, running: _Running) -> None:
        assert thread.program is not None  # noqa: S101 - set by start
        ended = await thread.program.wait()
        await asyncio.gather(*running.pumps, return_exceptions=True)
        await running.door.close()
        thread.program = None
        self._running.pop(thread.key, None)
        self.turns.ended(thread)
        self._rests.one_more()
        if running.ending or self._core.stopping:
            return
        # An agent's death cancels nothing: its calls finish and are recorded before it is judged or started again.
        # One that waits may do so for days; the next start finds it under way.
        busy = [f for f in thread.flights.values() if f.step not in thread.waits]
        flights = [f.answer for f in busy]
        if flights and thread.state != "unknown":
            await asyncio.wait(flights, timeout=60)
        try:
            await self._ended(thread, ended, running.generation)
        except Exception:
            log.exception("the end of %s could not be recorded", thread.id)

    async def _ended(self, thread: Thread, ended: Exit, generation: int) -> None:
        facts = {"reason": ended.reason.value, "code": ended.code}
        await self.insist(lambda: self._core.event(thread.key, "agent.exit", thread.id, **facts))
        shown = thread.shown == (thread.state, thread.waiting_for)  # parked by its calls, not by anybody
        held = thread.parking is not None or (thread.state in ("unknown", "parked", "killed") and not shown)
        if held or thread.generation != generation:
            return  # an operator was here meanwhile, and may have started it again
        if thread.state == "paused" and (ended.reason is not ExitReason.EXIT or ended.code):
            return  # a frozen program ends by another's hand; `resume` starts it again
        if await self.boundaries.refuse_end(thread, ended) or thread.generation != generation:
            return
        now = datetime.now(UTC)
        if ended.reason is ExitReason.EXIT and ended.code == 0:
            await self._finish(thread, "done", generation, exit_code=0, ended_at=now)
            return
        lost = await missing_files(thread, self._layout)
        if thread.generation != generation:
            return  # its schedule has begun the next run
        if lost:
            await self.settle(thread, "failed", error=lost, exit_code=ended.code, ended_at=now)
            return
        why = why_ended(ended, self.log_of(thread, "stderr").tail())
        if ended.reason is not ExitReason.TIMEOUT and restartable(thread):
            await self._await_restart(thread, why, ended.code)
            return
        again = thread.manifest.restart.policy == "on-failure" and ended.reason is not ExitReason.TIMEOUT
        limit = f"; it was restarted {thread.restarts} times" if again else ""
        await self._finish(
            thread, "failed", generation, error=why + limit, exit_code=ended.code, ended_at=now
        )

    async def _await_restart(self, thread: Thread, why: str, code: int | None) -> None:
        """Leave the agent `pending` and start it again after a while that grows."""
        thread.restarts += 1
        generation, number = thread.generation, thread.restarts
        wait_s = min(BACKOFF_S_MAX, BACKOFF_S * 2 ** min(number - 1, 32))
        at = datetime.now(UTC) + timedelta(seconds=wait_s)
        thread.retry = retry = Retry(at=at, number=number, most=thread.manifest.restart.max, error=why)
        await self.settle(
            thread, "pending", waiting_for=retry.text, error=why, restarts=number, exit_code=code
        )
        self._spawn(self._restart(thread, generation, wait_s))

    async def _restart(self, thread: Thread, generation: int, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        async with thread.operation:
            due = thread.state == "pending" and thread.generation == generation and thread.program is None
            if due and not self._core.stopping:
                await self.start_or_fail(thread)

    async def _finish(self, thread: Thread, outcome: str, generation: int, **facts: Any) -> None:
        """The program is at its end; an agent with a schedule waits for its next run."""
        # INVARIANT: nobody takes a message for a program that is no more.
        over, flights = Killed("the program ended while this call waited"), list(thread.flights.values())
        await asyncio.gather(*(cancel(flight, over) for flight in flights if flight.row.waits))
        if thread.schedule is None or self.on_end is None:
            await self.settle(thread, outcome, **facts)
            return
        async with thread.operation:
            if thread.state != "killed" and thread.generation == generation:
                await self.insist(functools.partial(self.on_end, thread, outcome, **facts))

    async def settle(self, thread: Thread, state: str, **more: Any) -> None:
        """Set a state that follows from the end of a program, unless an operator sets another one meanwhile."""
        expected = {thread.state, state}

        async def work() -> None:
            # What its calls wait for may change all the time, and says nothing about its end.
            if thread.state in expected or thread.shown == (thread.state, thread.waiting_for):
                await self.set_state(thread, state, **more)

        await self.insist(work)

    async def start_or_fail(self, thread: Thread) -> None:
        """Start a program; where that can't be done the agent says why, and nothing is raised."""
        try:
            await self.insist(lambda: self.start(thread))
        except SandboxError as error:
            log.warning("%s can't be started: %s", thread.id, error)
            await self.not_started(thread, str(error))

    async def not_started(self, thread: Thread, error: str) -> None:
        """A run of a scheduled agent that can't be started has failed, and the next one is waited for."""
        if thread.schedule is not None and thread.schedule.running and self.on_end is not None:
            end = functools.partial(self.on_end, thread, "failed", error=error, ended_at=datetime.now(UTC))
            await self.insist(end)

    async def wake(self, thread: Thread) -> None:
        """Start the process of an agent that is asleep, because a wait of its has ended; it goes on by replay.

        The one way to do it, for timers, messages, approvals and budgets. Does nothing where the agent isn't asleep: it is
        live, paused, killed or at its end.
        """
        await self.linger.wake(thread)

    # -- operators ------------------------------------------------------------------------------------------------

    async def end_program(self, thread: Thread) -> None:
        """End the whole process tree; returns when nothing of it is left. The agent's state is the caller's to set."""
        running = self._running.get(thread.key)
        if thread.program is None or running is None:
            return
        running.ending = True
        await thread.program.kill()
        if running.watcher is not None and running.watcher is not asyncio.current_task():
            await asyncio.wait([running.watcher])
        thread.frozen = False

    async def kill(self, thread: Thread) -> None:
        """End the program and its calls; `killed` is final until an operator starts it again."""
        await self._end(thread, "killed", Killed("the operator killed the agent"))

    async def lose(self, thread: Thread) -> None:
        """End an agent whose files were removed from outside: it can't go on."""
        why = lost_files(self._layout.agent(thread.id))
        await self._end(thread, "failed", Killed(f"the agent is ended: {why}"), error=why)

    async def _end(self, thread: Thread, state: str, reason: Killed, **more: Any) -> None:
        async with thread.operation:
            await self.end_program(thread)
            await asyncio.gather(*(cancel(flight, reason) for flight in list(thread.flights.values())))
            await self.boundaries.drop(thread)
            await close_let_go(self._core, thread, reason)
            self.turns.ended(thread)
            if thread.state not in FINAL_STATES:
                await self.set_state(thread, state, ended_at=datetime.now(UTC), **more)

    async def stop_all(self) -> None:
        """End every program for the kernel's own stop; agents keep their state and are started again by the next kernel."""
        threads = [t for t in self._core.threads.values() if t.program is not None]
        await asyncio.gather(*(self.boundaries.at_stop(t) for t in threads), return_exceptions=True)
        await asyncio.gather(*(self.end_program(t) for t in threads), return_exceptions=True)
