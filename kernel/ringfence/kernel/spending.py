"""What one call holds of its agent's totals, from its admission to its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from ringfence.kernel.budgets import AMOUNTS
from ringfence.kernel.pool_shares import Drawn, release, settle
from ringfence.syscalls.errors import BudgetExhausted

if TYPE_CHECKING:
    from ringfence.kernel.thread import Thread

_AMOUNTS = frozenset(AMOUNTS)


class Spending:
    """The part of a call that is about totals.

    Attributes:
        reserved: what it holds, by total.
        settled: what it is known to have taken of tokens and dollars; None: nobody said yet.
        again: whether an attempt under the same intent died with its kernel.
        spent: the budget that did not cover the call and has to be raised by a person, as the agent waits for it; empty: none.
        drawn: what it holds of pools.
        ahead: what it holds of pools in case that it turns out to be destructive.
        lacks: why a pool did not give that.
    """

    __slots__ = ("again", "ahead", "drawn", "lacks", "reserved", "settled", "spent", "thread")

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.reserved: dict[str, float] = {}
        self.settled: Mapping[str, float] | None = None
        self.again = False
        self.spent = ""
        self.drawn: Drawn = ()
        self.ahead: Drawn = ()
        self.lacks: BudgetExhausted | None = None

    def reserve(self, name: str, amount: float = 1.0) -> None:
        """Reserve of a total for this call, once.

        Raises:
            BudgetExhausted: it is spent.
        """
        if name in self.reserved:
            return
        try:
            self.thread.budgets.reserve(name, amount)
        except BudgetExhausted:
            self.spent = "" if self.thread.budgets.oversized(name, amount) else f"budget `{name}`"
            raise
        if self.thread.pools is not None:
            self._draw(name, amount)
        self.reserved[name] = amount

    def _draw(self, name: str, amount: float) -> None:
        """Draw from the pools; `Pools.ensure` has made sure that it is there, or has said what is lacking."""
        member = self.thread.pools
        if name == "destructive" and self.ahead:
            self.drawn = (*self.drawn, *self.ahead)
            self.ahead = ()
        elif member is not None:
            if name == "destructive" and self.lacks is not None:
                self.thread.budgets.release(name, amount)
                raise self.lacks
            self.drawn = (*self.drawn, *member.draw(name, amount))

    @property
    def _held(self) -> dict[str, float]:
        return {name: amount for name, amount in self.reserved.items() if name in AMOUNTS}

    def settle(self, used: Mapping[str, float]) -> None:
        """Say what the call really took of what it reserved; the last word counts."""
        budgets, held = self.thread.budgets, self._held
        if self.again and not any(used.values()):
            # What an attempt took whose kernel died is not known: nobody says that it was nothing.
            used = held
        if self.settled is not None:
            budgets.unsettle(self.settled)
            held = {"tokens": 0.0, "usd": 0.0}
        budgets.settle(held, used)
        if self.drawn:
            settle(self.drawn, used, self.settled)
        self.settled = dict(used)

    def give_back(self) -> None:
        """Give back what was reserved: the call did not run. What it is known to have taken stays taken."""
        if self._held and self.settled is None:
            self.settle({})
        for name, amount in self.reserved.items():
            if name not in AMOUNTS:
                self.thread.budgets.release(name, amount)
        release((*self.drawn, *self.ahead))
        self.drawn = self.ahead = ()
        self.reserved = {}

    def amounts(self, word: str, *, ran: bool = True) -> bytes:
        """The head of a body: what an intent has `reserved`, or what an outcome `used`; empty where that is nothing.

        INVARIANT: of a call that ran and that nobody settled, all counts: here, and in the budget of later calls.
        """
        if self.ahead and word == "used":
            # It destroyed nothing.
            release(self.ahead)
            self.ahead = ()
        if self.settled is None and _AMOUNTS.isdisjoint(self.reserved):
            return b""
        held = self._held
        if word == "used" and held and self.settled is None:
            self.settle(held if ran else {})
        amounts = self.settled if word == "used" else held
        return b'"%s":%s,' % (word.encode(), msgspec.json.encode(amounts)) if amounts else b""
