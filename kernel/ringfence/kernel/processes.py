"""Starts agents' programs, watches them end, and starts them again as the manifest says."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.descriptors import Descriptors, NoDescriptors
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.journal.types import AgentKey, Unavailable
from ringfence.kernel.logs import LogPump
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.recovery import settle_again
from ringfence.kernel.revocation import cancel
from ringfence.kernel.server.agent_door import AgentDoor
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.kernel.waits import show
from ringfence.sandbox.types import Exit, ExitReason, Program, ProgramSpec, Sandbox, SandboxError
from ringfence.syscalls.errors import JournalUnavailable, Killed

log = logging.getLogger(__name__)

BACKOFF_S = 0.2
BACKOFF_S_MAX = 30.0
RETRY_S = 0.5


@dataclass(slots=True)
class _Running:
    """The kernel's side of one live program."""

    door: AgentDoor
    pumps: list[asyncio.Task[None]]
    watcher: asyncio.Task[None] | None = None
    alive: asyncio.Event = field(default_factory=asyncio.Event)
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
        self._running: dict[AgentKey, _Running] = {}
        self._logs: dict[tuple[AgentKey, str], LogPump] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- state ----------------------------------------------------------------------------------------------------

    async def set_state(
        self, thread: Thread, state: str, *, waiting_for: str = "", error: str = "", **more: Any
    ) -> None:
        """Change an agent's state in memory and in the database."""
        thread.state, thread.waiting_for, thread.error = state, waiting_for, error
        # INVARIANT: one at a time, and the newest state last: a kernel that starts later believes what is stored.
        async with thread.storing:
            await self._core.store.set_agent(
                thread.key,
                state=thread.state,
                waiting_for=thread.waiting_for,
                error=thread.error,
                **more,
            )
        await thread.announce()

    def process_state(self, thread: Thread) -> str:
        """`live`, `frozen` or `none`."""
        if thread.program is None:
            return "none"
        return "frozen" if thread.frozen else "live"

    def alive(self, thread: Thread) -> asyncio.Event:
        """Set while a program of the thread lives."""
        running = self._running.get(thread.key)
        return running.alive if running is not None else asyncio.Event()

    def log_of(self, thread: Thread, stream: str) -> LogPump:
        """The log of `stdout` or `stderr`."""
        place = (thread.key, stream)
        if place not in self._logs:
            self._logs[place] = LogPump(self._layout.agent(thread.id) / "logs" / f"{stream}.log")
        return self._logs[place]

    # -- start ----------------------------------------------------------------------------------------------------

    async def start(self, thread: Thread) -> None:
        """Start the agent's program; a thread with a past continues by replay.

        Raises:
            SandboxError: the sandbox can't be had as asked; the agent is `failed` with the reason.
        """
        if thread.program is not None:
            return  # two asked at once
        if self._core.stopping:
            raise SandboxError("the kernel is stopping; start it again under the next one")
        await settle_again(self._core, thread)
        thread.generation += 1
        if thread.generation > 1 or not thread.loaded:
            await self._ownership.load_replay(thread)
        if thread.unreadable:
            await self.set_state(thread, "failed", error=thread.unreadable, ended_at=datetime.now(UTC))
            raise SandboxError(thread.unreadable)
        thread.lanes.clear()
        thread.live_lanes = 0
        # Calls of an earlier start that wait for an operator: their program is gone, the new one asks for itself.
        async with thread.resolved:
            thread.resolved.notify_all()
        token = thread.new_token()
        door = AgentDoor(thread, self._dispatcher, self._parker(thread), self._descriptors)
        directory = self._layout.socket_dir(thread.key)
        environment = thread.environment
        await self._open(door, directory, thread)
        fds: list[int] = []
        pumps: list[asyncio.Task[None]] = []
        try:
            for stream in ("stdout", "stderr"):
                read_fd, write_fd = os.pipe()
                fds.append(write_fd)
                pumps.append(asyncio.create_task(self.log_of(thread, stream).run(read_fd)))
            thread.program = await self._enter(environment.sandbox, self._spec(thread, token, fds))
        except SandboxError as error:
            await door.close()
            await self.set_state(thread, "failed", error=str(error), ended_at=datetime.now(UTC))
            raise
        finally:
            for fd in fds:
                os.close(fd)
        thread.frozen = False
        running = _Running(door=door, pumps=pumps, generation=thread.generation)
        running.alive.set()
        self._running[thread.key] = running
        try:
            await self._insist(lambda: self._record_start(thread))
        finally:
            # Whatever became of the record: a program that lives is watched.
            running.watcher = self._spawn(self._watch(thread, running))

    def _spec(self, thread: Thread, token: str, fds: Sequence[int]) -> ProgramSpec:
        environment = thread.environment
        return ProgramSpec(
            agent=thread.id,
            argv=thread.manifest.run.command,
            env={
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONUNBUFFERED": "1",
                **environment.command_env,
                "RINGFENCE_SOCKET": "/run/ringfence/syscall.sock",
                "RINGFENCE_TOKEN": token,
                "RINGFENCE_AGENT": thread.id,
            },
            image=self._layout.agent(thread.id) / "image",
            socket_dir=self._layout.socket_dir(thread.key),
            readonly=environment.readonly,
            uid=environment.uid,
            limits=environment.limits,
            stdin=thread.record.input,
            stdout_fd=fds[0],
            stderr_fd=fds[1],
        )

    async def _enter(self, sandbox: Sandbox, spec: ProgramSpec) -> Program:
        began = time.monotonic()
        program = await sandbox.start(spec)
        if self._core.telemetry is not None:
            self._core.telemetry.sandbox_started(time.monotonic() - began)
        return program

    async def _open(self, door: AgentDoor, directory: Path, thread: Thread) -> None:
        try:
            await door.open(directory, dict(self._core.table), thread.environment.uid)
        except NoDescriptors as error:
            await self.set_state(thread, "failed", error=str(error), ended_at=datetime.now(UTC))
            raise SandboxError(str(error)) from None

    async def _record_start(self, thread: Thread) -> None:
        await self.set_state(thread, "running", started_at=datetime.now(UTC), ended_at=None, exit_code=None)
        show(thread)
        await self._core.event(
            thread.key, "agent.start", thread.id, generation=thread.generation, restarts=thread.restarts
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _insist(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
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
        running.alive.clear()
        if running.ending or self._core.stopping:
            return
        # An agent's death cancels nothing: its calls finish and are recorded before it is judged or started again.
        # One that waits for what may never come goes on by itself: the next start finds it again.
        flights = [
            f.answer
            for f in thread.flights.values()
            if f.answer is not None and (f.effect_started or not f.row.waits)
        ]
        if flights and thread.state != "unknown":
            await asyncio.wait(flights, timeout=60)
        try:
            await self._ended(thread, ended, running.generation)
        except Exception:
            log.exception("the end of %s could not be recorded", thread.id)

    async def _ended(self, thread: Thread, ended: Exit, generation: int) -> None:
        facts = {"reason": ended.reason.value, "code": ended.code}
        await self._insist(lambda: self._core.event(thread.key, "agent.exit", thread.id, **facts))
        if thread.state in ("unknown", "parked", "killed") or thread.generation != generation:
            return  # an operator was here meanwhile, and may have started it again
        if thread.state == "paused" and (ended.reason is not ExitReason.EXIT or ended.code):
            return  # a frozen program ends by another's hand; `resume` starts it again
        now = datetime.now(UTC)
        if ended.reason is ExitReason.EXIT and ended.code == 0:
            await self._settle(thread, "done", exit_code=0, ended_at=now)
            return
        why = self._why(thread, ended)
        restart = thread.manifest.restart
        again = restart.policy == "on-failure" and ended.reason is not ExitReason.TIMEOUT
        if not again or thread.restarts >= restart.max:
            limit = f"; it was restarted {thread.restarts} times" if again else ""
            await self._settle(thread, "failed", error=why + limit, exit_code=ended.code, ended_at=now)
            return
        thread.restarts += 1
        await self._settle(
            thread,
            "pending",
            waiting_for="a restart",
            error=why,
            restarts=thread.restarts,
            exit_code=ended.code,
        )
        await asyncio.sleep(min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (thread.restarts - 1)))
        async with thread.operation:
            restartable = thread.state == "pending" and thread.generation == generation
            if restartable and not self._core.stopping and thread.program is None:
                await self._start_or_fail(thread)

    async def _settle(self, thread: Thread, state: str, **more: Any) -> None:
        """Set a state that follows from the end of a program, unless an operator sets another one meanwhile."""
        expected = {thread.state, state}

        async def work() -> None:
            if thread.state in expected:
                await self.set_state(thread, state, **more)

        await self._insist(work)

    async def _start_or_fail(self, thread: Thread) -> None:
        try:
            await self._insist(lambda: self.start(thread))
        except SandboxError as error:
            log.warning("%s can't be started again: %s", thread.id, error)

    def _why(self, thread: Thread, ended: Exit) -> str:
        last = next(
            (line for line in reversed(self.log_of(thread, "stderr").tail().splitlines()) if line.strip()), ""
        )
        kinds = {
            ExitReason.EXIT: f"exit status {ended.code}",
            ExitReason.SIGNAL: f"ended by signal {-ended.code}",
            ExitReason.MEMORY: "out of memory; raise `sandbox.memory`",
            ExitReason.TIMEOUT: "ran longer than `sandbox.timeout`",
            ExitReason.DISK: "wrote more than `sandbox.disk`; raise it or write less",
            ExitReason.KILLED: "killed",
        }
        return kinds[ended.reason] + (f": {last.strip()[:300]}" if last else "")

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
        async with thread.operation:
            await self.end_program(thread)
            reason = Killed("the operator killed the agent")
            await asyncio.gather(*(cancel(flight, reason) for flight in list(thread.flights.values())))
            if thread.state not in ("done", "failed", "killed"):
                await self.set_state(thread, "killed", ended_at=datetime.now(UTC))

    def _parker(self, thread: Thread) -> Callable[[Thread, Answer], Coroutine[Any, Any, None]]:
        """What parks the agent for a call of this start; one of an earlier start comes too late."""
        asked_by = (thread.generation, thread.branch)

        async def park(thread: Thread, answer: Answer) -> None:
            self._spawn(self._do_park(thread, answer, asked_by))

        return park

    async def _do_park(self, thread: Thread, answer: Answer, asked_by: tuple[int, int]) -> None:
        # The program ends before it can tell anyone: what it was told is kept for the operator.
        error = "" if answer.failure is None else answer.failure.message
        async with thread.operation:
            if (thread.generation, thread.branch) != asked_by or thread.state == "killed":
                return  # an operator was faster: it is ended, rolled back or started again
            await self.end_program(thread)
            await self._settle(thread, "parked", waiting_for=answer.park, error=error)

    async def pause(self, thread: Thread) -> None:
        """Freeze the program."""
        async with thread.operation:
            if thread.program is not None:
                await thread.program.pause()
                thread.frozen = True
            await self.set_state(thread, "paused")

    async def resume(self, thread: Thread) -> None:
        """Thaw the program, or start it again where the kernel was restarted meanwhile."""
        async with thread.operation:
            if thread.program is not None:
                await thread.program.resume()
                thread.frozen = False
                waits = thread.replay.waits()
                if waits:
                    await self.set_state(thread, "unknown", waiting_for=f"the outcome of step {waits[0]}")
                else:
                    await self.set_state(thread, "running")
                    show(thread)
            else:
                await self.start(thread)

    async def stop_all(self) -> None:
        """End every program for the kernel's own stop; agents keep their state and are started again by the next kernel."""
        threads = [t for t in self._core.threads.values() if t.program is not None]
        await asyncio.gather(*(self.end_program(t) for t in threads), return_exceptions=True)
