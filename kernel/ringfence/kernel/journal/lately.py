"""Which artifacts were put lately: what may be named by a row that is not committed yet. No I/O, and the same memory however many."""

from __future__ import annotations

import time
from typing import Final

_BITS: Final = 8 << 20
_PROBES: Final = 4

TURN_S: Final = 900.0
"""Least seconds between two turns. No call waits so long between what it puts and what it commits."""


class Lately:
    """References that were added since the turn before the last one. It may take others for such, and never one of these for another.

    Two turns and no clock of the wall: a kernel that stood still forgets nothing by that, nor does one whose clock is set.
    """

    def __init__(self) -> None:
        self._now, self._before = bytearray(_BITS // 8), bytearray(_BITS // 8)
        self._turned = time.monotonic()

    def add(self, ref: str) -> None:
        """Note one."""
        for at, bit in _places(ref):
            self._now[at] |= bit

    def __contains__(self, ref: str) -> bool:
        return any(all(held[at] & bit for at, bit in _places(ref)) for held in (self._now, self._before))

    def turn(self) -> None:
        """Forget what was added before the last turn, if that is long enough ago."""
        if time.monotonic() - self._turned >= TURN_S:
            self._now, self._before = bytearray(_BITS // 8), self._now
            self._turned = time.monotonic()


def _places(ref: str) -> list[tuple[int, int]]:
    # The reference is a hash itself: its parts are as good as further ones.
    numbers = [int(ref[at * 8 : at * 8 + 8], 16) % _BITS for at in range(_PROBES)]
    return [(number >> 3, 1 << (number & 7)) for number in numbers]
