"""Parts of chains that were given up on purpose: what of them can still be checked, and what has to vouch for the rest. No I/O."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ringfence.kernel.journal.chain import HASH_BYTES, link, stored_image
from ringfence.kernel.journal.documents import document_of, row_of
from ringfence.kernel.journal.types import Phase, StoredRow

PRUNED: Final = "journal.pruned"
"""The event that says which archived rows were given up on purpose."""

KEPT: Final = struct.Struct(f">q{HASH_BYTES}s{HASH_BYTES}s")
"""What a part says of each row that stays: its position, the hash of the row before it, and its own."""

Vouched = tuple[int, int, str, str, str]
"""First and last position, hash before and at the end, and the sum of what is said of the rows that stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A part of a chain whose file was given up: where it stood, and the rows of it that stayed.

    Attributes:
        kept: as `Segment.kept`.
        rows: the rows that it names.
    """

    chain: int
    first: int
    last: int
    before: bytes
    hash: bytes
    kept: bytes
    rows: tuple[StoredRow, ...]

    @property
    def vouched_by(self) -> Vouched:
        """What the event has to say that gave it up."""
        return (
            self.first,
            self.last,
            self.before.hex(),
            self.hash.hex(),
            hashlib.sha256(self.kept).hexdigest(),
        )

    def misfit(self) -> tuple[int, str] | None:
        """The first row that stayed and is not what it was: its position, and why; None: all are."""
        rows = {row.pos: row for row in self.rows}
        for pos, previous, digest in KEPT.iter_unpack(self.kept):
            row = rows.pop(pos, None)
            if row is None:
                return pos, "the record is missing, though it was kept when others were given up"
            if row.hash != digest or link(previous, stored_image(row)) != digest:
                return pos, "the record was changed: its hash doesn't fit"
        return None if not rows else (min(rows), "the record is one of those that were given up")

    def document(self) -> dict[str, Any]:
        """Show it as a line of an export."""
        return {
            "chain": self.chain,
            "pos": self.first,
            "kind": "gap",
            "last": self.last,
            "before": self.before.hex(),
            "hash": self.hash.hex(),
            "kept": self.kept.hex(),
            "rows": [document_of(row) for row in self.rows],
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Gap:
        """Read what `document` made.

        Raises:
            ValueError: it is none.
        """
        try:
            kept = bytes.fromhex(document["kept"])
            KEPT.iter_unpack(kept)
            return cls(
                chain=int(document["chain"]),
                first=int(document["pos"]),
                last=int(document["last"]),
                before=bytes.fromhex(document["before"]),
                hash=bytes.fromhex(document["hash"]),
                kept=kept,
                rows=tuple(row_of(row) for row in document["rows"]),
            )
        except (KeyError, TypeError, AttributeError, struct.error) as error:
            raise ValueError("it is no gap") from error


def vouched(row: StoredRow) -> Vouched | None:
    """What an event says was given up; None: nothing."""
    if row.phase is not Phase.EVENT or row.action != PRUNED:
        return None
    try:
        said = json.loads(row.body)
        return said["first"], said["last"], said["before"], said["hash"], said["kept_sha256"]
    except (ValueError, KeyError, TypeError):
        return None
