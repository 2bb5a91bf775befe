"""Rates as token buckets: turns are given out in order, also future ones."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringfence.policy.units import Rate


class Bucket:
    """A token bucket that holds at most one period's worth."""

    __slots__ = ("_at", "_clock", "_tokens", "burst", "origin", "pattern", "per_s", "period_s")

    def __init__(
        self,
        pattern: str,
        rate: Rate,
        origin: str,
        clock: Callable[[], float],
        before: Bucket | None = None,
    ) -> None:
        self.pattern = pattern
        self.origin = origin
        self.period_s = rate.per_s
        self.per_s = rate.count / rate.per_s
        self.burst = max(1.0, rate.count)
        self._clock = clock
        # Of another limit than before: what is left counts, turns that were given out for later are taken anew.
        self._tokens = self.burst if before is None else min(self.burst, max(0.0, before.tokens))
        self._at = clock()

    @property
    def tokens(self) -> float:
        """Tokens there now; below zero: given out for later."""
        return min(self.burst, self._tokens + (self._clock() - self._at) * self.per_s)

    def take(self) -> float:
        """Take one token, perhaps from the future. Returns seconds to wait until it is there."""
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        self._tokens -= 1.0
        return 0.0 if self._tokens >= 0 else -self._tokens / self.per_s

    def take_now(self) -> float:
        """Take one token if it is there now. Returns 0, or the seconds until it is: then none was taken."""
        wait_s = self.take()
        if wait_s > 0:
            self.give_back()
        return wait_s

    @property
    def wait(self) -> float:
        """Seconds until the last token that was given out is there."""
        return -self._tokens / self.per_s

    def spend(self, count: int) -> None:
        """Have so many tokens gone already, of those that are there."""
        self._tokens = max(0.0, self._tokens - count)

    def give_back(self) -> None:
        """Return a token that was not used."""
        self._tokens += 1.0

    @property
    def used(self) -> float:
        """Tokens gone from the bucket now."""
        return max(0.0, self.burst - self.tokens)

    @property
    def refill_s(self) -> float:
        """Seconds until a new call has its turn."""
        return max(0.0, 1.0 - self.tokens) / self.per_s


class Buckets:
    """Buckets of those that a kernel file names, each by its name; another rate takes over what is left.

    Args:
        origin: what they are, as `hook`.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._known: dict[str, tuple[Rate, Bucket]] = {}

    def take_now(self, name: str, rate: Rate) -> float:
        """Take one token of somebody's if it is there now. Returns 0, or the seconds until it is: then none was taken."""
        known = self._known.get(name)
        if known is None or known[0] != rate:
            before = None if known is None else known[1]
            known = (rate, Bucket(name, rate, self._origin, time.monotonic, before))
            self._known[name] = known
        return known[1].take_now()


def matches(pattern: str, action: str) -> bool:
    """Whether a rate's pattern names an action."""
    return covers(pattern, action)


def covers(pattern: str, other: str) -> bool:
    """Whether a rate's pattern names every action that another pattern names."""
    return pattern in ("*", other) or (pattern.endswith(".*") and other.startswith(pattern[:-1]))
