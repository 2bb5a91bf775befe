"""Puts agents to sleep whose calls all wait: ends the process, keeps the calls, and starts it again by replay.

INVARIANT: an agent is stored as asleep before its process is ended, so a kernel that dies in between adopts it as that.
INVARIANT: `thread.asleep` is set with no suspension after the last look at its waits: a wait that ends later wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ringfence.kernel import resting, waits
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import AgentKey, JournalError
from ringfence.sandbox.types import SandboxError
from ringfence.syscalls.errors import SyscallError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from ringfence.kernel.processes import Processes
    from ringfence.kernel.thread import Thread

log = logging.getLogger(__name__)

PRESSED_S = 1.0
"""How long an agent lingers at most while others wait for a turn to live; what ends sooner is waited for."""
ASLEEP_STATES = frozenset({"sleeping", "parked"})


class Linger:
    """The part of the processes about agents that only wait."""

    def __init__(
        self, core: Core, processes: Processes, spawn: Callable[[Coroutine[Any, Any, Any]], object]
    ) -> None:
        self._core = core
        self._processes = processes
        self._spawn = spawn
        self._alarms: dict[AgentKey, asyncio.TimerHandle] = {}
        self._letting_go: set[AgentKey] = set()
        self._early: dict[AgentKey, datetime] = {}
        self.alarm: Callable[[Thread, datetime | None], None] = lambda _thread, _at: None
        """Set by who watches the clock: wakes an agent at a time; None: no longer."""
        processes.turns.on_pressure = self.hurry

    def rests(self, thread: Thread, at_rest: bool) -> None:
        """Take notice of whether all of an agent waits; called at every change of that."""
        if thread.asleep:
            if not at_rest and thread.key not in self._letting_go:
                self._spawn(self.wake(thread))
        elif at_rest and self._may_sleep(thread):
            if thread.key not in self._alarms:
                delay_s = thread.manifest.approvals.linger_s
                if self._processes.turns.pressed:
                    delay_s = min(delay_s, PRESSED_S)
                alarm = asyncio.get_running_loop().call_later(delay_s, self._lingered, thread)
                self._alarms[thread.key] = alarm
        else:
            self._silence(thread)

    def adopted(self) -> list[AgentKey]:
        """Agents that are asleep, and whose waits for a message nobody here keeps."""
        return [thread.key for thread in self._core.threads.values() if self._adopted(thread)]

    @staticmethod
    def _adopted(thread: Thread) -> bool:
        if thread.let_go:
            return thread.asleep and resting.waits_for(thread, "message")
        unknown = all(wait.kind != "message" for wait in thread.waits.values())
        return thread.asleep and thread.generation == 0 and unknown

    def message_came(self, key: AgentKey) -> None:
        """Let an adopted agent look: what it waited for is known to its program alone."""
        thread = self._core.threads.get(key)
        if thread is not None and self._adopted(thread):
            self._spawn(self.wake(thread))

    @staticmethod
    def _may_sleep(thread: Thread) -> bool:
        """Whether its process may be ended: it said how many lanes it has, and none waits for a mere rate or a secret."""
        return (
            thread.program is not None
            and thread.live_lanes > 0
            and thread.shown == (thread.state, thread.waiting_for)
            and thread.state in ASLEEP_STATES
            and all(wait.kind not in ("rate", "credential") for wait in thread.waits.values())
        )

    def hurry(self) -> None:
        """Others wait for a turn to live: those that only wait give theirs up without lingering."""
        for key in self._alarms:
            thread = self._core.threads.get(key)
            if thread is not None and thread.environment.direct is None and self._may_sleep(thread):
                self._spawn(self._put_to_sleep(thread, PRESSED_S))

    def _lingered(self, thread: Thread) -> None:
        self._alarms.pop(thread.key, None)
        linger_s = thread.manifest.approvals.linger_s
        if self._processes.turns.pressed:
            linger_s = min(linger_s, PRESSED_S)
        self._spawn(self._put_to_sleep(thread, linger_s))

    async def _put_to_sleep(self, thread: Thread, linger_s: float) -> None:
        async with thread.operation:
            if not waits.blocked(thread) or not self._may_sleep(thread) or self._core.stopping:
                return
            first_us = waits.wake_at_us(thread)
            if first_us is not None and first_us - time.time_ns() // 1000 < linger_s * 1e6:
                return  # it goes on soon: to end it and start it again costs more than it saves
            if self._is_early(thread):
                return
            thread.asleep = True
            wake_at = None if first_us is None else datetime.fromtimestamp(first_us / 1e6, UTC)
            state, text = thread.state, thread.waiting_for
            try:
                await self._core.event(
                    thread.key, "agent.sleep", thread.id, waiting_for=text, wake_at=wake_at
                )
                await self._processes.set_state(thread, state, waiting_for=text, asleep=True, wake_at=wake_at)
            except (JournalError, SyscallError) as error:
                thread.asleep = False
                log.warning("%s can't be put to sleep now: %s", thread.id, error)
                waits.show(thread)
                return
            self._silence(thread)
            if thread.environment.direct is None:
                await self._processes.end_program(thread)
                await self._let_go(thread, wake_at)
            elif thread.program is not None:
                # INVARIANT: what it holds in memory and on its overlay is nowhere else, so it is frozen and not ended.
                thread.frozen = True
                with contextlib.suppress(SandboxError):
                    await thread.program.pause()  # one that can't be frozen waits by itself

    async def _let_go(self, thread: Thread, wake_at: datetime | None) -> None:
        """Keep little of an agent that fell asleep. The caller holds `thread.operation`."""
        self.alarm(thread, None)
        if not thread.asleep or thread.program is not None or not waits.blocked(thread):
            return  # a wait has ended meanwhile, so that it is about to be woken
        epoch = thread.epoch
        self._letting_go.add(thread.key)
        try:
            flights = resting.let_go(thread)
            if flights is None:
                return
            await asyncio.gather(*(f.task for f in flights if f.task is not None), return_exceptions=True)
            for flight in flights:
                flight.task = None  # it has the frames in which it ended, and they have the call
        finally:
            self._letting_go.discard(thread.key)
        self.alarm(thread, wake_at)
        if thread.epoch != epoch:
            self._spawn(self.wake(thread))  # whether it still may is found out by asking
        resting.fold(thread, mine=True)

    def _silence(self, thread: Thread) -> None:
        alarm = self._alarms.pop(thread.key, None)
        if alarm is not None:
            alarm.cancel()

    async def wake(self, thread: Thread) -> None:
        """Start the process of an agent that is asleep; it goes on by replay. Does nothing for any other agent."""
        async with thread.operation:
            if thread.asleep and thread.frozen and thread.program is not None:
                await self._thaw(thread)
                return
            if not thread.asleep or thread.program is not None or self._core.stopping:
                return
            if thread.state in ASLEEP_STATES:
                await self._processes.start_or_fail(thread)

    async def wake_early(self, thread: Thread, at: datetime) -> None:
        """Start a process shortly before its time, where nobody else wants to start: it waits at the place where it slept."""
        if thread.asleep and thread.program is None and self._processes.turns.at_once(thread):
            self._early[thread.key] = at
            await self.wake(thread)

    def _is_early(self, thread: Thread) -> bool:
        """Whether it was started for a time that is about to come, and holds nothing that others wait for."""
        at = self._early.get(thread.key)
        if at is None:
            return False
        if datetime.now(UTC) < at and not self._processes.turns.pressed:
            return True
        del self._early[thread.key]
        return False

    async def _thaw(self, thread: Thread) -> None:
        """Let a program go on that was frozen while it slept."""
        thread.asleep = thread.frozen = False
        await self._processes.set_state(thread, "running")
        waits.show(thread)
        await self._processes.boundaries.thaw(thread)
