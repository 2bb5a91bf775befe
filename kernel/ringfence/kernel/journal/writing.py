"""A batch of the journal written to its end, over as many connections as it takes.

A connection lost in the middle leaves open whether the batch committed. The next connection ends the old session, then looks for
the batch's last row by position and hash: there, the batch counts as committed; not there, it is written again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from ringfence.kernel.journal.batches import Attempt, Head, fail_all
from ringfence.kernel.journal.copyrows import Pending
from ringfence.kernel.journal.flush import Flush
from ringfence.kernel.journal.queue import Queue
from ringfence.kernel.journal.types import BadRow, JournalError, KernelKey, Unavailable
from ringfence.kernel.journal.wire import Lost, Refused, Wire

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0
RECONNECT_FIRST_S = 0.02
RECONNECT_MAX_S = 1.0
REWRITES_MAX = 8

_CHAIN_KEY = "journal_pkey"


class Writing:
    """The slow half of the journal: connections, refusals, and tries whose fate is open."""

    def __init__(self, dsn: str, kernel: KernelKey, fence: int, patience_s: float) -> None:
        self._dsn = dsn
        self._kernel = kernel
        self._fence = fence
        self.patience_s = patience_s  # a kernel that stops has less
        self._heads: dict[int, Head] = {}
        self._queue = Queue()
        self._adoptions: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._flush: Flush | None = None
        self._attempts: list[Attempt] = []
        self._lost_session: tuple[int, int] | None = None
        self._stopping = False
        self.batches = self.rows = 0
        self.flushed: Callable[[int, float], None] | None = None  # gets rows and seconds of each flush

    async def _adopt_waiting(self) -> None:
        waiting = list(self._adoptions)
        flush = self._flush
        if flush is None:
            return
        failure: Unavailable | None = None
        try:
            await flush.load_heads([chain for chain, _ in waiting])
        except Lost:
            await self._disconnect()
            return
        except Refused as error:
            failure = Unavailable(f"the database refused to read the chain: {error}")
        for _ in waiting:
            _, future = self._adoptions.popleft()
            if failure is not None and not future.done():
                future.set_exception(failure)
            elif not future.done():
                future.set_result(None)

    async def _write(self, batch: list[Pending]) -> None:
        """Write one batch to its end: committed, refused or given up."""
        began = time.monotonic()
        try:
            await self._write_or_bisect(batch)
            if self.flushed is not None:
                self.flushed(len(batch), time.monotonic() - began)
        except Exception as error:
            # A bug here must not leave callers waiting for ever, nor end the writer.
            logger.exception("the journal's writer failed")
            fail_all(batch, JournalError(f"the journal failed: {error}"))
            await self._disconnect()
        finally:
            self._attempts = []

    async def _write_or_bisect(self, batch: list[Pending]) -> None:
        tries = 0
        # INVARIANT: no row is said to have failed before it is known what became of the last try.
        while await self._connected(batch) and not await self._try(batch, last=tries >= REWRITES_MAX):
            tries += 1

    async def _try(self, batch: list[Pending], *, last: bool = False) -> bool:
        """Write a batch once, unless an earlier try turns out to have committed; the last time only look. False: try again."""
        flush = self._flush
        if flush is None:
            return False
        flush.attempts = self._attempts
        try:
            written = await flush.committed() if self._attempts else None
            if written is None and last:
                fail_all(batch, Unavailable("the database did not take the rows after several tries"))
            elif written is None:
                waiting = [pending for pending in batch if not pending.future.done()]
                written = await flush.write(waiting) if waiting else None
        except Lost:
            await self._disconnect()
            return False
        except Refused as error:
            return await self._refused(batch, error)
        if written is not None:
            self._settle(flush, written)
        return True

    async def _refused(self, batch: list[Pending], error: Refused) -> bool:
        """Deal with a refusal, of which nothing is committed. False: try again."""
        if error.passing:
            return False
        if error.constraint == _CHAIN_KEY:
            # An earlier try arrived after all, or another writer was here: look again.
            await self._reload()
            return False
        if error.not_the_row:
            fail_all(batch, Unavailable(f"the database can't commit: {error}"))
        elif len(batch) == 1:
            fail_all(batch, BadRow(f"the row can't be stored: {error}"))
        else:
            # One row spoils the batch of all: halve until it stands alone.
            middle = len(batch) // 2
            await self._write_or_bisect(batch[:middle])
            await self._write_or_bisect(batch[middle:])
        return True

    def _settle(self, flush: Flush, attempt: Attempt) -> None:
        flush.adopt_attempt(attempt)
        self._attempts.clear()
        self.batches += 1
        self.rows += len(attempt.pending)
        for pending in attempt.pending:
            if not pending.future.done():
                pending.future.set_result(pending.done)

    async def _reload(self) -> None:
        try:
            if self._flush is not None:
                await self._flush.load_heads(list(self._heads))
        except (Lost, Refused):
            await self._disconnect()

    async def _connected(self, batch: list[Pending]) -> bool:
        """Make sure there is a connection. False: there is none, and nothing is left that waits for one."""
        delay = RECONNECT_FIRST_S
        started = time.monotonic()
        while self._flush is None or self._flush.wire.lost:
            await self._disconnect()
            try:
                await self._connect()
            except (Unavailable, Lost, Refused) as error:
                why = f"the database is not available: {error}"
                if time.monotonic() - started > self.patience_s:
                    self._give_up(batch, why)
                self._queue.give_up(why, older_than=0 if self._stopping else self.patience_s)
                if not self._waited_for(batch):
                    return False
                await asyncio.sleep(delay)
                delay = min(delay * 2, RECONNECT_MAX_S)
        return True

    def _give_up(self, batch: list[Pending], why: str) -> None:
        """Fail what has waited long enough.

        A row that no revocation concerns tells of something that has happened, and an atomic one makes it
        happen. Once such a row was sent, its caller is not told that it failed, for it would write it again:
        it waits until its fate is known, or the journal stops.
        """
        sent = {id(pending) for attempt in self._attempts for pending in attempt.pending}
        for pending in batch:
            entry = pending.entry
            harmless = entry.epoch is not None and entry.atomic is None
            if self._stopping or harmless or id(pending) not in sent:
                fail_all([pending], Unavailable(why))

    def _waited_for(self, batch: list[Pending]) -> bool:
        """Whether anyone still waits for the database."""
        while self._adoptions and (self._stopping or self._adoptions[0][1].done()):
            _, future = self._adoptions.popleft()
            if not future.done():
                future.set_exception(Unavailable("the journal is stopped"))
        return bool(self._queue or self._adoptions) or any(not pending.future.done() for pending in batch)

    async def _connect(self) -> None:
        wire = await Wire.connect(self._dsn)
        flush = Flush(wire, self._kernel, self._fence, self._heads)
        try:
            await flush.prepare()
            if self._lost_session is not None:
                await flush.end_session(*self._lost_session)
                self._lost_session = None
            await flush.load_heads(list(self._heads))
        except BaseException:
            await wire.close()
            raise
        self._flush = flush

    async def _disconnect(self) -> None:
        flush, self._flush = self._flush, None
        if flush is not None:
            self._lost_session = (flush.wire.pid, flush.began_us)
            await flush.wire.close()
