"""Amounts of a total, whatever overlaps: reserved whole, settled once, given back where nothing ran, kept over a crash."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ringfence.kernel.budgets import Budgets
from ringfence.kernel.spending import Spending
from ringfence.policy.manifest_types import Budgets as Limits
from ringfence.syscalls.errors import BudgetExhausted

LIMIT = 1000


def head(part: bytes) -> dict[str, float]:
    """The numbers at the head of a body, as the next kernel reads them."""
    return next(iter(json.loads(b"{" + part[:-1] + b"}").values())) if part else {}


class Lives(RuleBasedStateMachine):
    """Calls of models over the lives of kernels; the journal is what the heads of bodies say."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: Any = SimpleNamespace(
            budgets=Budgets("bot", Limits(total={"tokens": LIMIT}), None, {}), pools=None
        )
        self.flying: list[Spending] = []
        self.intents: dict[int, float] = {}
        self.outcomes: dict[int, float] = {}

    @rule(amount=st.integers(1, 700))
    def begin(self, amount: int) -> None:
        call = Spending(self.thread)
        room = LIMIT - sum(self.intents.values()) - sum(self.outcomes.values())
        if amount > room:
            with pytest.raises(BudgetExhausted) as caught:
                call.reserve("tokens", float(amount))
            assert float(caught.value.metadata["left"]) == room
            call.give_back()
            assert call.amounts("used") == b""
            return
        call.reserve("tokens", float(amount))
        call.reserve("tokens", float(amount))
        self.intents[id(call)] = head(call.amounts("reserved"))["tokens"]
        self.flying.append(call)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), part=st.floats(0, 1), word=st.sampled_from(["ok", "error", "refused", "twice"]))
    def end(self, data: st.DataObject, part: float, word: str) -> None:
        call = data.draw(st.sampled_from(self.flying))
        self.flying.remove(call)
        held = self.intents.pop(id(call))
        if word == "refused":
            call.give_back()
            used = head(call.amounts("used", "refused")).get("tokens", 0.0)
            assert used == (held if call.again else 0.0)
        elif word == "error":
            used = head(call.amounts("used"))["tokens"]
            assert used == held
        else:
            call.settle({"tokens": held})
            call.settle({"tokens": round(held * part)})
            used = head(call.amounts("used")).get("tokens", 0.0)
            assert used == (round(held * part) or (held if call.again else 0.0))
            call.give_back()
        self.outcomes[id(call)] = self.outcomes.get(id(call), 0.0) + used

    @rule()
    def crash(self) -> None:
        """The next kernel knows the rows alone; what was under way is begun again under its intent."""
        spent, held = sum(self.outcomes.values()), sum(self.intents.values())
        limits = Limits(total={"tokens": LIMIT})
        self.thread.budgets = Budgets("bot", limits, None, {"tokens": spent}, held={"tokens": held})
        again: list[Spending] = []
        intents: dict[int, float] = {}
        for call in self.flying:
            next_try = Spending(self.thread)
            next_try.again, next_try.reserved = True, {"tokens": self.intents[id(call)]}
            next_try.reserve("tokens", 5.0)
            again.append(next_try)
            intents[id(next_try)] = self.intents[id(call)]
        self.outcomes = {0: spent}
        self.flying, self.intents = again, intents

    @invariant()
    def what_is_shown_is_what_is_recorded(self) -> None:
        (view,) = self.thread.budgets.view()
        assert abs(view.used - sum(self.outcomes.values())) < 1e-6
        assert abs(view.reserved - sum(self.intents.values())) < 1e-6
        assert view.used + view.reserved <= LIMIT + 1e-6


Lives.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase


class Carrying(RuleBasedStateMachine):
    """Bytes of calls over the lives of kernels: reserved, added to, put down while a call waits, settled by what came."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: Any = SimpleNamespace(
            budgets=Budgets("bot", Limits(total={"bytes": LIMIT}), None, {}), pools=None
        )
        self.flying: list[Spending] = []
        self.held: dict[int, float] = {}
        self.intents: dict[int, float] = {}
        self.used = 0.0

    @property
    def room(self) -> float:
        return LIMIT - self.used - sum(self.held.values())

    @rule(amount=st.integers(20, 700))
    def begin(self, amount: int) -> None:
        call = Spending(self.thread)
        call.carried = 20
        self.take(call, float(amount))

    def take(self, call: Spending, amount: float) -> None:
        if amount > self.room:
            with pytest.raises(BudgetExhausted):
                call.reserve("bytes", amount)
            call.give_back()
            return
        call.reserve("bytes", amount)
        self.held[id(call)] = amount
        self.intents[id(call)] = head(call.amounts("reserved"))["bytes"]
        self.flying.append(call)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), more=st.integers(1, 400))
    def asks_for_more(self, data: st.DataObject, more: int) -> None:
        call = data.draw(st.sampled_from(self.flying))
        if more > self.room:
            with pytest.raises(BudgetExhausted) as caught:
                call.reserve_more("bytes", more)
            # It parks its agent unless no limit of before could have held it.
            assert bool(call.spent) == (self.held[id(call)] + more <= LIMIT or self.room <= 0)
            assert caught.value.metadata["reset"] == "never"
            return
        call.reserve_more("bytes", more)
        self.held[id(call)] += more

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), amount=st.integers(20, 300))
    def waits(self, data: st.DataObject, amount: int) -> None:
        call = data.draw(st.sampled_from(self.flying))
        if call.again:
            return
        self.flying.remove(call)
        del self.held[id(call)], self.intents[id(call)]
        call.put_down()
        call.put_down()
        assert call.amounts("used") == b""
        self.take(call, float(amount))

    @precondition(lambda self: self.flying)
    @rule(
        data=st.data(),
        part=st.floats(0, 1),
        word=st.sampled_from(["ok", "error", "refused", "unknown"]),
        tries=st.integers(1, 2),
    )
    def end(self, data: st.DataObject, part: float, word: str, tries: int) -> None:
        call = data.draw(st.sampled_from(self.flying))
        self.flying.remove(call)
        held = self.held.pop(id(call))
        del self.intents[id(call)]
        said = 0.0
        for _ in range(tries):
            call.came = round((held - call.carried) * part)
            if word == "refused":
                call.give_back()
            said = head(call.amounts("used", word)).get("bytes", 0.0)
        expected = {"refused": call.came, "unknown": held}.get(word, call.carried + call.came)
        if call.again and not expected:
            # What an attempt moved whose kernel died is not known.
            expected = held
        assert said == expected <= held
        self.used += said

    @rule()
    def crash(self) -> None:
        """The next kernel knows the rows alone: of a call under way what its intent had reserved."""
        limits, held = Limits(total={"bytes": LIMIT}), sum(self.intents.values())
        self.thread.budgets = Budgets("bot", limits, None, {"bytes": self.used}, held={"bytes": held})
        again: list[Spending] = []
        intents: dict[int, float] = {}
        for call in self.flying:
            next_try = Spending(self.thread)
            next_try.again, next_try.reserved = True, {"bytes": self.intents[id(call)]}
            next_try.carried = call.carried
            again.append(next_try)
            intents[id(next_try)] = self.intents[id(call)]
        self.flying, self.intents, self.held = again, intents, dict(intents)

    @invariant()
    def what_is_shown_is_what_is_recorded(self) -> None:
        (view,) = self.thread.budgets.view()
        assert (view.used, view.reserved) == (self.used, sum(self.held.values()))
        assert view.used + view.reserved <= LIMIT


Carrying.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestCarrying = Carrying.TestCase
