"""Puts agents to sleep whose calls all wait: ends the process, keeps the calls, and starts it again by replay.

INVARIANT: an agent is stored as asleep before its process is ended, so a kernel that dies in between adopts it as that.
INVARIANT: `thread.asleep` is set with no suspension after the last look at its waits: a wait that ends later wakes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ringfence.kernel import waits
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import AgentKey, JournalError
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
        core.mailboxes.arrived, core.mailboxes.sleeping = self._arrived, self._without_call
        processes.turns.on_pressure = self.hurry

    def _arrived(self, key: AgentKey) -> None:
        """A message came: wake an agent that is asleep since an earlier kernel, so that no call of its waits for it here."""
        thread = self._core.threads.get(key)
        if thread is not None and thread.asleep and not self._core.mailboxes.of(key).awaited:
            self._spawn(self.wake(thread))

    def _without_call(self) -> list[AgentKey]:
        boxes = self._core.mailboxes
        return [key for key, t in self._core.threads.items() if t.asleep and not boxes.of(key).awaited]

    def rests(self, thread: Thread, resting: bool) -> None:
        """Take notice of whether all of an agent waits; called at every change of that."""
        if thread.asleep:
            if not resting:
                self._spawn(self.wake(thread))
        elif resting and self._may_sleep(thread):
            if thread.key not in self._alarms:
                delay_s = thread.manifest.approvals.linger_s
                if self._processes.turns.pressed:
                    delay_s = min(delay_s, PRESSED_S)
                alarm = asyncio.get_running_loop().call_later(delay_s, self._lingered, thread)
                self._alarms[thread.key] = alarm
        else:
            self._silence(thread)

    def adopted(self) -> list[AgentKey]:
        """Agents that an earlier kernel put to sleep, and whose waits for a message nobody here keeps."""
        return [thread.key for thread in self._core.threads.values() if self._adopted(thread)]

    @staticmethod
    def _adopted(thread: Thread) -> bool:
        unknown = all(wait.kind != "message" for wait in thread.waits.values())
        return thread.asleep and thread.generation == 0 and unknown

    def message_came(self, key: AgentKey) -> None:
        """Let an adopted agent look: what it waited for is known to its program alone."""
        thread = self._core.threads.get(key)
        if thread is not None and self._adopted(thread):
            self._spawn(self.wake(thread))

    @staticmethod
    def _may_sleep(thread: Thread) -> bool:
        """Whether its process may be ended: it said how many lanes it has, and none waits for a mere rate."""
        return (
            thread.program is not None
            and thread.live_lanes > 0
            and thread.shown == (thread.state, thread.waiting_for)
            and thread.state in ASLEEP_STATES
            and all(wait.kind != "rate" for wait in thread.waits.values())
        )

    def hurry(self) -> None:
        """Others wait for a turn to live: those that only wait give theirs up without lingering."""
        for key in self._alarms:
            thread = self._core.threads.get(key)
            if thread is not None and self._may_sleep(thread):
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
            await self._processes.end_program(thread)

    def _silence(self, thread: Thread) -> None:
        alarm = self._alarms.pop(thread.key, None)
        if alarm is not None:
            alarm.cancel()

    async def wake(self, thread: Thread) -> None:
        """Start the process of an agent that is asleep; it goes on by replay. Does nothing for any other agent."""
        async with thread.operation:
            if not thread.asleep or thread.program is not None or self._core.stopping:
                return
            if thread.state in ASLEEP_STATES:
                await self._processes.start_or_fail(thread)
