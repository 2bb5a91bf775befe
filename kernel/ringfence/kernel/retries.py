"""A program that failed and is to be started again after a while: when, which time that is, and what it failed of."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ringfence.kernel.moments import short_time

ERROR_CHARS_MAX: Final = 120
"""How much of the error stands in the one line that says what an agent waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The next start of a program that failed.

    Attributes:
        at: when.
        number: which one it is; the first is 1.
        most: how many there are before the agent is `failed`.
        error: what the program failed of last.
    """

    at: datetime
    number: int
    most: int
    error: str

    @property
    def text(self) -> str:
        """What the agent waits for, as `waiting_for` shows it."""
        error = " ".join(self.error.split())
        if len(error) > ERROR_CHARS_MAX:
            error = f"{error[: ERROR_CHARS_MAX - 1]}…"
        times = f"{ordinal(self.number)} of {self.most}"
        return f"a restart until {short_time(self.at)} ({times}; last error: {error})"

    def document(self) -> dict[str, Any]:
        """The same for scripts."""
        at = self.at.isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {"number": self.number, "max": self.most, "at": at, "error": self.error}


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th` and so on."""
    teens = range(11, 14)
    ending = "th" if number % 100 in teens else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
