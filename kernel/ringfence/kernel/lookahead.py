"""Reads the past of agents that wait for their turn to live, while they wait: of many at once, which costs less than one by one.

INVARIANT: what was read counts for a start only where nothing was recorded of the agent since: its branch is the same, and its
chain ends where it did before the reading began. This kernel alone writes to the chain.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from ringfence.kernel.journal.types import AgentKey, JournalError
from ringfence.kernel.recovery import settle_again
from ringfence.syscalls.errors import SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.thread import Thread

log = logging.getLogger(__name__)

AGENTS: Final = 256
"""Of so many at a time: what is read of them is in memory until they are started."""


class Lookahead:
    """The pasts that are known before their agents' turns."""

    def __init__(self, core: Core, load: Callable[[Thread], Awaitable[None]]) -> None:
        self._core = core
        self._load = load
        self._reading = 0
        self._known: dict[AgentKey, tuple[int, int, bytes]] = {}

    async def read(self, thread: Thread) -> None:
        """Read what a thread's start would, where it still waits for its turn. What fails is left to the start."""
        if not self._room() or (thread.generation == 0 and thread.loaded):
            return
        self._reading += 1
        try:
            async with thread.operation:
                if thread.state != "pending" or thread.program is not None or self._core.stopping:
                    return
                await settle_again(self._core, thread)
                stands = self._stands(thread)
                await self._load(thread)
                if stands is not None:
                    self._known[thread.key] = stands
        except (JournalError, SyscallError) as error:
            log.info("the past of %s can't be read ahead: %s", thread.id, error)
        finally:
            self._reading -= 1

    def _room(self) -> bool:
        if self._reading + len(self._known) < AGENTS:
            return True
        threads = self._core.threads
        # Some were killed or paused while they waited.
        self._known = {
            key: stands
            for key, stands in self._known.items()
            if (thread := threads.get(key)) is not None and thread.state == "pending"
        }
        return self._reading + len(self._known) < AGENTS

    def take(self, thread: Thread) -> bool:
        """Whether the past of a thread that is about to be started was read, and is still all of it. It counts once."""
        known = self._known.pop(thread.key, None)
        return known is not None and thread.loaded and known == self._stands(thread)

    def _stands(self, thread: Thread) -> tuple[int, int, bytes] | None:
        """Where its branch and its chain stand; None: the chain is another kernel's."""
        try:
            return (thread.branch, *self._core.journal.head(thread.key))
        except KeyError:
            return None
