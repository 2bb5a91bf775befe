"""Rows that wait for a flush, within bounds. No I/O."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Container

from ringfence.kernel.journal.batches import fail, fail_all
from ringfence.kernel.journal.copyrows import Pending
from ringfence.kernel.journal.types import OwnerMoved, Unavailable

BATCH_ROWS_MAX = 2000
BATCH_BYTES_MAX = 8 << 20
QUEUE_ROWS_SOFT = 8192
QUEUE_BYTES_SOFT = 32 << 20
QUEUE_ROWS_MAX = 65_536
QUEUE_BYTES_MAX = 256 << 20


class Queue:
    """What was handed in and is not under way yet, in order."""

    def __init__(self) -> None:
        self._rows: deque[Pending] = deque()
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        """How many rows wait."""
        return len(self._rows)

    def put(self, pending: Pending) -> bool:
        """Take one more. False: it is full."""
        rows, size = len(self._rows), self._bytes
        if rows >= QUEUE_ROWS_SOFT - 1 or size >= QUEUE_BYTES_SOFT:
            if rows >= QUEUE_ROWS_MAX or size >= QUEUE_BYTES_MAX:
                return False
            self._room.clear()
        self._rows.append(pending)
        self._bytes = size + pending.size_bytes
        return True

    async def room(self) -> None:
        """Wait until it is below its soft bound."""
        await self._room.wait()

    def take(self, chains: Container[int]) -> list[Pending]:
        """Take the next batch, without what nobody waits for or what may not be written.

        Args:
            chains: those that may be written.
        """
        batch: list[Pending] = []
        rows = self._rows
        size = 0
        while rows and len(batch) < BATCH_ROWS_MAX and size < BATCH_BYTES_MAX:
            pending = rows.popleft()
            self._bytes -= pending.size_bytes
            if pending.future.done():
                continue
            if pending.entry.row.chain not in chains:
                fail(pending, OwnerMoved("this kernel has given up the agent"))
                continue
            batch.append(pending)
            size += pending.size_bytes
        self._look()
        return batch

    def give_up(self, why: str, *, older_than: float | None) -> None:
        """Fail what has waited that many seconds; None: all of it."""
        limit = None if older_than is None else time.monotonic() - older_than
        while self._rows and (limit is None or self._rows[0].since < limit):
            pending = self._rows.popleft()
            self._bytes -= pending.size_bytes
            fail_all([pending], Unavailable(why))
        self._look()

    def _look(self) -> None:
        if len(self._rows) < QUEUE_ROWS_SOFT and self._bytes < QUEUE_BYTES_SOFT:
            self._room.set()
