"""The hash chain over journal rows. No I/O.

hash = SHA-256(previous hash ‖ image of the row); the first row's previous hash is SHA-256("ringfence:" +
chain number).

The image is every column but the hash in table order, each as a 4-byte big-endian length and its bytes:
numbers big-endian in two's complement of the column's width, texts in UTF-8. Framed lengths leave no two rows
with one image. It is also the way PostgreSQL's binary COPY writes these columns, so a row is packed once for
both.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from struct import Struct

from ringfence.kernel.journal.types import StoredRow

HASH_BYTES = 32
WORD_LENGTH_MAX = 64

# chain, pos, step, started_us, duration_us; branch, lane_step; phase: each behind its length.
_FIXED = Struct(">iqiqiqiqiqiiiiih")
_LENGTH = Struct(">i")


def genesis(chain: int) -> bytes:
    """Return the hash that a chain starts from."""
    return hashlib.sha256(f"ringfence:{chain}".encode()).digest()


def framed(data: bytes) -> bytes:
    """Put a length before some bytes."""
    return _LENGTH.pack(len(data)) + data


def framed_word(text: str) -> bytes:
    """Frame a text that recurs, such as an action."""
    return _framed_short(text) if len(text) <= WORD_LENGTH_MAX else framed(text.encode())


@lru_cache(maxsize=4096)
def _framed_short(text: str) -> bytes:
    return framed(text.encode())


def fixed_image(
    chain: int,
    pos: int,
    step: int,
    started_us: int,
    duration_us: int,
    branch: int,
    lane_step: int,
    phase: int,
) -> bytes:
    """Pack the columns of fixed width.

    Raises:
        struct.error: a number doesn't fit its column.
    """
    return _FIXED.pack(
        8, chain, 8, pos, 8, step, 8, started_us, 8, duration_us, 4, branch, 4, lane_step, 2, phase
    )


def link(previous: bytes, image: bytes) -> bytes:
    """Return the hash of a row that follows `previous`."""
    return hashlib.sha256(previous + image).digest()


def stored_image(row: StoredRow) -> bytes:
    """Pack a stored row as it was packed when it was written."""
    return b"".join(
        (
            fixed_image(
                row.chain,
                row.pos,
                row.step,
                row.started_us,
                row.duration_us,
                row.branch,
                row.lane_step,
                row.phase,
            ),
            *(framed_word(word) for word in (row.lane, row.action)),
            framed(row.resource.encode()),
            *(framed_word(word) for word in (row.effect, row.verdict, row.outcome)),
            framed(row.effect_id.encode()),
            framed(row.digest),
            framed(row.body),
        )
    )
