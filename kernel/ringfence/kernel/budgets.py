"""Rates and totals of one agent: reserved before the spend, settled after it.

An agent's budgets live with the kernel that owns it. Totals are counted again from the journal at adoption, so a crash
between reservation and settlement keeps what was reserved: an intent counts as spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ringfence.policy.manifest_types import Budgets as Limits
from ringfence.syscalls.errors import BudgetExhausted, QuotaExceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """One line of `show`: `left` is None for a rate."""

    name: str
    kind: str
    limit: float
    used: float
    left: float | None


class _Bucket:
    """A token bucket that holds at most one period's worth."""

    __slots__ = ("_at", "_clock", "_tokens", "burst", "pattern", "per_s")

    def __init__(self, pattern: str, count: float, period_s: float, clock: Callable[[], float]) -> None:
        self.pattern = pattern
        self.per_s = count / period_s
        self.burst = max(1.0, count)
        self._clock = clock
        self._tokens = self.burst
        self._at = clock()

    def take(self) -> float:
        """Take one token, perhaps from the future. Returns seconds to wait until it is there."""
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        self._tokens -= 1.0
        return 0.0 if self._tokens >= 0 else -self._tokens / self.per_s

    @property
    def wait(self) -> float:
        """Seconds until the last token that was given out is there."""
        return -self._tokens / self.per_s

    def give_back(self) -> None:
        """Return a token that was not used."""
        self._tokens += 1.0

    @property
    def used(self) -> float:
        """Tokens gone from the bucket now."""
        now = self._clock()
        return max(0.0, self.burst - min(self.burst, self._tokens + (now - self._at) * self.per_s))


def _matches(pattern: str, action: str) -> bool:
    return pattern in ("*", action) or (pattern.endswith(".*") and action.startswith(pattern[:-1]))


class Budgets:
    """What one agent may still spend."""

    def __init__(
        self,
        agent: str,
        limits: Limits,
        ceilings: Limits | None,
        spent: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._totals = dict(limits.total)
        above = ceilings or Limits()
        for name, value in above.total.items():
            self._totals[name] = min(value, self._totals.get(name, value))
        rates = list(limits.rate.items()) + list(above.rate.items())
        self._buckets = [_Bucket(pattern, rate.count, rate.per_s, clock) for pattern, rate in rates]
        self._spent = {"calls": 0.0, "destructive": 0.0, "tokens": 0.0, "usd": 0.0, **spent}
        self._by_action: dict[str, tuple[_Bucket, ...]] = {}
        self._calls_limit = self._totals.get("calls")

    def begin_run(self) -> None:
        """Count the totals afresh, for another run of a scheduled agent; rates go on."""
        for name in self._spent:
            self._spent[name] = 0.0

    def reserve(self, name: str, amount: float = 1.0) -> None:
        """Reserve from a total before the spend.

        Raises:
            BudgetExhausted: less than `amount` is left.
        """
        limit = self._totals.get(name)
        used = self._spent.get(name, 0.0)
        if limit is not None and used + amount > limit:
            raise BudgetExhausted(
                f"budget `{name}` is spent: limit {limit:g}, used {used:g}, asked {amount:g}; "
                f"raise `budgets.total.{name}` in the manifest of `{self._agent}` and submit it again",
                budget=name,
                limit=f"{limit:g}",
                used=f"{used:g}",
            )
        self._spent[name] = used + amount

    def release(self, name: str, amount: float = 1.0) -> None:
        """Give back what was reserved for a call that did not run."""
        self._spent[name] = max(0.0, self._spent.get(name, 0.0) - amount)

    def rate_wait(self, action: str, deadline_s: float) -> float:
        """Take one token from every rate of the action. Returns seconds to wait before it may run.

        Raises:
            QuotaExceeded: the wait would pass the call's deadline; nothing is taken.
        """
        buckets = self._by_action.get(action)
        if buckets is None:
            buckets = tuple(b for b in self._buckets if _matches(b.pattern, action))
            self._by_action[action] = buckets
        if not buckets:
            return 0.0
        wait, worst = max((bucket.take(), bucket.pattern) for bucket in buckets)
        if wait > deadline_s:
            for bucket in buckets:
                bucket.give_back()
            raise QuotaExceeded(
                f"rate `{worst}` is full for {wait:.1f} s, longer than the call's deadline; try again then",
                rate=worst,
                retry_after_ms=str(int(wait * 1000)),
            )
        return wait

    def rated(self, action: str) -> bool:
        """Whether a rate counts this action."""
        buckets = self._by_action.get(action)
        if buckets is None:
            return any(_matches(bucket.pattern, action) for bucket in self._buckets)
        return bool(buckets)

    def slowest(self, action: str) -> str:
        """The rate that an action waits for longest, as the manifest names it; empty where it has none."""
        buckets = self._by_action.get(action, ())
        return max(buckets, key=lambda bucket: bucket.wait).pattern if buckets else ""

    def view(self) -> list[BudgetView]:
        """Every rate and total with what is used."""
        totals = [
            BudgetView(
                name=name,
                kind="total",
                limit=limit,
                used=self._spent.get(name, 0.0),
                left=max(0.0, limit - self._spent.get(name, 0.0)),
            )
            for name, limit in sorted(self._totals.items())
        ]
        rates = [
            BudgetView(name=b.pattern, kind="rate", limit=b.burst, used=round(b.used, 3), left=None)
            for b in self._buckets
        ]
        return totals + rates

    @property
    def spent(self) -> Mapping[str, float]:
        """Totals used so far by name."""
        return self._spent
