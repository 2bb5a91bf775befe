"""Renews this kernel's lease, and stops everything when another kernel has taken over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from ringfence.kernel.config import HEARTBEAT_S
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Unavailable

log = logging.getLogger(__name__)


class Heartbeat:
    """The lease of one kernel."""

    def __init__(self, core: Core, on_fenced: Callable[[], Awaitable[None]]) -> None:
        self._core = core
        self._on_fenced = on_fenced

    async def beat(self) -> bool:
        """Renew once. Returns False when the lease can't be had again: another kernel holds our agents."""
        try:
            return await self._core.renew_lease()
        except Unavailable:
            return True

    async def run(self) -> None:
        """Renew until cancelled or fenced."""
        while True:
            if not await self.beat():
                log.error("another kernel has taken over this kernel's agents; stopping")
                for thread in self._core.threads.values():
                    thread.fenced = True
                await self._on_fenced()
                return
            await asyncio.sleep(HEARTBEAT_S)


def boot_id() -> str:
    """The host's boot, so that a pid of an earlier one is never taken for a process of now."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
