"""What operators do with a program that lives: freeze it, and thaw it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.kernel.waits import show

if TYPE_CHECKING:
    from ringfence.kernel.processes import Processes
    from ringfence.kernel.thread import Thread


async def pause(processes: Processes, thread: Thread) -> None:
    """Freeze the program, or keep one that waits for its turn from being started."""
    async with thread.operation:
        if thread.program is not None:
            await thread.program.pause()
            thread.frozen = True
            await processes.boundaries.now(thread, "at a pause")
        else:
            processes.turns.ended(thread)
        await processes.set_state(thread, "paused")


async def resume(processes: Processes, thread: Thread) -> None:
    """Thaw the program, or start it again where the kernel was restarted meanwhile.

    Raises:
        SandboxError: it can't be started.
    """
    async with thread.operation:
        if thread.program is not None:
            thread.frozen = False
            await processes.boundaries.thaw(thread)
            waits = thread.replay.waits()
            if waits:
                await processes.set_state(thread, "unknown", waiting_for=f"the outcome of step {waits[0]}")
            else:
                await processes.set_state(thread, "running")
                show(thread)
        else:
            await processes.start(thread)
