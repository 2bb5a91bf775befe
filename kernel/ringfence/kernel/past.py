"""Recorded rows of a thread, read from the journal when its program comes to them: a page ahead, never all of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from ringfence.kernel.journal.types import JournalError, Phase, StoredRow
from ringfence.kernel.places import NEWEST, Place
from ringfence.kernel.settled import Answer, answer_from
from ringfence.syscalls.errors import AuditChainBroken, InvalidRequest, JournalUnavailable, SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.thread import Thread

PAGE_ROWS: Final = 128
"""Rows that are read at a time."""

HELD_BYTES: Final = 1 << 20
"""Bodies that are held for one thread; beyond it those that were read first are let go."""

AHEAD_BYTES: Final = 32 << 10
"""Bodies that are kept of those that were read anyway, for a program that begins again."""

_AGAIN_S: Final = 0.2


class Known(Protocol):
    """What is known of a recorded outcome without its row."""

    @property
    def step(self) -> int:
        """Thread-wide."""
        ...

    @property
    def pos(self) -> int:
        """Its position in the chain."""
        ...


class Past:
    """Rows of one thread that were read last, by step."""

    __slots__ = ("_bytes", "_reading", "_rows")

    def __init__(self) -> None:
        self._rows: OrderedDict[int, StoredRow] = OrderedDict()
        self._bytes = 0
        self._reading = asyncio.Lock()

    async def row(self, core: Core, thread: Thread, known: Known) -> StoredRow:
        """Read one row. While the database is away it waits: nothing is done meanwhile, and the answer is there.

        Raises:
            JournalUnavailable: this kernel ends.
            AuditChainBroken: the row is gone from the database.
        """
        if isinstance(known, StoredRow):
            return known
        async with self._reading:
            while True:
                row = self._rows.get(known.step)
                if row is not None and row.pos == known.pos:
                    return row
                try:
                    return await self._read(core, thread, known)
                except JournalError as error:
                    if core.over or core.stopping:
                        text = f"the journal can't be read: {error}; the call may be made again"
                        raise JournalUnavailable(text) from error
                    await asyncio.sleep(_AGAIN_S)

    async def _read(self, core: Core, thread: Thread, known: Known) -> StoredRow:
        found: StoredRow | None = None
        if known.pos != NEWEST:
            parts = thread.lineage.parts
            for row in await core.store.outcomes_from(thread.key, parts, known.step, PAGE_ROWS):
                self._keep(row)
                found = row if row.pos == known.pos else found
        if found is None:
            # Of another branch, or noted by this kernel before its place in the chain was known.
            rows = [
                row
                for row in await core.store.step(thread.key, known.step)
                if row.phase is Phase.OUTCOME and row.outcome != "parked" and row.pos <= known.pos
            ]
            found = rows[-1] if rows else None
        if found is None:
            raise AuditChainBroken(
                f"the outcome of step {known.step} of `{thread.id}` is gone from the journal; see: ringfence audit verify"
            )
        return found

    def foresee(self, row: StoredRow) -> None:
        """Keep one of the first rows that a program will ask for, which whoever looks for its places has read."""
        if self._bytes + len(row.body) <= AHEAD_BYTES:
            self._keep(row)

    def _keep(self, row: StoredRow) -> None:
        before = self._rows.pop(row.step, None)
        self._rows[row.step] = row
        self._bytes += len(row.body) - (0 if before is None else len(before.body))
        while self._bytes > HELD_BYTES and len(self._rows) > 1:
            _, gone = self._rows.popitem(last=False)
            self._bytes -= len(gone.body)


PAST_UNREAD: Final = (JournalUnavailable, AuditChainBroken)
"""Why the past may not be known now: nothing was done, and the call may be made again."""


async def lost_reply(core: Core, thread: Thread, place: Place) -> StoredRow | SyscallError:
    """The newest outcome of a place that its lane has passed in this start, or why there is none to give."""
    lane, lane_step = place
    try:
        row = await core.store.answered(thread.key, lane, lane_step)
    except JournalError as error:
        return JournalUnavailable(f"the journal can't be read: {error}; the call may be made again")
    if row is not None and thread.lineage.holds(row.branch, row.step):
        return row
    return InvalidRequest(
        f"step {lane_step} of lane `{lane}` was answered before; the next is {thread.next_of(lane)}"
    )


async def recall(core: Core, thread: Thread, place: Place) -> tuple[str, Answer]:
    """The action and the answer that are recorded at a place which its lane has passed; is no call and costs nothing.

    Raises:
        SyscallError: there is none, or it can't be read now.
    """
    row = await lost_reply(core, thread, place)
    if isinstance(row, SyscallError):
        raise row
    return row.action, await answer_from(row, core.blobs, thread.purged)
