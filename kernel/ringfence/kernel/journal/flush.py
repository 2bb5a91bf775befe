"""One flush: a batch of rows and their atomic work in one transaction on a wire.

Plain batches go in one round trip through `journal_append`, and so do checkpoints and state changes of keys whose versions are
known: they are reckoned with, and the server writes only if they hold. Other atomic work locks and looks first, then inserts.
Very large batches are inserted by COPY, which takes more round trips and less of the server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringfence.kernel.journal import sqlwork
from ringfence.kernel.journal.batches import (
    Attempt,
    Head,
    Sending,
    checkpoints_behind,
    claims_of,
    columns_of,
    do_work,
    epochs_of,
    fail,
    finish_body,
    finished,
    held_of,
    keep_allowed,
    locks_of,
    number_at,
    sends_of,
    truth_of,
    values_of,
)
from ringfence.kernel.journal.chain import genesis
from ringfence.kernel.journal.copyrows import (
    OID_TEXT,
    Pending,
    bytes_array,
    chained,
    copy_data,
    int8,
    int8_array,
    record,
    record_array,
)
from ringfence.kernel.journal.database import statements
from ringfence.kernel.journal.deltas import PackedSave
from ringfence.kernel.journal.statework import Held, StateWork, keys_of
from ringfence.kernel.journal.types import KernelKey
from ringfence.kernel.journal.wire import Refused
from ringfence.syscalls.base import StateChange

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult
    from ringfence.kernel.journal.wire import Statement, Wire

KNOWN_KEYS_MAX = 16_384
"""State keys whose version is remembered; beyond it all are forgotten."""

ARRAY_ROWS_MAX = 512
"""Largest batch that is inserted from an array: a row costs the server half as much again as with COPY, but it waits for
one turn of a busy event loop instead of three."""

PREPARED = (
    "row_type", "began", "end_session", "begin", "commit", "rollback", "append", "append_one", "append_some", "append_put", "append_changes", "insert",
    "check", "heads", "hash_at", "lock_one", "lock_agents", "hold", "lock", "hold_claims", "lock_claims", "record", "advance", "checkpoint", "savepoint", "release", "undo",
)  # fmt: skip


@dataclass(slots=True)
class Flush:
    """Writes batches for one kernel. Holds no rows between calls.

    Attributes:
        heads: the chains that may be written.
        known: state keys as this kernel last saw them. Only reckoned with: the flush itself says whether it holds.
    """

    wire: Wire
    kernel: KernelKey
    fence: int
    heads: dict[int, Head]
    row_oid: int = 0
    began_us: int = 0
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    known: dict[str, Held] = field(default_factory=dict[str, Held])

    async def prepare(self) -> None:
        """Prepare the connection.

        Raises:
            Lost, Refused: as the wire says.
        """
        texts = statements("writer")
        works = {sqlwork.prepared(name): text.encode() for name, text in sqlwork.texts().items()}
        await self.wire.prepare({name.encode(): texts[name].encode() for name in PREPARED} | works)
        self.row_oid = number_at(await self.wire.run((b"row_type", ())), 0, 0)
        self.began_us = number_at(await self.wire.run((b"began", ())), 0, 0)

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
            chain = number_at(result, nr, 0)
            self.heads[chain] = Head(
                number_at(result, nr, 1),
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
        sending = self.ready(batch)
        if sending is not None:
            try:
                results = await self.wire.pipeline(sending.statements)
            except Refused:
                self.attempts.remove(sending.attempt)
                raise
            if self.inserted(sending, results):
                return sending.attempt
            if sending.tells:
                batch = keep_allowed(batch, truth_of(results[sending.answer]))
        batch = [pending for pending in batch if not pending.future.done()]
        return await self._transaction(batch) if batch else None

    def ready(self, batch: list[Pending]) -> Sending | None:
        """Make a batch ready to go in one round trip. None: it can't, or nobody waits for it any more."""
        if len(batch) > ARRAY_ROWS_MAX:
            return None
        for pending in batch:
            if pending.entry.atomic is not None:
                return self._ready_changes(batch)
        batch = finished(batch)
        epochs = epochs_of(batch)
        return self._ready_rows(batch, epochs) if batch and epochs is not None else None

    def inserted(self, sending: Sending, results: Sequence[PGresult]) -> bool:
        """Whether it was written; else nothing was, and it is no attempt any more."""
        result = results[sending.answer]
        work = sending.work
        if not result.ntuples if sending.tells else result.command_tuples:
            if work is not None:
                self.known.update(work.held())
            return True
        self.attempts.remove(sending.attempt)
        for key in sending.before:
            self.known.pop(key, None)
        return False

    def adopt_attempt(self, attempt: Attempt) -> None:
        """Move the heads on, now that it is committed."""
        for chain, (pos, digest) in attempt.heads.items():
            head = self.heads.get(chain)
            if head is not None:
                head.pos, head.hash = pos, digest

    def _attempt(self, batch: list[Pending]) -> Attempt:
        heads: dict[int, tuple[int, bytes]] = {}
        for pending in batch:
            chain = pending.entry.row.chain
            if chain not in heads:
                head = self.heads[chain]
                heads[chain] = (head.pos, head.hash)
        attempt = Attempt(batch, chained(batch, heads), heads)
        self.attempts.append(attempt)
        return attempt

    def _ready_rows(self, batch: list[Pending], epochs: dict[int, int | None]) -> Sending:
        attempt = self._attempt(batch)
        links = attempt.links
        if not epochs:
            return Sending(attempt, [(b"insert", (record_array(links, self.row_oid),))])
        kernel, fence = int8(self.kernel), int8(self.fence)
        if len(attempt.heads) == 1:
            # One agent, the commonest small batch: a third less work for the server than `append`. A pipeline
            # without begin is one transaction, and each statement in it sees what the lock waited for.
            key, epoch = next(iter(epochs.items()))
            name, wanted = int8(key), None if epoch is None else int8(epoch)
            rows = (
                (b"append_one", record(links[0]))
                if len(links) == 1
                else (b"append_some", record_array(links, self.row_oid))
            )
            return Sending(
                attempt, [(b"lock_one", (name,)), (rows[0], (kernel, fence, name, wanted, rows[1]))]
            )
        rows = record_array(links, self.row_oid)
        keys = sorted(epochs)
        wanted = int8_array([epochs[key] for key in keys])
        return Sending(attempt, [(b"append", (kernel, fence, int8_array(keys), wanted, rows))], tells=True)

    def _ready_changes(self, batch: list[Pending]) -> Sending | None:
        """State changes and checkpoints, reckoned with the versions seen last."""
        epochs = epochs_of(batch)
        work = self._reckoned(batch)
        if epochs is None or work is None:
            return None
        before = [(key, held.version) for key, held in sorted(work.held().items())]
        for pending in batch:
            if pending.entry.finish is None and pending.entry.atomic is None:
                continue
            try:
                do_work(pending, work, self.heads)
            except Exception:  # noqa: BLE001 - done again on locked rows, where an error is the caller's
                return None
        attempt = self._attempt(batch)
        links = attempt.links
        kernel, fence = int8(self.kernel), int8(self.fence)
        agents = sorted(epochs)
        wanted = [epochs[agent] for agent in agents]
        saves = checkpoints_behind(batch, attempt.links)
        known = [key for key, _ in before]
        if len(links) == len(agents) == len(before) == len(work.changed) == 1:
            # A lone call that changes the one key that it rests on: half the server's work.
            name, epoch = int8(agents[0]), None if wanted[0] is None else int8(wanted[0])
            put = (
                kernel,
                fence,
                name,
                epoch,
                int8(before[0][1]),
                *values_of(work.changed[0]),
                record(links[0]),
            )
            sends: list[Statement] = [(b"lock_one", (name,)), (b"append_put", put), *saves]
            return Sending(attempt, sends, answer=1, work=work, before=known)
        keys = bytes_array([key.encode() for key in known], OID_TEXT)
        # Only locked: the statement that writes looks at epochs and owner itself, and sees what the locks waited for.
        locks: list[Statement] = [(b"lock_agents", (int8_array(agents),))]
        if before:
            locks.append((b"lock", (keys,)))
        values = (
            *(kernel, fence, int8_array(agents), int8_array(wanted), record_array(links, self.row_oid)),
            *(keys, int8_array([version for _, version in before])),
            *columns_of(work.changed),
            *columns_of(work.newest()),
        )
        sends = [*locks, (b"append_changes", values), *saves]
        return Sending(attempt, sends, answer=len(locks), work=work, before=known)

    def _reckoned(self, batch: list[Pending]) -> StateWork | None:
        """The keys of a batch as they were seen last; None: one never was, or other work is among it."""
        work = StateWork()
        for pending in batch:
            change = pending.entry.atomic
            if change is None or isinstance(change, PackedSave):
                continue
            if not isinstance(change, StateChange) or change.claims:
                return None
            held = [self.known.get(key) for key in keys_of(change)]
            seen = [one for one in held if one is not None]
            if len(seen) < len(held):
                return None
            work.load(seen)
        return work

    def _check_statement(self, batch: list[Pending]) -> Statement:
        keys = sorted({pending.entry.row.chain for pending in batch if pending.entry.row.chain > 0})
        return b"check", (int8(self.kernel), int8(self.fence), int8_array(keys))

    async def _transaction(self, batch: list[Pending]) -> Attempt | None:
        """Lock and check, do the atomic work, insert: two round trips, since between them the event loop is busy."""
        attempt = None
        try:
            batch, work = await self._opened(batch)
            batch = self._worked(await sqlwork.run(self.wire, batch, self.heads, finish_body), work)
            if not batch:
                await self.wire.run((b"rollback", ()))
                return None
            attempt = self._attempt(batch)
            await self._insert(attempt, sends_of(batch, work))
            if len(self.known) > KNOWN_KEYS_MAX:
                self.known.clear()
            self.known.update(work.held())
        except Refused:
            if attempt is not None:
                self.attempts.remove(attempt)
            await self.wire.run((b"rollback", ()))
            raise
        return attempt

    async def _opened(self, batch: list[Pending]) -> tuple[list[Pending], StateWork]:
        """Begin, and lock agents and state keys. Returns the entries that may be written, and the keys' versions."""
        while True:
            keys, taken, claims = locks_of(batch)
            sends: list[Statement] = [(b"begin", ()), self._check_statement(batch)]
            if keys:
                packed = _texts(keys)
                sends += [(b"hold", (packed,)), (b"lock", (packed,))]
            at = len(sends) - 1
            # INVARIANT: state keys, then claims, each in order, in every flush: two of them never wait for each other.
            if taken:
                sends.append((b"hold_claims", (_texts(taken),)))
            if taken or claims:
                sends.append((b"lock_claims", (_texts(taken | claims),)))
            results = await self.wire.pipeline(sends)
            allowed = keep_allowed(batch, truth_of(results[1]))
            work = StateWork()
            if len(allowed) == len(batch):
                if keys:
                    work.load(held_of(results[at]))
                if claims:
                    work.load_claims(claims_of(results[-1]))
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
            undo = work.mark()
            try:
                do_work(pending, work, self.heads)
            except Exception as error:  # noqa: BLE001 - `finish` is the caller's: so is its error
                work.undo(undo)
                fail(pending, error)
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


def _texts(keys: set[str]) -> bytes:
    return bytes_array([key.encode() for key in sorted(keys)], OID_TEXT)
