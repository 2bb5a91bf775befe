"""One flush: a batch of rows and their atomic work in one transaction on a wire.

Plain batches go in one round trip through `journal_append`; atomic work locks and checks first, then inserts. Large
batches are inserted by COPY, which takes more round trips and less of the server.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringfence.kernel.journal import sqlwork
from ringfence.kernel.journal.chain import genesis
from ringfence.kernel.journal.copyrows import (
    OID_BYTEA,
    OID_TEXT,
    Link,
    Pending,
    bytes_array,
    chained,
    check_body,
    copy_data,
    int8,
    int8_array,
    record_array,
)
from ringfence.kernel.journal.database import statements
from ringfence.kernel.journal.statework import Held, StateWork, Version, keys_of
from ringfence.kernel.journal.types import EpochMoved, KernelKey, OwnerMoved, Row
from ringfence.kernel.journal.wire import Refused
from ringfence.syscalls.base import CheckpointSave, StateChange, Work

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult
    from ringfence.kernel.journal.wire import Statement, Wire

ARRAY_ROWS_MAX = 128
"""Largest batch that is inserted from an array: a row costs the server half as much again as with COPY, but it waits for
one turn of a busy event loop instead of three."""

PREPARED = (
    "row_type", "began", "end_session", "begin", "commit", "rollback", "append", "append_one", "insert", "check",
    "heads", "hash_at", "lock_one", "hold", "lock", "record", "advance", "checkpoint", "savepoint", "release", "undo",
)  # fmt: skip


@dataclass(slots=True)
class Head:
    """Where a chain ends, and whose it is."""

    pos: int
    hash: bytes
    agent: str


@dataclass(slots=True)
class Attempt:
    """What one transaction was to commit: enough to recognise it in the database afterwards.

    Attributes:
        pending: rows in it.
        links: their places.
        heads: where the chains end if it committed.
    """

    pending: list[Pending]
    links: list[Link]
    heads: dict[int, tuple[int, bytes]]


@dataclass(slots=True)
class Flush:
    """Writes batches for one kernel. Holds no rows between calls.

    Attributes:
        heads: the chains that may be written.
    """

    wire: Wire
    kernel: KernelKey
    fence: int
    heads: dict[int, Head]
    row_oid: int = 0
    began_us: int = 0
    attempts: list[Attempt] = field(default_factory=list[Attempt])

    async def prepare(self) -> None:
        """Prepare the connection.

        Raises:
            Lost, Refused: as the wire says.
        """
        texts = statements("writer")
        works = {sqlwork.prepared(name): text.encode() for name, text in sqlwork.texts().items()}
        await self.wire.prepare({name.encode(): texts[name].encode() for name in PREPARED} | works)
        self.row_oid = _number(await self.wire.run((b"row_type", ())), 0, 0)
        self.began_us = _number(await self.wire.run((b"began", ())), 0, 0)

    async def end_session(self, pid: int, began_us: int) -> None:
        """End the session of an earlier connection, which may still hold locks or be about to commit.

        Raises:
            Lost: the connection is gone.
        """
        try:
            await self.wire.run((b"end_session", (int8(pid), int8(began_us))))
        except Refused as error:
            # Without that right the chain's primary key still lets only one of two attempts in.
            logger.warning("the lost session can't be ended: %s", error)

    async def load_heads(self, chains: Sequence[int]) -> None:
        """Read where chains end.

        Raises:
            Lost, Refused: as the wire says.
        """
        if not chains:
            return
        result = await self.wire.run((b"heads", (int8_array(list(chains)),)))
        for nr in range(result.ntuples):
            chain = _number(result, nr, 0)
            self.heads[chain] = Head(
                _number(result, nr, 1),
                result.get_value(nr, 2) or genesis(chain),
                (result.get_value(nr, 3) or b"").decode(),
            )

    async def committed(self) -> Attempt | None:
        """Look which of the attempts of this batch committed, if any.

        Raises:
            Lost, Refused: as the wire says.
        """
        for attempt in self.attempts:
            # One transaction: its last row stands for all.
            last = attempt.links[-1]
            result = await self.wire.run((b"hash_at", (int8(last.chain), int8(last.pos))))
            if result.ntuples and result.get_value(0, 0) == last.hash:
                return attempt
        return None

    async def write(self, batch: list[Pending]) -> Attempt | None:
        """Write what may be written of a batch; entries that may not get their error.

        Returns:
            What committed; None: no entry was left.

        Raises:
            Lost: the connection is gone; `attempts` says what may have committed.
            Refused: nothing is committed.
        """
        if len(batch) <= ARRAY_ROWS_MAX and all(pending.entry.atomic is None for pending in batch):
            batch = _finished(batch)
            if not batch:
                return None
            attempt = self._attempt(batch)
            try:
                truth = await self._append(attempt)
            except Refused:
                self.attempts.remove(attempt)
                raise
            if truth is None:
                return attempt
            self.attempts.remove(attempt)
            batch = _allowed(batch, truth)
        return await self._transaction(batch) if batch else None

    def adopt_attempt(self, attempt: Attempt) -> None:
        """Move the heads on, now that it is committed."""
        for chain, (pos, digest) in attempt.heads.items():
            head = self.heads.get(chain)
            if head is not None:
                head.pos, head.hash = pos, digest

    def _attempt(self, batch: list[Pending]) -> Attempt:
        chains = {pending.entry.row.chain for pending in batch}
        heads = {chain: (self.heads[chain].pos, self.heads[chain].hash) for chain in chains}
        attempt = Attempt(batch, chained(batch, heads), heads)
        self.attempts.append(attempt)
        return attempt

    async def _append(self, attempt: Attempt) -> dict[int, tuple[int, bool]] | None:
        """Check and insert in one round trip. None: it inserted; else the truth about each agent."""
        epochs = _epochs(attempt.pending)
        if epochs is None:
            return await self._check_only(attempt.pending)
        rows = record_array(attempt.links, self.row_oid)
        if not epochs:
            await self.wire.run((b"insert", (rows,)))
            return None
        kernel, fence = int8(self.kernel), int8(self.fence)
        if len(attempt.heads) == 1:
            # One agent, the commonest small batch: a third less work for the server than `append`. A pipeline
            # without begin is one transaction, and each statement in it sees what the lock waited for.
            key, epoch = next(iter(epochs.items()))
            expected = None if epoch is None else int8(epoch)
            results = await self.wire.pipeline(
                [(b"lock_one", (int8(key),)), (b"append_one", (kernel, fence, int8(key), expected, rows))]
            )
            return None if results[-1].command_tuples else await self._check_only(attempt.pending)
        keys = sorted(epochs)
        wanted = int8_array([epochs[key] for key in keys])
        result = await self.wire.run((b"append", (kernel, fence, int8_array(keys), wanted, rows)))
        return _truth(result) if result.ntuples else None

    async def _check_only(self, batch: list[Pending]) -> dict[int, tuple[int, bool]]:
        return _truth(await self.wire.run(self._check_statement(batch)))

    def _check_statement(self, batch: list[Pending]) -> Statement:
        keys = sorted({pending.entry.row.chain for pending in batch if pending.entry.row.chain > 0})
        return b"check", (int8(self.kernel), int8(self.fence), int8_array(keys))

    async def _transaction(self, batch: list[Pending]) -> Attempt | None:
        """Lock and check, do the atomic work, insert: two round trips, since between them the event loop is busy."""
        attempt = None
        try:
            batch, work = await self._opened(batch)
            batch = self._worked(await sqlwork.run(self.wire, batch, self.heads, _finish), work)
            if not batch:
                await self.wire.run((b"rollback", ()))
                return None
            attempt = self._attempt(batch)
            await self._insert(attempt, _sends(batch, work))
        except Refused:
            if attempt is not None:
                self.attempts.remove(attempt)
            await self.wire.run((b"rollback", ()))
            raise
        return attempt

    async def _opened(self, batch: list[Pending]) -> tuple[list[Pending], StateWork]:
        """Begin, and lock agents and state keys. Returns the entries that may be written, and the keys' versions."""
        while True:
            keys: set[str] = set()
            for pending in batch:
                if isinstance(pending.entry.atomic, StateChange):
                    keys |= keys_of(pending.entry.atomic)
            sends: list[Statement] = [(b"begin", ()), self._check_statement(batch)]
            if keys:
                packed = bytes_array([key.encode() for key in sorted(keys)], OID_TEXT)
                sends += [(b"hold", (packed,)), (b"lock", (packed,))]
            results = await self.wire.pipeline(sends)
            allowed = _allowed(batch, _truth(results[1]))
            work = StateWork()
            if len(allowed) == len(batch):
                if keys:
                    work.load(_held(results[-1]))
                return batch, work
            if not allowed:
                return [], work
            # Keys of what may not be written are held too: begin again without them.
            await self.wire.run((b"rollback", ()))
            batch = allowed

    def _worked(self, batch: list[Pending], work: StateWork) -> list[Pending]:
        """Work out the state changes, and make the bodies from them. Returns the entries whose work can be done."""
        kept: list[Pending] = []
        for pending in batch:
            row, change = pending.entry.row, pending.entry.atomic
            undo = work.mark()
            try:
                if isinstance(change, StateChange):
                    head = self.heads[row.chain]
                    pending.done = work.apply(change, head.agent, row.step)
                if not isinstance(change, Work):
                    _finish(pending)
            except Exception as error:  # noqa: BLE001 - `finish` is the caller's: so is its error
                work.undo(undo)
                _fail(pending, error)
            else:
                kept.append(pending)
        return kept

    async def _insert(self, attempt: Attempt, sends: list[Statement]) -> None:
        """Insert the rows after the statements of their atomic work, and commit."""
        if len(attempt.links) <= ARRAY_ROWS_MAX:
            rows = record_array(attempt.links, self.row_oid)
            await self.wire.pipeline([*sends, (b"insert", (rows,)), (b"commit", ())])
            return
        if sends:
            await self.wire.pipeline(sends)
        await self.wire.copy(statements("writer")["copy"].encode(), copy_data(attempt.links))


def _sends(batch: list[Pending], work: StateWork) -> list[Statement]:
    """What does the atomic work of a batch."""
    sends: list[Statement] = []
    if work.changed:
        sends += [(b"record", _columns(work.changed)), (b"advance", _columns(work.newest()))]
    for pending in batch:
        atomic = pending.entry.atomic
        if isinstance(atomic, CheckpointSave):
            sends.append(_checkpoint(pending.entry.row, atomic))
    return sends


def _finish(pending: Pending) -> None:
    if pending.entry.finish is not None:
        body = pending.entry.finish(pending.done)
        check_body(body)
        pending.body = body


def _finished(batch: list[Pending]) -> list[Pending]:
    kept: list[Pending] = []
    for pending in batch:
        try:
            _finish(pending)
        except Exception as error:  # noqa: BLE001 - `finish` is the caller's: so is its error
            _fail(pending, error)
        else:
            kept.append(pending)
    return kept


def _fail(pending: Pending, error: BaseException) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)


def _epochs(batch: list[Pending]) -> dict[int, int | None] | None:
    """The epoch each agent has to have for the batch; None: entries disagree, so some are out of date."""
    epochs: dict[int, int | None] = {}
    for pending in batch:
        chain, epoch = pending.entry.row.chain, pending.entry.epoch
        if chain < 0:
            continue
        known = epochs.setdefault(chain, epoch)
        if known is None:
            epochs[chain] = epoch
        elif epoch is not None and epoch != known:
            return None
    return epochs


def _truth(result: PGresult) -> dict[int, tuple[int, bool]]:
    return {
        _number(result, nr, 0): (_number(result, nr, 1), result.get_value(nr, 2) == b"\1")
        for nr in range(result.ntuples)
    }


def _allowed(batch: list[Pending], truth: dict[int, tuple[int, bool]]) -> list[Pending]:
    """Keep the entries that may be written; the others get their error."""
    kept: list[Pending] = []
    for pending in batch:
        chain = pending.entry.row.chain
        if chain < 0:
            kept.append(pending)
            continue
        epoch, owned = truth.get(chain, (0, False))
        if not owned:
            _fail(pending, OwnerMoved("another kernel owns the agent, or this kernel's lease has run out"))
        elif pending.entry.epoch is not None and pending.entry.epoch != epoch:
            _fail(pending, EpochMoved(epoch))
        else:
            kept.append(pending)
    return kept


def _checkpoint(row: Row, save: CheckpointSave) -> Statement:
    numbers = (row.chain, row.step, row.branch, row.lane_step, save.schema_version, save.next_child)
    return b"checkpoint", (*map(int8, numbers), save.state, hashlib.sha256(save.state).digest())


def _columns(versions: Sequence[Version]) -> list[bytes]:
    return [
        bytes_array([v.key.encode() for v in versions], OID_TEXT),
        int8_array([v.version for v in versions]),
        bytes_array([v.value for v in versions], OID_BYTEA),
        bytes_array([v.agent.encode() for v in versions], OID_TEXT),
        int8_array([v.step for v in versions]),
    ]


def _held(result: PGresult) -> list[Held]:
    return [
        Held(
            (result.get_value(nr, 0) or b"").decode(),
            _number(result, nr, 1),
            result.get_value(nr, 2) == b"\1",
            (result.get_value(nr, 3) or b"").decode(),
        )
        for nr in range(result.ntuples)
    ]


def _number(result: PGresult, row: int, column: int) -> int:
    return int.from_bytes(result.get_value(row, column) or b"", "big", signed=True)
