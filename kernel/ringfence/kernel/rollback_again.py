"""Tries rollbacks again that could not be carried to their end: a target is away, a disk is full, a point is damaged.

Until it is done the agent is neither started nor failed: half of its work is undone. There is no last try; whoever mends what
stands in the way needs to do nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import AgentKey, JournalError
from ringfence.kernel.moments import short_time
from ringfence.kernel.processes import Processes
from ringfence.kernel.retries import ERROR_CHARS_MAX, ordinal
from ringfence.kernel.rollback_begin import UNDER_WAY, goes_back
from ringfence.kernel.thread import FINAL_STATES, Thread
from ringfence.syscalls.errors import Fenced, JournalUnavailable

log = logging.getLogger(__name__)

AGAIN_S: Final = 0.5
AGAIN_S_MAX: Final = 60.0
"""The first wait between two tries is about the one, and no wait is longer than the other."""


def delay_s(number: int) -> float:
    """How long a try is waited for, in seconds. Agents that one target holds up don't all come back to it at once.

    Args:
        number: which try it is; the first one again is 1.
    """
    most = min(AGAIN_S_MAX, AGAIN_S * 2 ** min(number - 1, 16))
    return most * random.uniform(0.5, 1)  # noqa: S311 - nobody gains by guessing it


class Again:
    """The tries of one kernel.

    Args:
        core: the kernel's parts.
        processes: who sets the states.
        finish: what carries a rollback of an agent to its end.
    """

    def __init__(self, core: Core, processes: Processes, finish: Callable[[Thread], Awaitable[Any]]) -> None:
        self._core = core
        self._processes = processes
        self._finish = finish
        self._tasks: dict[AgentKey, asyncio.Task[None]] = {}

    def begin(self, threads: Iterable[Thread], error: BaseException) -> None:
        """Try again from now on, for each of these agents that is not tried yet."""
        for thread in threads:
            if thread.key in self._tasks or self._over(thread):
                continue
            task = asyncio.create_task(self._insist(thread, error))
            self._tasks[thread.key] = task
            task.add_done_callback(lambda _, key=thread.key: self._tasks.pop(key, None))

    async def close(self) -> None:
        """Stop trying; the next kernel goes on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _over(self, thread: Thread) -> bool:
        """Whether nobody here may finish it any more, or an operator has killed the agent: to start it finishes it then."""
        elsewhere = thread.fenced or self._core.threads.get(thread.key) is not thread
        return elsewhere or self._core.stopping or self._core.over or thread.state in FINAL_STATES

    async def _insist(self, thread: Thread, error: BaseException) -> None:
        number = 0
        while not self._over(thread):
            number += 1
            wait_s = delay_s(number)
            await self._tell(thread, error, number, wait_s)
            await asyncio.sleep(wait_s)
            if self._over(thread):
                return
            try:
                await self._finish(thread)
            except Fenced as caught:
                # A lease that was overdue is no reason to give up; another owner is.
                if not await self._is_ours(thread):
                    log.warning("%s is another kernel's now: its rollback is finished there", thread.id)
                    return
                error = caught
            except Exception as caught:  # noqa: BLE001 - whatever it is, half of the agent's work is undone
                error = caught
            else:
                log.info("the rollback of %s is finished", thread.id)
                return

    async def _is_ours(self, thread: Thread) -> bool:
        try:
            return await self._core.owns(thread.key)
        except JournalError:
            return True  # nobody knows: the next try tells

    async def _tell(self, thread: Thread, error: BaseException, number: int, wait_s: float) -> None:
        text = " ".join(str(error).split()) or type(error).__name__
        log.warning("the rollback of %s can't be finished now: %s; trying again", thread.id, text)
        short = text if len(text) <= ERROR_CHARS_MAX else f"{text[: ERROR_CHARS_MAX - 1]}…"
        at = short_time(datetime.now(UTC) + timedelta(seconds=wait_s))
        waits = f"{UNDER_WAY}, tried again at {at} ({ordinal(number)} time; last error: {short})"
        async with thread.operation:
            if not goes_back(thread) or self._over(thread):
                return
            try:
                await self._processes.set_state(thread, "paused", waiting_for=waits, error=text)
            except (JournalError, JournalUnavailable) as away:
                log.warning("why the rollback of %s waits can't be stored: %s", thread.id, away)
