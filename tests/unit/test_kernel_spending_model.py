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
            used = head(call.amounts("used", ran=False)).get("tokens", 0.0)
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
