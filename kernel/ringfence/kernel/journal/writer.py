"""The journal's writer: grouped commits.

While a flush is in flight everything that is handed in queues; the next flush takes it all. There is no
linger: a lone caller waits for one commit. A flush is one transaction (see flush.py); callers are answered
after it committed.

Batches that go in one round trip, as nearly all do, need no task: what hands a row in sends it, and the callback that reads the
database's answer tells the callers and sends the next batch. Everything else is the turn of the writer's task.

INVARIANT: for a chain in `_heads` only this task of this kernel writes rows, in an order fixed before they
are sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ringfence.kernel.journal.batches import Head, Sending
from ringfence.kernel.journal.copyrows import Pending, Waiter, prepare
from ringfence.kernel.journal.flush import Flush
from ringfence.kernel.journal.types import (
    AgentKey,
    BadRow,
    Entry,
    JournalError,
    KernelKey,
    OwnerMoved,
    Unavailable,
)
from ringfence.kernel.journal.vigil import Vigil
from ringfence.kernel.journal.wire import Lost, Refused
from ringfence.kernel.journal.writing import PATIENCE_S, Writing

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

logger = logging.getLogger(__name__)


class Journal(Writing):
    """Appends rows to chains, many at a time, each durable when its future resolves."""

    def __init__(self, dsn: str, kernel: KernelKey, fence: int, *, patience_s: float = PATIENCE_S) -> None:
        """Prepare a journal; `start` connects it. An append waits `patience_s` for a database that is away."""
        super().__init__(dsn, kernel, fence, patience_s)
        self._busy = False  # whether a batch is under way, or about to be
        self._turn = asyncio.Event()  # of the writer's task, which alone is busy then
        self._left: list[Pending] = []  # a batch that the task is to write
        self._lone = False  # whether the last batch was one row, and nothing came meanwhile
        self._vigil: Vigil | None = None
        self._task: asyncio.Task[None] | None = None

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
        self._loop = asyncio.get_running_loop()
        self._vigil = Vigil.of(self._loop)
        self._task = asyncio.create_task(self._run(), name="ringfence journal")

    async def stop(self) -> None:
        """Write what is queued, as far as the database lets it, and disconnect. Appends fail from then on."""
        self._stopping = True
        self._wake()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._queue.give_up("the journal is stopped", older_than=None)
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
        else:
            try:
                pending = prepare(entry, waiter, time.monotonic())
            except BadRow as error:
                waiter.set_exception(error)
                return
            if not self._queue.put(pending):
                waiter.set_exception(Unavailable("the journal's queue is full"))
            elif not self._busy:
                self._busy = True
                # No linger, but one turn of the event loop: calls that it was about to run come along, where there are others.
                if self._lone:
                    self._go()
                else:
                    self._loop.call_soon(self._go)

    async def room(self) -> None:
        """Wait until the queue is below its soft bound: before reading the next call off a network."""
        await self._queue.room()

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
        """Have the task look: now, or when the batch under way is through."""
        if not self._busy:
            self._busy = True
            self._turn.set()

    # -- without a task -------------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Send the next batch, or leave it to the task."""
        if not (self._queue or self._adoptions or self._stopping):
            self._busy = False
            return
        flush = self._flush
        if flush is None or flush.wire.lost or self._adoptions or self._stopping:
            self._turn.set()
            return
        batch = self._queue.take(self._heads)
        if not batch:
            self._busy = False
            return
        self._attempts = flush.attempts = []
        began = time.monotonic()
        try:
            sending = flush.ready(batch)
        except Exception:
            # Tried again by the task, where a bug ends no more than its batch.
            logger.exception("the journal's writer failed")
            self._attempts.clear()
            sending = None
        if sending is None:
            self._hand_over(batch)
        else:
            flush.wire.send(sending.statements, partial(self._came, flush, batch, sending, began))
            if self._lone and len(batch) == 1 and self._vigil is not None:
                # Behind what the loop has to do yet.
                self._loop.call_soon(self._wait_awake, flush, self._vigil)

    def _wait_awake(self, flush: Flush, vigil: Vigil) -> None:
        if not self._queue and flush.wire.waits:
            vigil.keep()

    def _came(
        self,
        flush: Flush,
        batch: list[Pending],
        sending: Sending,
        began: float,
        results: list[PGresult],
        error: Exception | None,
    ) -> None:
        """The database has answered, or is gone."""
        try:
            if error is not None or not flush.inserted(sending, results):
                if not isinstance(error, Lost):
                    # Nothing of it is committed.
                    self._attempts.clear()
                self._hand_over(batch)
                return
            self._settle(flush, sending.attempt)
            if self.flushed is not None:
                self.flushed(len(batch), time.monotonic() - began)
        except Exception:
            # What is committed already is found by its attempt.
            logger.exception("the journal's writer failed")
            self._hand_over(batch)
            return
        self._lone = len(batch) == 1 and not self._queue
        if self._queue or self._adoptions or self._stopping:
            self._loop.call_soon(self._go)
        else:
            self._busy = False

    def _hand_over(self, batch: list[Pending]) -> None:
        self._left = batch
        self._turn.set()

    # -- the task -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._turn.wait()
            if self._left:
                batch, self._left = self._left, []
                await self._write(batch)
            elif self._queue or self._adoptions:
                if (self._flush is None or self._flush.wire.lost) and not await self._connected([]):
                    continue
                if self._adoptions:
                    await self._adopt_waiting()
                if self._stopping and (batch := self._queue.take(self._heads)):
                    self._attempts = []
                    await self._write(batch)
            elif self._stopping:
                return
            if not self._stopping and not self._adoptions:
                # Back to the way without a task.
                self._turn.clear()
                self._lone = False
                self._loop.call_soon(self._go)
