"""Holds an agent still for as long as a consistent picture of it is taken; it goes on afterwards and notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from ringfence.kernel.problems import conflict
from ringfence.kernel.thread import Thread

SETTLE_S = 30.0
"""How long a call under way may take to finish before a picture is refused."""


@contextlib.asynccontextmanager
async def held_still(thread: Thread, thaw: Callable[[Thread], Awaitable[None]]) -> AsyncGenerator[None]:
    """Freeze the program, await the calls under way, and hold the workspace. Calls that wait go on waiting.

    Args:
        thread: the agent.
        thaw: lets its program go on, unless something else keeps it still.

    Raises:
        Problem: a call does not finish in time; the agent goes on.
    """
    async with thread.operation:
        program = None if thread.frozen else thread.program
        if program is not None:
            await program.pause()
            thread.frozen = True
        try:
            await _settle(thread)
            lock = thread.environment.lock()
            # INVARIANT: nothing is under way, so nobody holds the lock and taking it does not suspend.
            async with lock:
                yield
        finally:
            if program is not None and thread.program is program:
                thread.frozen = False
                await thaw(thread)


async def _settle(thread: Thread) -> None:
    until = time.monotonic() + SETTLE_S
    while True:
        busy = [f for f in thread.flights.values() if f.step not in thread.waits]
        if not busy and not thread.environment.lock().locked():
            return
        answers = [f.answer for f in busy]
        left = until - time.monotonic()
        if left <= 0:
            what = f"step {busy[0].step}, {busy[0].row.action}," if busy else "its workspace"
            raise conflict(
                f"{what} of `{thread.id}` is still busy; nothing was done: try again when it is over"
            )
        if answers:
            await asyncio.wait(answers, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        # An answer is given before its call has landed.
        await asyncio.sleep(0.01)
