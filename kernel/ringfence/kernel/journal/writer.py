"""The journal's writer: grouped commits.

While a flush is in flight everything that is handed in queues; the next flush takes it all. There is no
linger: a lone caller waits for one commit. A flush is one transaction (see flush.py); callers are answered
after it committed.

A connection lost in the middle leaves open whether the batch committed. The next connection ends the old session, then looks for
the batch's last row by position and hash: there, the batch counts as committed; not there, it is written again.

INVARIANT: for a chain in `_heads` only this task of this kernel writes rows, in an order fixed before they
are sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ringfence.kernel.journal.batches import Head, fail_all
from ringfence.kernel.journal.copyrows import Pending, Waiter, prepare
from ringfence.kernel.journal.flush import Attempt, Flush
from ringfence.kernel.journal.types import (
    AgentKey,
    BadRow,
    Entry,
    JournalError,
    KernelKey,
    OwnerMoved,
    Unavailable,
)
from ringfence.kernel.journal.wire import Lost, Refused, Wire

logger = logging.getLogger(__name__)

BATCH_ROWS_MAX = 2000
BATCH_BYTES_MAX = 8 << 20
QUEUE_ROWS_SOFT = 8192
QUEUE_BYTES_SOFT = 32 << 20
QUEUE_ROWS_MAX = 65_536
QUEUE_BYTES_MAX = 256 << 20
PATIENCE_S = 20.0
RECONNECT_FIRST_S = 0.02
RECONNECT_MAX_S = 1.0
REWRITES_MAX = 8

_CHAIN_KEY = "journal_pkey"


class Journal:
    """Appends rows to chains, many at a time, each durable when its future resolves."""

    def __init__(self, dsn: str, kernel: KernelKey, fence: int, *, patience_s: float = PATIENCE_S) -> None:
        """Prepare a journal; `start` connects it. An append waits `patience_s` for a database that is away."""
        self._dsn = dsn
        self._kernel = kernel
        self._fence = fence
        self.patience_s = patience_s  # a kernel that stops has less
        self._heads: dict[int, Head] = {}
        self._queue: deque[Pending] = deque()
        self._queue_bytes = 0
        self._adoptions: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._sleep: asyncio.Future[None] | None = None  # of the writer, while nothing is queued
        self._lone = False  # whether the last batch was one row
        self._room = asyncio.Event()
        self._room.set()
        self._flush: Flush | None = None
        self._attempts: list[Attempt] = []
        self._lost_session: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.batches = self.rows = 0
        self.flushed: Callable[[int, float], None] | None = None  # gets rows and seconds of each flush

    @property
    def own_chain(self) -> int:
        """The kernel's own chain."""
        return -self._kernel

    @property
    def waiting(self) -> int:
        """Rows that wait for a flush."""
        return len(self._queue)

    async def start(self) -> None:
        """Connect and load the head of the kernel's own chain.

        Raises:
            Unavailable: the database is away.
            JournalError: it refuses what the journal needs, as a schema of another version does.
        """
        self._heads[-self._kernel] = Head(0, b"", "")
        try:
            await self._connect()
        except Lost as error:
            raise Unavailable(f"the database is not available: {error}") from error
        except Refused as error:
            raise JournalError(f"the database can't be used: {error}") from error
        self._task = asyncio.create_task(self._run(), name="ringfence journal")

    async def stop(self) -> None:
        """Write what is queued, as far as the database lets it, and disconnect. Appends fail from then on."""
        self._stopping = True
        self._wake()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._fail_queue("the journal is stopped", older_than=None)
        await self._disconnect()

    def append(self, entry: Entry) -> asyncio.Future[Any]:
        """Hand in one row.

        Returns:
            Resolves once the row is durable, with StateDone for a StateChange, with what its statement answered for a
            Work, else None. Fails with EpochMoved, the policy epoch is another one now; OwnerMoved, this kernel may
            not write for the agent; StateConflict, what the atomic change read is no longer current; NothingYet, the
            work has to wait; BadRow, the row can't be stored; what `finish` raised; Unavailable, the database did not
            come back in time or the queue is full. A row decided under an epoch that was under way may then still
            turn out to be written; a row without epoch is not given up once it was sent.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.hand_in(entry, future)
        return future

    def hand_in(self, entry: Entry, waiter: Waiter) -> None:
        """Hand in one row; its waiter is told what `append` says, perhaps before this returns."""
        if self._stopping or self._task is None:
            waiter.set_exception(Unavailable("the journal is stopped"))
        elif entry.row.chain not in self._heads:
            waiter.set_exception(OwnerMoved("this kernel has not adopted the agent"))
        elif len(self._queue) >= QUEUE_ROWS_MAX or self._queue_bytes >= QUEUE_BYTES_MAX:
            waiter.set_exception(Unavailable("the journal's queue is full"))
        else:
            try:
                pending = prepare(entry, waiter, time.monotonic())
            except BadRow as error:
                waiter.set_exception(error)
                return
            self._queue.append(pending)
            self._queue_bytes += pending.size_bytes
            if len(self._queue) >= QUEUE_ROWS_SOFT or self._queue_bytes >= QUEUE_BYTES_SOFT:
                self._room.clear()
            if self._sleep is not None:
                self._wake()

    async def room(self) -> None:
        """Wait until the queue is below its soft bound: before reading the next call off a network."""
        await self._room.wait()

    async def adopt(self, agent: AgentKey) -> None:
        """Take the end of an agent's chain into memory; call it once this kernel owns the agent.

        Raises:
            Unavailable: the database is away.
        """
        if self._stopping or self._task is None:
            raise Unavailable("the journal is stopped")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._adoptions.append((agent, future))
        self._wake()
        try:
            async with asyncio.timeout(self.patience_s):
                await future
        except TimeoutError:
            raise Unavailable("the database is not available") from None

    def forget(self, agent: AgentKey) -> None:
        """Drop an agent's chain: later appends fail with OwnerMoved."""
        self._heads.pop(agent, None)

    def head(self, chain: int) -> tuple[int, bytes]:
        """Return position and hash of the last durable row of a chain that is in memory.

        Raises:
            KeyError: it isn't.
        """
        head = self._heads[chain]
        return head.pos, head.hash

    def heads(self) -> dict[int, tuple[int, bytes]]:
        """Return the same for every chain in memory."""
        return {chain: (head.pos, head.hash) for chain, head in self._heads.items()}

    def _wake(self) -> None:
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    async def _run(self) -> None:
        while True:
            if not self._queue and not self._adoptions:
                if self._stopping:
                    return
                self._sleep = asyncio.get_running_loop().create_future()
                await self._sleep
                self._sleep = None
                continue
            # No linger, but one turn of the event loop: calls that it was about to run come along, where there are others.
            if not self._lone:
                await asyncio.sleep(0)
            if (self._flush is None or self._flush.wire.lost) and not await self._connected([]):
                continue
            if self._adoptions:
                await self._adopt_waiting()
            batch = self._take()
            self._lone = len(batch) == 1
            if batch:
                await self._write(batch)

    def _take(self) -> list[Pending]:
        """Take the next batch off the queue, without what nobody waits for or what may not be written."""
        batch: list[Pending] = []
        size = 0
        while self._queue and len(batch) < BATCH_ROWS_MAX and size < BATCH_BYTES_MAX:
            pending = self._queue.popleft()
            self._queue_bytes -= pending.size_bytes
            if pending.future.done():
                continue
            if pending.entry.row.chain not in self._heads:
                fail_all([pending], OwnerMoved("this kernel has given up the agent"))
                continue
            batch.append(pending)
            size += pending.size_bytes
        if len(self._queue) < QUEUE_ROWS_SOFT and self._queue_bytes < QUEUE_BYTES_SOFT:
            self._room.set()
        return batch

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
        self._attempts = []
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
                self._fail_queue(why, older_than=0 if self._stopping else self.patience_s)
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

    def _fail_queue(self, why: str, *, older_than: float | None) -> None:
        limit = None if older_than is None else time.monotonic() - older_than
        while self._queue and (limit is None or self._queue[0].since < limit):
            pending = self._queue.popleft()
            self._queue_bytes -= pending.size_bytes
            fail_all([pending], Unavailable(why))
        if not self._queue:
            self._room.set()
