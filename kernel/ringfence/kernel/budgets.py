"""Rates and totals of one agent: reserved before the spend, settled after it.

An agent's budgets live with the kernel that owns it. Totals are counted again from the journal at adoption, so a crash
between reservation and settlement keeps what was reserved: an intent without an outcome holds what it reserved.

INVARIANT: what is used and what is held never pass a limit together, but for a host that reports more than was asked of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringfence.kernel.rates import Bucket, matches
from ringfence.policy.manifest_types import NO_LIMITS
from ringfence.policy.manifest_types import Budgets as Limits
from ringfence.policy.units import Rate
from ringfence.syscalls.errors import BudgetExhausted, QuotaExceeded

AMOUNTS = ("tokens", "usd", "bytes")
"""Totals of which a call takes an amount that is known only afterwards; the others count calls."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """One line of `show` and `budget`.

    Attributes:
        kind: `total` or `rate`.
        left: what a new call may still take; None for a rate.
        reserved: held by calls under way.
        origin: who set the limit: `manifest`, `operator` or `ceiling`.
        period_ms: what the limit of a rate is counted over; None for a total, which never refills.
        refill_ms: until a rate has its next turn; 0: now; None for a total.
    """

    name: str
    kind: str
    limit: float
    used: float
    left: float | None
    reserved: float = 0.0
    origin: str = "manifest"
    period_ms: int | None = None
    refill_ms: int | None = None


def plain(value: float) -> str:
    """A number as people read it."""
    return str(int(value)) if value == int(value) else f"{value:.6f}".rstrip("0")


class Set(Protocol):
    """A limit that an operator set, as it is stored."""

    @property
    def name(self) -> str:
        """A total, or the action pattern of a rate."""
        ...

    @property
    def amount(self) -> float:
        """The limit."""
        ...

    @property
    def period_s(self) -> float | None:
        """What a rate is counted over; None for a total."""
        ...


class Taken(Protocol):
    """How many calls of an action ended within a period before now."""

    @property
    def span_us(self) -> int:
        """The period."""
        ...

    @property
    def action(self) -> str:
        """The action."""
        ...

    @property
    def own(self) -> int:
        """Of the agent itself."""
        ...

    @property
    def family(self) -> int:
        """Of it and all below it."""
        ...


def limits_of(records: Iterable[Set]) -> Limits:
    """Stored limits, as `Budgets` takes them."""
    rates: dict[str, Rate] = {}
    totals: dict[str, float] = {}
    for record in records:
        if record.period_s is None:
            totals[record.name] = record.amount
        else:
            rates[record.name] = Rate(count=int(record.amount), per_s=record.period_s)
    return Limits(rate=rates, total=totals) if rates or totals else NO_LIMITS


class Budgets:
    """What one agent may still spend."""

    def __init__(
        self,
        agent: str,
        limits: Limits,
        ceilings: Limits | None,
        spent: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
        *,
        held: Mapping[str, float] | None = None,
        overrides: Limits | None = None,
        above: Callable[[], Sequence[Budgets]] = tuple,
    ) -> None:
        self._agent = agent
        self._above = above
        self._clock = clock
        self._manifest = limits
        self._spent = {"calls": 0.0, "destructive": 0.0, **dict.fromkeys(AMOUNTS, 0.0), **spent}
        self._held = {name: amount for name, amount in (held or {}).items() if amount}
        self._totals: dict[str, tuple[float, str]] = {}
        self._buckets: list[Bucket] = []
        self._by_action: dict[str, tuple[Bucket, ...]] = {}
        self.context_max_tokens: int | None = None
        self.metered = False  # whether bytes are counted: without a limit of them nobody measures a call
        self.overrides = overrides or NO_LIMITS
        self._relimited: asyncio.Event | None = None  # there when somebody waits for it: few ever do
        self._freed: asyncio.Event | None = None
        self.relimit(ceilings, self.overrides)

    # -- limits ---------------------------------------------------------------------------------------------------

    def relimit(self, ceilings: Limits | None, overrides: Limits) -> None:
        """Put other limits in force; what waits for a rate takes its turn anew.

        Args:
            ceilings: the operator's, for all agents.
            overrides: the operator's, for this agent; they stand in place of the manifest's.
        """
        above, self.overrides = ceilings or NO_LIMITS, overrides
        self._totals = {name: (value, "manifest") for name, value in self._manifest.total.items()}
        self._totals |= {name: (value, "operator") for name, value in overrides.total.items()}
        for name, value in above.total.items():
            if name not in self._totals or value < self._totals[name][0]:
                self._totals[name] = (value, "ceiling")
        self.metered = "bytes" in self._totals
        full = {(b.pattern, b.origin == "ceiling"): b for b in self._buckets}
        rates = [(p, r, "manifest") for p, r in self._manifest.rate.items() if p not in overrides.rate]
        rates += [(p, r, "operator") for p, r in overrides.rate.items()]
        rates += [(p, r, "ceiling") for p, r in above.rate.items()]
        self._buckets = [
            Bucket(p, r, origin, self._clock, full.get((p, origin == "ceiling"))) for p, r, origin in rates
        ]
        self._by_action = {}
        windows = [w for w in (self._manifest.context_max_tokens, above.context_max_tokens) if w is not None]
        self.context_max_tokens = min(windows, default=None)
        self._wake()

    @property
    def relimited(self) -> asyncio.Event:
        """That the limits are others."""
        if self._relimited is None:
            self._relimited = asyncio.Event()
        return self._relimited

    @property
    def freed(self) -> asyncio.Event:
        """That calls under way gave something back."""
        if self._freed is None:
            self._freed = asyncio.Event()
        return self._freed

    def _wake(self) -> None:
        if self._relimited is not None:
            self._relimited.set()
            self._relimited = None
        self._free()

    def _free(self) -> None:
        if self._freed is not None:
            self._freed.set()
            self._freed = None

    # -- totals ---------------------------------------------------------------------------------------------------

    @property
    def limited(self) -> list[str]:
        """Totals that the manifest or an operator limits for this agent alone."""
        return sorted(name for name, (_, origin) in self._totals.items() if origin != "ceiling")

    def begin_run(self) -> None:
        """Count the totals afresh, for another run of a scheduled agent; rates go on."""
        for name in self._spent:
            self._spent[name] = 0.0

    def reserve(self, name: str, amount: float = 1.0) -> None:
        """Reserve from a total before the spend.

        Raises:
            BudgetExhausted: less than `amount` is left.
        """
        if not self.fits(name, amount):
            raise self._exhausted(name, amount)
        kept = self._held if name in AMOUNTS else self._spent
        kept[name] = kept.get(name, 0.0) + amount

    def fits(self, name: str, amount: float, *, when_settled: bool = False) -> bool:
        """Whether a total has room; with `when_settled`, whether it would if calls under way took nothing."""
        limit = self._totals.get(name)
        if limit is None:
            return True
        held = 0.0 if when_settled else self._held.get(name, 0.0)
        return self._spent.get(name, 0.0) + held + amount <= limit[0] + _ROUNDING

    def left(self, name: str, *, when_settled: bool = False) -> float:
        """What a new call may take of a total; with `when_settled`, what it could if calls under way took nothing."""
        limit = self._totals.get(name)
        if limit is None:
            return math.inf
        held = 0.0 if when_settled else self._held.get(name, 0.0)
        return limit[0] - self._spent.get(name, 0.0) - held

    def oversized(self, name: str, amount: float) -> bool:
        """Whether a call asks for more than the whole of a total of which something is left: it has to ask for less."""
        limit = self._totals.get(name)
        return limit is not None and amount > limit[0] + _ROUNDING and self.has_room(name)

    def release(self, name: str, amount: float = 1.0) -> None:
        """Give back what was reserved for a call that did not run."""
        kept = self._held if name in AMOUNTS else self._spent
        kept[name] = max(0.0, kept.get(name, 0.0) - amount)
        if name in AMOUNTS:
            self._free()

    def settle(self, reserved: Mapping[str, float], used: Mapping[str, float]) -> None:
        """A call took so much of what it held."""
        for name, amount in reserved.items():
            if name in AMOUNTS:
                self.release(name, amount)
                self._spent[name] += used.get(name, 0.0)

    def unsettle(self, used: Mapping[str, float]) -> None:
        """Take back what was settled: a later word counts."""
        for name, amount in used.items():
            self._spent[name] = max(0.0, self._spent[name] - amount)

    def _exhausted(self, name: str, amount: float) -> BudgetExhausted:
        limit, origin = self._totals[name]
        used, held = self._spent.get(name, 0.0), self._held.get(name, 0.0)
        left = max(0.0, limit - used - held)
        busy = f", reserved by calls under way {plain(held)}" if held else ""
        more = f"ringfence budget {self._agent} set {name} {plain(used + held + amount)}"
        if origin == "ceiling":
            more = f"raise `ceilings.budgets.total.{name}` in the kernel file and reload it, then {more}"
        again = (
            "make the call again when those have ended, or "
            if self.fits(name, amount, when_settled=True)
            else ""
        )
        # Of what is left a smaller call may still be made.
        state, less = ("is too small for this", "ask for less, or ") if left > _ROUNDING else ("is spent", "")
        return BudgetExhausted(
            f"budget `{name}` {state}: limit {plain(limit)}, used {plain(used)}{busy}, asked {plain(amount)}, "
            f"left {plain(left)}; it never refills by itself; {again or less}raise it: {more}",
            budget=name,
            limit=plain(limit),
            used=plain(used),
            reserved=plain(held),
            left=plain(left),
            asked=plain(amount),
            reset="never",
        )

    # -- rates ----------------------------------------------------------------------------------------------------

    def rate_wait(self, action: str, deadline_s: float) -> float:
        """Take one token from every rate of the action. Returns seconds to wait before it may run.

        Raises:
            QuotaExceeded: the wait would pass the call's deadline; nothing is taken.
        """
        buckets = self._turns(action)
        if not buckets:
            return 0.0
        wait, worst = max((bucket.take(), bucket.pattern) for bucket in buckets)
        if wait > deadline_s:
            for bucket in buckets:
                bucket.give_back()
            rate = next(b for b in buckets if b.pattern == worst)
            raise QuotaExceeded(
                f"rate `{worst}` of {plain(rate.burst)} in {plain(rate.period_s)} s is used up and has its next turn in "
                f"{wait:.1f} s, later than the call's deadline; try again then, or the operator raises it: "
                f"ringfence budget {self._agent} set {worst} N/s",
                rate=worst,
                retry_after_ms=str(int(wait * 1000)),
            )
        return wait

    @property
    def spans_us(self) -> list[int]:
        """Periods of the rates."""
        return sorted({round(bucket.period_s * 1e6) for bucket in self._buckets})

    def remember(self, turns: Sequence[Taken]) -> None:
        """Count calls that an earlier kernel let go, so that nobody gets a rate twice over by a restart.

        A rate had refilled by no more than its whole since one period ago: what ended since then is missing of that.
        """
        for bucket in self._buckets:
            span = round(bucket.period_s * 1e6)
            found = [t for t in turns if t.span_us == span and matches(bucket.pattern, t.action)]
            # A ceiling counts for each agent by itself.
            bucket.spend(sum(t.own if bucket.origin == "ceiling" else t.family for t in found))

    def _turns(self, action: str) -> tuple[Bucket, ...]:
        """The rates that count an action: the agent's own, and those of all above it."""
        buckets = self._by_action.get(action)
        if buckets is None:
            buckets = tuple(b for b in self._buckets if matches(b.pattern, action))
            self._by_action[action] = buckets
        shared = [b for one in self._above() for b in one.own_turns(action)]
        return (*buckets, *shared) if shared else buckets

    def own_turns(self, action: str) -> list[Bucket]:
        """The agent's own rates of an action; a ceiling counts for each agent by itself."""
        return [b for b in self._buckets if b.origin != "ceiling" and matches(b.pattern, action)]

    def rated(self, action: str) -> bool:
        """Whether a rate counts this action, or what a call of it carries."""
        return self.metered or (bool(self._buckets or self._above()) and bool(self._turns(action)))

    def slowest(self, action: str) -> str:
        """The rate that an action waits for longest, as the manifest names it; empty where it has none."""
        buckets = self._turns(action) if action in self._by_action else ()
        return max(buckets, key=lambda bucket: bucket.wait).pattern if buckets else ""

    # -- what people see ------------------------------------------------------------------------------------------

    def view(self) -> list[BudgetView]:
        """Every rate and total with what is used."""
        totals = [self._view(name) for name in sorted(self._totals)]
        rates = [
            BudgetView(
                name=b.pattern,
                kind="rate",
                limit=b.burst,
                used=round(b.used, 3),
                left=None,
                origin=b.origin,
                period_ms=round(b.period_s * 1000),
                refill_ms=round(b.refill_s * 1000),
            )
            for b in self._buckets
        ]
        return totals + rates

    def _view(self, name: str) -> BudgetView:
        limit, origin = self._totals[name]
        used, held = self._spent.get(name, 0.0), self._held.get(name, 0.0)
        left = max(0.0, limit - used - held)
        return BudgetView(
            name=name, kind="total", limit=limit, used=used, left=left, reserved=held, origin=origin
        )

    def limit(self, name: str) -> float | None:
        """The limit of a total; None: it has none."""
        return self._totals[name][0] if name in self._totals else None

    def bound(self, name: str) -> float:
        """What of a total is used or held."""
        return self._spent.get(name, 0.0) + self._held.get(name, 0.0)

    def shares(self) -> dict[str, float]:
        """Of each total with a limit the part that is used or held; a limit of nothing is used up."""
        return {name: self.bound(name) / limit if limit else 1.0 for name, (limit, _) in self._totals.items()}

    def has_room(self, name: str) -> bool:
        """Whether anything at all is left of a total."""
        return name not in self._totals or (self._view(name).left or 0.0) > _ROUNDING

    @property
    def spent(self) -> Mapping[str, float]:
        """Totals used so far by name, without what calls under way hold."""
        return self._spent
