"""Python imports this by its name before anything else: the wall clock of this process is off by what a file says, at any time.

The steady clocks, other processes and the database go on as they are: so it is on a host whose clock somebody sets.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from pathlib import Path

_OFFSET = os.environ.get("SKEWED_BY")
_time, _time_ns = time.time, time.time_ns
Real = dt.datetime


def _seconds() -> float:
    assert _OFFSET is not None
    text = Path(_OFFSET).read_text(encoding="ascii")
    return float(text) if text else 0.0


class _Meta(type(Real)):
    def __instancecheck__(cls, other: object) -> bool:
        """Times that were made elsewhere are times too."""
        return isinstance(other, Real)


class Skewed(Real, metaclass=_Meta):
    """What `now` says follows the wall clock."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Real:
        """The time on the wall."""
        return Real.fromtimestamp(time.time(), tz)


if _OFFSET is not None:
    time.time = lambda: _time() + _seconds()
    time.time_ns = lambda: _time_ns() + int(_seconds() * 1e9)
    dt.datetime = Skewed  # type: ignore[misc]  # as whoever imports it from here on sees it
