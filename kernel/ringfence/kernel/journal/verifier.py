"""Checks rows against their chains and against heads that were signed. No I/O, and memory for heads alone.

Chains come in ascending order, so kernels' own (negative) ones come first: their `audit.heads` rows say where
the agents' chains have to pass. A newer kernel signs the heads of older ones, and has the smaller number.
"""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

from ringfence.kernel.journal.chain import HASH_BYTES, genesis, link, stored_image
from ringfence.kernel.journal.gaps import Gap, Vouched, vouched
from ringfence.kernel.journal.types import StoredRow

HEADS_ACTION = "audit.heads"


class Bad(TypedDict):
    """The first record that doesn't fit: its chain and position, and why."""

    chain: int
    pos: int
    why: str


@dataclass(slots=True)
class _Marks:
    """Where one chain has to pass: 40 bytes a head."""

    positions: array[int] = field(default_factory=lambda: array("q"))
    hashes: bytearray = field(default_factory=bytearray)

    def items(self) -> list[tuple[int, bytes]]:
        size = HASH_BYTES
        return [
            (pos, bytes(self.hashes[nr * size : (nr + 1) * size])) for nr, pos in enumerate(self.positions)
        ]


class Verifier:
    """Takes rows by chain and position, and finds the first that is removed, changed, added or reordered.

    Attributes:
        rows: rows that fitted.
        chains: chains begun.
        archived: those of them that were read from files.
        pruned: rows that were given up, which the chain says.
        first_bad: what doesn't fit; nothing is checked after it.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.chains = 0
        self.archived = 0
        self.pruned = 0
        self.first_bad: Bad | None = None
        self._marks: dict[int, _Marks] = {}
        self._chain: int | None = None
        self._pos: int = 0
        self._hash: bytes = b""
        self._due: dict[int, bytes] = {}
        self._part = False
        self._owed: set[Vouched] = set()

    def expect(self, chain: int, pos: int, digest: bytes) -> None:
        """Demand that a chain has a record at `pos` with this hash. Position 0 begins every chain."""
        if len(digest) != HASH_BYTES or (self._chain is not None and chain <= self._chain):
            self.fail(chain, pos, "a signed head names a chain out of order or no hash")
        elif pos > 0:
            marks = self._marks.setdefault(chain, _Marks())
            marks.positions.append(pos)
            marks.hashes += digest

    def begin_part(self, chain: int, pos: int, previous: bytes | None) -> None:
        """Let a chain start after `pos` instead of at its beginning.

        For a file that is a part by its own words. Chains that have no record in such a file may have had theirs before.
        """
        self._part = True
        self._begin(chain)
        if previous is not None and len(previous) == HASH_BYTES:
            self._pos, self._hash = pos, previous
            self._due = {at: digest for at, digest in self._due.items() if at > pos}

    def feed(self, row: StoredRow) -> None:
        """Check the next row."""
        if self.first_bad is not None:
            return
        if row.chain != self._chain:
            self._begin(row.chain)
        if self.first_bad is not None:
            return
        if row.pos != self._pos + 1:
            known = "is there twice or out of order" if row.pos <= self._pos else None
            place = row.pos if known else self._pos + 1
            self.fail(row.chain, place, f"the record {known or 'is missing'}")
            return
        try:
            digest = link(self._hash, stored_image(row))
        except (struct.error, UnicodeEncodeError):
            self.fail(row.chain, row.pos, "the record holds values that no record can hold")
            return
        if digest != row.hash:
            self.fail(
                row.chain, row.pos, "the record was changed, or put after another one: its hash doesn't fit"
            )
            return
        if self._due.pop(row.pos, digest) != digest:
            self.fail(
                row.chain, row.pos, "the record is not the one that was signed: the chain was rewritten"
            )
            return
        self._pos, self._hash = row.pos, digest
        self.rows += 1
        self.archived += row.archived
        if self._owed:
            self._owed.discard(vouched(row) or (0, 0, "", "", ""))
        if row.chain < 0 and row.action == HEADS_ACTION:
            self._expect_heads(row)

    def pass_by(self, gap: Gap) -> None:
        """Go over a part that was given up: a later event of the chain has to say that it was.

        Heads that were signed within it can't be checked any more.
        """
        if self.first_bad is not None:
            return
        if gap.chain != self._chain:
            self._begin(gap.chain)
        misfit = gap.misfit()
        if self.first_bad is not None:
            return
        if gap.first != self._pos + 1 or gap.before != self._hash or gap.last < gap.first:
            self.fail(gap.chain, self._pos + 1, "the record is missing, or a gap doesn't fit where it stands")
            return
        if misfit is not None:
            self.fail(gap.chain, *misfit)
            return
        for row in gap.rows:
            if self._due.get(row.pos, row.hash) != row.hash:
                self.fail(gap.chain, row.pos, "the record is not the one that was signed")
                return
            self._owed.discard(vouched(row) or (0, 0, "", "", ""))
        if self._due.pop(gap.last, gap.hash) != gap.hash:
            self.fail(gap.chain, gap.last, "the gap does not end as it was signed: the chain was rewritten")
            return
        self._due = {pos: digest for pos, digest in self._due.items() if pos > gap.last}
        self._owed.add(gap.vouched_by)
        self._pos, self._hash = gap.last, gap.hash
        self.rows += len(gap.rows)
        self.pruned += gap.last - gap.first + 1 - len(gap.rows)

    def finish(self) -> None:
        """Say that no rows follow."""
        self._end()
        if self._marks and not self._part:
            chain = min(self._marks)
            self.fail(chain, 1, "the whole chain is missing, though its head was signed")

    def fail(self, chain: int, pos: int, why: str) -> None:
        """Note the first thing that doesn't fit."""
        if self.first_bad is None:
            self.first_bad = Bad(chain=chain, pos=pos, why=why)

    def _begin(self, chain: int) -> None:
        self._end()
        if self._chain is not None and chain <= self._chain:
            self.fail(chain, 1, "the chain is there twice or out of order")
            return
        # Chains between the last one and this one have no rows at all.
        absent = [number for number in self._marks if number < chain]
        if absent and not self._part:
            self.fail(min(absent), 1, "the whole chain is missing, though its head was signed")
            return
        self._chain, self._pos, self._hash = chain, 0, genesis(chain)
        self.chains += 1
        self._due = {}
        marks = self._marks.pop(chain, None)
        for pos, digest in marks.items() if marks is not None else ():
            if self._due.setdefault(pos, digest) != digest:
                self.fail(chain, pos, "two signed heads disagree about this record: the chain was rewritten")

    def _end(self) -> None:
        if self._chain is not None and self._due and self.first_bad is None:
            self.fail(self._chain, self._pos + 1, "the record is missing, though a later head was signed")
        if self._chain is not None and self._owed:
            first = min(self._owed)[0]
            self.fail(self._chain, first, "the record is missing, and nothing says that it was given up")
        self._owed = set()

    def _expect_heads(self, row: StoredRow) -> None:
        try:
            for chain, pos, digest in read_heads(row.body):
                self.expect(chain, pos, digest)
        except ValueError:
            self.fail(row.chain, row.pos, "the signed heads can't be read")


def write_heads(heads: list[tuple[int, int, bytes]]) -> bytes:
    """Write heads as the body of an `audit.heads` row."""
    entries = [[chain, pos, digest.hex()] for chain, pos, digest in heads]
    return json.dumps({"heads": entries}, separators=(",", ":")).encode()


def read_heads(body: bytes) -> list[tuple[int, int, bytes]]:
    """Read what `write_heads` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        entries = cast("list[list[Any]]", json.loads(body)["heads"])
        return [(int(chain), int(pos), bytes.fromhex(digest)) for chain, pos, digest in entries]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("no heads") from error
