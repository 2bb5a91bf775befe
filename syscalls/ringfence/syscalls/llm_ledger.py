"""How close our counts come to what hosts say, by host and model; what is reserved follows it.

A count is multiplied by a factor: at first by 1, the profile's margin has to do; a host that ever said more raises it at
once, and it comes down again only as far as many calls allow.

INVARIANT: the factor is never below what one of the calls in the window came to, so the next call like it is covered;
and never so low that margins of the profile are taken back further than `LOWEST`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 64
"""Calls that are looked back on."""
ENOUGH: Final = 16
"""Calls before the factor goes below 1."""
SLACK: Final = 1.02
"""Above the worst of the window."""
LOWEST: Final = 0.5
HIGHEST: Final = 4.0
SMALL: Final = 64
"""Prompts below it say nothing: what is around the messages outweighs them."""
HELD_MAX: Final = 1024
"""Models that are remembered."""


@dataclass(slots=True, kw_only=True)
class Closeness:
    """One model of one host.

    Attributes:
        tokenizer: what it was counted with last.
        calls: with a usage.
        counted: tokens we counted in all, without the factor.
        actual: what the host said for the same.
    """

    resource: str
    model: str
    tokenizer: str = ""
    calls: int = 0
    counted: int = 0
    actual: int = 0
    window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def factor(self) -> float:
        """What the next count is multiplied by."""
        if not self.window:
            return 1.0
        worst = max(self.window) * SLACK
        floor = LOWEST if len(self.window) >= ENOUGH else 1.0
        return min(HIGHEST, max(floor, worst))

    @property
    def ratio(self) -> float | None:
        """Actual to counted over all calls; None: none had a usage."""
        return self.actual / self.counted if self.counted else None

    @property
    def worst(self) -> float | None:
        """The highest of the calls looked back on."""
        return max(self.window, default=None)

    def told(self, counted: int, actual: int, tokenizer: str) -> None:
        """A host has said what a prompt had."""
        if tokenizer != self.tokenizer:
            self.window.clear()
            self.tokenizer, self.calls, self.counted, self.actual = tokenizer, 0, 0, 0
        if counted <= 0 or actual <= 0:
            return
        self.calls += 1
        self.counted += counted
        self.actual += actual
        if max(counted, actual) >= SMALL:
            self.window.append(actual / counted)


_ledger: OrderedDict[tuple[str, str, str], Closeness] = OrderedDict()


def closeness_of(resource: str, base: str, model: str) -> Closeness:
    """The account of a model at a host; an unknown one is opened."""
    key = (resource, base, model)
    found = _ledger.get(key)
    if found is None:
        found = _ledger[key] = Closeness(resource=resource, model=model)
        while len(_ledger) > HELD_MAX:
            _ledger.popitem(last=False)
    _ledger.move_to_end(key)
    return found


def accounts() -> list[Closeness]:
    """All that have a usage, by host and model."""
    return sorted((one for one in _ledger.values() if one.calls), key=lambda one: (one.resource, one.model))
