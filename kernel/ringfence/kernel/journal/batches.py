"""What a flush makes of a batch before it sends it, and of what the server answers. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringfence.kernel.journal.copyrows import (
    OID_BYTEA,
    OID_TEXT,
    Link,
    Pending,
    bytes_array,
    check_body,
    int8,
    int8_array,
)
from ringfence.kernel.journal.deltas import PackedSave, pack
from ringfence.kernel.journal.statework import Claimed, Held, StateWork, Version, keys_of
from ringfence.kernel.journal.types import EpochMoved, OwnerMoved, Row
from ringfence.syscalls.base import CheckpointSave, StateChange, Work

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult
    from ringfence.kernel.journal.wire import Statement


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
class Sending:
    """A batch that goes in one round trip.

    Attributes:
        attempt: what it is to commit.
        statements: what does it; nothing is inserted where the database stands otherwise than was reckoned with.
        answer: index of the result that tells.
        tells: whether that result says who may not be written, rather than how many rows were.
        work: changes of the state in it, and `before` the versions that they rest on.
    """

    attempt: Attempt
    statements: list[Statement]
    answer: int = -1
    tells: bool = False
    work: StateWork | None = None
    before: list[str] = field(default_factory=list[str])


def sends_of(batch: list[Pending], work: StateWork) -> list[Statement]:
    """What does the atomic work of a batch."""
    sends: list[Statement] = []
    if work.changed:
        sends += [(b"record", columns_of(work.changed)), (b"advance", columns_of(work.newest()))]
    for pending in batch:
        atomic = pending.entry.atomic
        if isinstance(atomic, CheckpointSave):
            atomic = pack(atomic, None)
        if isinstance(atomic, PackedSave):
            sends.append(checkpoint_of(pending.entry.row, atomic))
    return sends


def do_work(pending: Pending, work: StateWork, heads: dict[int, Head]) -> None:
    """Do the atomic work of one entry, and make its body from it; raises what its caller is to get."""
    row, change = pending.entry.row, pending.entry.atomic
    if isinstance(change, StateChange):
        pending.done = work.apply(change, heads[row.chain].agent, row.step)
    if not isinstance(change, Work):
        finish_body(pending)


def finish_body(pending: Pending) -> None:
    """Make the body of an entry whose atomic work is done."""
    if pending.entry.finish is not None:
        body = pending.entry.finish(pending.done)
        check_body(body)
        pending.body = body


def finished(batch: list[Pending]) -> list[Pending]:
    """Make the bodies of entries without atomic work; those that can't be made get their error."""
    kept: list[Pending] = []
    for pending in batch:
        if pending.entry.finish is None:
            kept.append(pending)
            continue
        try:
            finish_body(pending)
        except Exception as error:  # noqa: BLE001 - `finish` is the caller's: so is its error
            fail(pending, error)
        else:
            kept.append(pending)
    return kept


def fail(pending: Pending, error: BaseException) -> None:
    """Tell an error to who still waits."""
    if not pending.future.done():
        pending.future.set_exception(error)


def fail_all(batch: list[Pending], error: BaseException) -> None:
    """Tell all who still wait."""
    for pending in batch:
        fail(pending, error)


def epochs_of(batch: list[Pending]) -> dict[int, int | None] | None:
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


def truth_of(result: PGresult) -> dict[int, tuple[int, bool]]:
    """Epoch, and whether this kernel may write, by agent."""
    return {
        number_at(result, nr, 0): (number_at(result, nr, 1), result.get_value(nr, 2) == b"\1")
        for nr in range(result.ntuples)
    }


def keep_allowed(batch: list[Pending], truth: dict[int, tuple[int, bool]]) -> list[Pending]:
    """Keep the entries that may be written; the others get their error."""
    kept: list[Pending] = []
    for pending in batch:
        chain = pending.entry.row.chain
        if chain < 0:
            kept.append(pending)
            continue
        epoch, owned = truth.get(chain, (0, False))
        if not owned:
            fail(pending, OwnerMoved("another kernel owns the agent, or this kernel's lease has run out"))
        elif pending.entry.epoch is not None and pending.entry.epoch != epoch:
            fail(pending, EpochMoved(epoch))
        else:
            kept.append(pending)
    return kept


def checkpoint_of(row: Row, packed: PackedSave, *, behind: int = 0) -> Statement:
    """What saves a checkpoint; with a position only if the row of its outcome is there by then."""
    save = packed.save
    place = (row.chain, row.step, row.branch, row.lane_step)
    numbers = (*place, save.schema_version, save.next_child, packed.packing, packed.base)
    return b"checkpoint", (*map(int8, numbers), packed.data, packed.digest, int8(behind))


def checkpoints_behind(batch: list[Pending], links: Sequence[Link]) -> list[Statement]:
    """What saves the checkpoints of a batch whose rows are inserted only if they may be."""
    return [
        checkpoint_of(pending.entry.row, pending.entry.atomic, behind=link.pos)
        for pending, link in zip(batch, links, strict=True)
        if isinstance(pending.entry.atomic, PackedSave)
    ]


def columns_of(versions: Sequence[Version]) -> list[bytes]:
    """Versions as parameters of `record`, `advance` and `append_changes`."""
    return [
        bytes_array([v.key.encode() for v in versions], OID_TEXT),
        int8_array([v.version for v in versions]),
        bytes_array([v.value for v in versions], OID_BYTEA),
        bytes_array([v.agent.encode() for v in versions], OID_TEXT),
        int8_array([v.step for v in versions]),
    ]


def values_of(version: Version) -> tuple[bytes | None, ...]:
    """One version as parameters of `append_put`."""
    return (
        *(version.key.encode(), int8(version.version), version.value),
        *(version.agent.encode(), int8(version.step)),
    )


def held_of(result: PGresult) -> list[Held]:
    """Locked state keys."""
    return [
        Held(
            (result.get_value(nr, 0) or b"").decode(),
            number_at(result, nr, 1),
            result.get_value(nr, 2) == b"\1",
            (result.get_value(nr, 3) or b"").decode(),
            number_at(result, nr, 4),
        )
        for nr in range(result.ntuples)
    ]


def claims_of(result: PGresult) -> list[Claimed]:
    """Locked work claims."""
    return [
        Claimed(
            (result.get_value(nr, 0) or b"").decode(),
            number_at(result, nr, 1),
            result.get_value(nr, 2) == b"\1",
            (result.get_value(nr, 3) or b"").decode(),
            number_at(result, nr, 4),
        )
        for nr in range(result.ntuples)
    ]


def locks_of(batch: list[Pending]) -> tuple[set[str], set[str], set[str]]:
    """What is locked before the atomic work of a batch: state keys, claims whose rows have to be there, and other claims."""
    keys: set[str] = set()
    taken: set[str] = set()
    claims: set[str] = set()
    for pending in batch:
        atomic = pending.entry.atomic
        if isinstance(atomic, StateChange):
            keys |= keys_of(atomic)
            claims.update(atomic.claims)
        elif isinstance(atomic, Work) and atomic.claim:
            taken.add(atomic.claim)
    return keys, taken, claims


def number_at(result: PGresult, row: int, column: int) -> int:
    """One integer of a result."""
    return int.from_bytes(result.get_value(row, column) or b"", "big", signed=True)
