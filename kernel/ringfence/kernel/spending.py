"""What one call holds of its agent's totals, from its admission to its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from ringfence.kernel.budgets import AMOUNTS
from ringfence.kernel.pool_shares import Drawn, release, settle
from ringfence.syscalls.errors import BudgetExhausted

if TYPE_CHECKING:
    from ringfence.kernel.thread import Thread

_AMOUNTS = frozenset(AMOUNTS)
_NOTHING: Mapping[str, float] = MappingProxyType({})
SAID = ("tokens", "usd")
"""Amounts of which the body of a call says what it took; of `bytes` the kernel knows."""


class Spending(msgspec.Struct, eq=False):
    """The part of a call that is about totals. Made for every call, so no dataclass.

    Attributes:
        reserved: what it holds, by total.
        settled: what it is known to have taken of amounts; a total that nobody said anything of is not there.
        again: whether an attempt under the same intent died with its kernel.
        spent: the budget that did not cover the call and has to be raised by a person, as the agent waits for it; empty: none.
        drawn: what it holds of pools.
        ahead: what it holds of pools in case that it turns out to be destructive.
        lacks: why a pool did not give that.
        carried: bytes of its arguments, where its bytes are counted.
        came: bytes of its answer, or of what of it came so far.
        load: bytes to reserve, found by `carrying`; 0: they are not counted.
        least: fewest of them that the call can do with.
    """

    thread: Thread
    reserved: dict[str, float] = {}
    settled: Mapping[str, float] = _NOTHING
    again: bool = False
    spent: str = ""
    drawn: Drawn = ()
    ahead: Drawn = ()
    lacks: BudgetExhausted | None = None
    carried: int = 0
    came: int = 0
    load: int = 0
    least: int = 0

    def reserve(self, name: str, amount: float = 1.0) -> None:
        """Reserve of a total for this call, once.

        Raises:
            BudgetExhausted: it is spent.
        """
        if name in self.reserved:
            return
        self._take(name, amount, amount)
        self.reserved[name] = amount

    def reserve_more(self, name: str, amount: float) -> None:
        """Reserve on top of what the call holds.

        Raises:
            BudgetExhausted: it is spent.
        """
        held = self.reserved[name]
        self._take(name, amount, held + amount)
        self.reserved[name] = held + amount

    def _take(self, name: str, amount: float, whole: float) -> None:
        try:
            self.thread.budgets.reserve(name, amount)
        except BudgetExhausted:
            self.spent = "" if self.thread.budgets.oversized(name, whole) else f"budget `{name}`"
            raise
        if self.thread.pools is not None:
            self._draw(name, amount)

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
        """Say what the call really took of the tokens and dollars that it reserved; the last word counts."""
        held = {name: amount for name, amount in self.reserved.items() if name in SAID}
        if self.again and not any(used.values()):
            # What an attempt took whose kernel died is not known: nobody says that it was nothing.
            used = held
        self._settle(SAID, used)

    def _settle(self, names: Sequence[str], used: Mapping[str, float]) -> None:
        before = {name: self.settled[name] for name in names if name in self.settled}
        # Of what was settled before nothing is held any more.
        held = {name: self.reserved[name] for name in names if name in self.reserved and name not in before}
        self.thread.budgets.unsettle(before)
        self.thread.budgets.settle({name: held.get(name, 0.0) for name in names}, used)
        if self.drawn:
            settle(self.drawn, used, before, names)
        said = {name: used.get(name, 0.0) for name in names if name in used or name in self.reserved}
        self.settled = {**self.settled, **said}

    def carry(self, moved: float) -> None:
        """Say how many bytes the call moved, of those that it reserved; the last word counts."""
        if self.again and not moved:
            # As with what it took of other amounts.
            moved = self.reserved.get("bytes", 0.0)
        self._settle(("bytes",), {"bytes": moved})

    @property
    def answer_max(self) -> int | None:
        """Bytes that the answer may have, of what is reserved; None: nobody counts them."""
        held = self.reserved.get("bytes")
        return None if held is None else max(0, int(held) - self.carried)

    def receiving(self, size: int) -> None:
        """Say how much of an answer has come from outside, where bytes are counted."""
        most = self.answer_max
        if most is not None:
            self.came = min(size, most)

    def put_down(self) -> None:
        """Hold no bytes any more: the call waits, and takes them again when it is tried."""
        if "bytes" in self.reserved:
            self._settle(("bytes",), {})
            self.drawn = tuple(part for part in self.drawn if part[0].name != "bytes")
            self.reserved = {name: amount for name, amount in self.reserved.items() if name != "bytes"}
            self.settled = {name: amount for name, amount in self.settled.items() if name != "bytes"}
            self.load = 0

    def give_back(self) -> None:
        """Give back what was reserved: the call did not run. What it is known to have taken stays taken."""
        if any(name in self.reserved and name not in self.settled for name in SAID):
            self.settle({})
        if "bytes" in self.reserved:
            # What a host had sent by then has come all the same.
            self.carry(self.came)
        for name, amount in self.reserved.items():
            if name not in AMOUNTS:
                self.thread.budgets.release(name, amount)
        release((*self.drawn, *self.ahead))
        self.drawn = self.ahead = ()
        self.reserved = {}

    def amounts(self, word: str, outcome: str = "ok") -> bytes:
        """The head of a body: what an intent has `reserved`, or what an outcome `used`; empty where that is nothing.

        INVARIANT: of a call that ran and that nobody settled, all counts: here, and in the budget of later calls.

        Args:
            word: which of the two.
            outcome: how the call ended.
        """
        if self.ahead and word == "used":
            # It destroyed nothing.
            release(self.ahead)
            self.ahead = ()
        if not self.settled and _AMOUNTS.isdisjoint(self.reserved):
            return b""
        held = self._held
        if word == "used":
            ran = outcome not in ("denied", "refused")
            if any(name in held and name not in self.settled for name in SAID):
                self.settle(held if ran else {})
            if "bytes" in held:
                whole = self.carried + self.came if ran else self.came
                self.carry(held["bytes"] if outcome == "unknown" else whole)
        amounts = self.settled if word == "used" else held
        if not any(amounts.values()):
            return b""
        return b'"%s":%s,' % (word.encode(), msgspec.json.encode(amounts))
