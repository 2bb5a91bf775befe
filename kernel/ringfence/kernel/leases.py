"""Renews this kernel's lease, and stops everything when another kernel has taken over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ringfence.kernel.config import HEARTBEAT_S, LEASE_S
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Unavailable

log = logging.getLogger(__name__)


class Heartbeat:
    """The lease of one kernel."""

    def __init__(self, core: Core, fence: int, on_fenced: Callable[[], Awaitable[None]]) -> None:
        self._core = core
        self._fence = fence
        self._on_fenced = on_fenced

    async def beat(self) -> bool:
        """Renew once. Returns False when the lease can't be had again: another kernel holds our agents."""
        asked_at = time.monotonic()
        try:
            renewed = await self._core.store.heartbeat(self._core.kernel, self._fence, LEASE_S)
        except Unavailable:
            return True
        if renewed:
            self._core.lease.extend(asked_at, LEASE_S)
        return renewed

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
