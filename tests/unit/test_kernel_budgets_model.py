"""Totals are never exceeded, whatever overlaps, and come back for what did not run; rates give out no token twice."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ringfence.kernel.admission import Admission
from ringfence.kernel.budgets import Budgets
from ringfence.kernel.flight import Flight
from ringfence.policy.manifest_types import Budgets as Limits
from ringfence.policy.manifest_types import Rate
from ringfence.syscalls.base import Effect
from ringfence.syscalls.errors import BudgetExhausted, QuotaExceeded

CALLS, DESTRUCTIVE = 5, 2
RESTART = "a kernel that takes over"


def totals(spent: dict[str, float] | None = None) -> Budgets:
    limits = Limits(total={"calls": CALLS + 3, "destructive": DESTRUCTIVE})
    return Budgets("bot", limits, Limits(total={"calls": CALLS}), spent or {})


def flight_of(budgets: Budgets, effect: Effect) -> Flight:
    thread: Any = SimpleNamespace(budgets=budgets, pools=None, generation=1)
    row: Any = SimpleNamespace(effect=effect, action="fs.delete")
    core: Any = None
    return Flight(
        core=core,
        thread=thread,
        row=row,
        arguments=None,
        canonical=b"{}",
        digest=b"",
        lane="0",
        lane_step=0,
        step=1,
        span_s=1,
    )


class Spending(RuleBasedStateMachine):
    """Calls that begin, find out that they destroy, are refused, end, or outlive their kernel, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets = totals()
        self.running: list[Flight] = []
        self.done: list[Flight] = []

    @rule(effect=st.sampled_from(list(Effect)))
    def begin(self, effect: Effect) -> None:
        flight = flight_of(self.budgets, effect)
        try:
            Admission.reserve(flight)
        except BudgetExhausted:
            calls, destructive = self.expected()
            assert calls == CALLS or (effect is Effect.DESTROY and destructive == DESTRUCTIVE)
            flight.give_back()
        else:
            self.running.append(flight)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finds_that_it_destroys(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from(self.running))
        before = flight.effect
        try:
            flight.raise_effect(Effect.DESTROY)
        except BudgetExhausted:
            assert self.expected()[1] == DESTRUCTIVE
            assert flight.effect is before

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ran=st.booleans())
    def end(self, data: st.DataObject, ran: bool) -> None:
        flight = data.draw(st.sampled_from(self.running))
        self.running.remove(flight)
        if ran:
            self.done.append(flight)
        else:
            flight.give_back()
            flight.give_back()

    @rule()
    def restart(self) -> None:
        """The next kernel counts what the journal has: an intent counts as spent, and is not charged again."""
        calls, destructive = self.expected()
        self.budgets = totals({"calls": calls, "destructive": destructive})
        for flight in self.running:
            flight.thread.budgets = self.budgets
            Admission.reserve(flight)

    def expected(self) -> tuple[int, int]:
        kept = self.running + self.done
        return len(kept), sum("destructive" in flight.reserved for flight in kept)

    @invariant()
    def what_is_spent_is_what_ran_or_runs(self) -> None:
        spent = self.budgets.spent
        assert (spent["calls"], spent["destructive"]) == self.expected()
        assert spent["calls"] <= CALLS
        assert spent["destructive"] <= DESTRUCTIVE
        left = {view.name: view.left for view in self.budgets.view()}
        assert left == {"calls": CALLS - spent["calls"], "destructive": DESTRUCTIVE - spent["destructive"]}


Spending.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestSpending = Spending.TestCase


@given(
    count=st.integers(1, 5),
    asks=st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from(["http.get", "http.post", "fs.read", RESTART])),
        max_size=40,
    ),
)
def test_no_window_admits_more_than_its_rate_and_one_burst(count: int, asks: list[tuple[float, str]]) -> None:
    now = 0.0
    limits = Limits(rate={"http.*": Rate(count=count, per_s=1.0)})

    def clock() -> float:
        return now

    budgets = Budgets("bot", limits, None, {}, clock)
    admitted: list[float] = []
    refused: list[tuple[str, int]] = []
    for later, action in asks:
        now += later
        if action == RESTART:
            # What was to run later did not; the next kernel knows what did.
            admitted = [at for at in admitted if at <= now]
            budgets = Budgets("bot", limits, None, {}, clock)
            lately = sum(at > now - 1.0 for at in admitted)
            turns = SimpleNamespace(span_us=1_000_000, action="http.get", own=0, family=lately)
            budgets.remember([turns])
            continue
        try:
            wait = budgets.rate_wait(action, deadline_s=5)
        except QuotaExceeded as error:
            refused.append((action, int(error.metadata["retry_after_ms"])))
            continue
        if action == "fs.read":
            assert wait == 0
        else:
            assert 0 <= wait <= 5
            admitted.append(now + wait)
    assert all(action != "fs.read" and after_ms >= 5000 for action, after_ms in refused)
    for start in admitted:
        for end in (e for e in admitted if e >= start):
            within = sum(start <= at <= end for at in admitted)
            assert within <= math.floor((end - start) * count + 1e-6) + count + 1


def test_the_rate_that_is_waited_for_longest_is_named() -> None:
    limits = Limits(rate={"http.*": Rate(count=1, per_s=1.0), "http.get": Rate(count=1, per_s=60.0)})
    budgets = Budgets("bot", limits, None, {}, lambda: 0.0)
    assert budgets.slowest("http.get") == ""
    assert budgets.rate_wait("http.get", 100) == 0
    assert budgets.rate_wait("http.get", 100) == pytest.approx(60)
    assert budgets.slowest("http.get") == "http.get"
    assert budgets.rate_wait("http.post", 100) == pytest.approx(2)
    assert budgets.slowest("http.post") == "http.*"
