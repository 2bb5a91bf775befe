"""Whose program may be started now: the slots of this kernel, joined to its agents.

An agent that waits for its turn is `pending` in memory alone. What is stored still says that it is to live, so a kernel that
comes later starts it, by the same rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ringfence.kernel.slots import Slots, wish_of
from ringfence.sandbox.types import SandboxError

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.journal.types import AgentKey
    from ringfence.kernel.ownership import Ownership
    from ringfence.kernel.slots import Wish
    from ringfence.kernel.thread import Thread
    from ringfence.policy.scheduling import SlotLimits


class Turns:
    """Gives agents their turn to live."""

    def __init__(
        self,
        core: Core,
        ownership: Ownership,
        start: Callable[[Thread], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
    ) -> None:
        self._core = core
        self._ownership = ownership
        self._start = start
        self._spawn = spawn
        self._slots: Slots[AgentKey] = Slots(self._limits, time.monotonic)
        # Told that somebody waits for what others hold: whoever only rests may give its own up.
        self.on_pressure: Callable[[], None] | None = None

    def _limits(self) -> SlotLimits:
        """Those of the kernel file that is in force."""
        return self._ownership.resources.file.scheduler

    @property
    def pressed(self) -> bool:
        """Whether somebody waits for what others hold. Starts come one after the other, whoever gives something up."""
        return self._slots.short

    def at_once(self, thread: Thread) -> bool:
        """Whether an agent would have its turn now, and nobody waits for one."""
        return self._slots.fits(self._wish(thread))

    def _wish(self, thread: Thread) -> Wish[AgentKey]:
        return wish_of(
            thread.key,
            thread.manifest.priority,
            thread.manifest.sandbox.memory_bytes,
            self._core.pools.labels_of(thread.key),
            time.monotonic(),
        )

    async def taken(self, thread: Thread) -> bool:
        """Take an agent's turn to live; where it has to wait, it is `pending` until its program is started from here.

        Raises:
            SandboxError: its turn would never come.
        """
        thread.let_go = ()  # whatever waits is made again
        wish = self._wish(thread)
        if never := self._slots.never(wish):
            raise SandboxError(never)
        why = self._slots.ask(wish)
        if not why:
            return True
        thread.state, thread.waiting_for, thread.asleep, thread.shown = "pending", why, False, None
        await thread.announce()
        self._press()
        return False

    def _press(self) -> None:
        if self.on_pressure is not None and self._slots.short:
            self.on_pressure()

    def started(self, thread: Thread) -> None:
        """Its start is over; the turn goes on as long as the program lives."""
        self._slots.started(thread.key)
        if thread.program is None:
            self._slots.release(thread.key)
        self.pump()

    def ended(self, thread: Thread) -> None:
        """Its program is at its end, or it is not to be started any more."""
        self._slots.release(thread.key)
        self.pump()

    def pump(self) -> None:
        """Start those whose turn has come: after somebody's end, or when the bounds are others."""
        for key in self._slots.pump():
            thread = self._core.threads.get(key)
            if thread is None:
                self._slots.release(key)
            else:
                self._spawn(self._begin(thread))
        # Who waited for the starts before it may wait for a slot now.
        self._press()

    async def _begin(self, thread: Thread) -> None:
        async with thread.operation:
            if thread.state != "pending" or thread.program is not None or self._core.stopping:
                # An operator was here meanwhile: it is ended, paused, rolled back, or lives already.
                if thread.program is None:
                    self.ended(thread)
                return
            await self._start(thread)

    def view(self) -> dict[str, Any]:
        """What `status` shows."""
        limits = self._limits()
        return {
            "live": self._slots.held,
            "waiting": self._slots.queued,
            "memory_bytes": self._slots.memory_bytes,
            "limits": {
                "agents": limits.agents,
                "memory_bytes": limits.memory_bytes,
                "starts": limits.starts,
                "labels": {f"{name}={value}": most for (name, value), most in limits.labels.items()},
                "share_by": limits.share_by or None,
            },
        }
