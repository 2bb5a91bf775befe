"""The line before an upstream: agents take turns, nothing goes while it is to be left alone, and its rate is kept."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ringfence.policy.units import Rate
from ringfence.syscalls.errors import QuotaExceeded
from ringfence.syscalls.ratelimits import quota_of
from ringfence.syscalls.upstream import Line, Ticket, Upstream

AGENTS = "abcd"


class Turns(RuleBasedStateMachine):
    """Any agents join, leave and are let go, while the upstream holds all of them from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.line = Line(lambda: self.now)
        self.rate = Rate(count=4, per_s=2.0)
        self.line.limit(self.rate)
        self.waiting: list[Ticket] = []
        self.gone: list[tuple[float, str]] = []
        self.since: dict[str, Counter[str]] = {}
        self.quiet_until = 0.0

    @rule(agent=st.sampled_from(AGENTS), many=st.integers(1, 9))
    def join(self, agent: str, many: int) -> None:
        if not any(ticket.agent == agent for ticket in self.waiting):
            self.since[agent] = Counter()
        self.waiting += [self.line.join(agent) for _ in range(many)]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.line.leave(ticket)

    @rule(seconds=st.floats(0.01, 3))
    def later(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.floats(0.1, 3))
    def hold(self, seconds: float) -> None:
        self.line.hold(seconds)
        self.quiet_until = max(self.quiet_until, self.now + seconds)

    @rule(left=st.integers(0, 3), seconds=st.integers(1, 3))
    def hear(self, left: int, seconds: int) -> None:
        self.line.heard(len(self.gone), {"ratelimit": f'"x";r={left};t={seconds}'})
        if left == 0:
            self.quiet_until = max(self.quiet_until, self.now + seconds)

    @rule()
    def let_go(self) -> None:
        before = self.line.next_s()
        while (ticket := self.line.let_go()) is not None:
            assert before == 0
            assert self.now >= self.quiet_until
            self.waiting.remove(ticket)
            self.gone.append((self.now, ticket.agent))
            for agent in {one.agent for one in self.waiting} - {ticket.agent}:
                self.since[agent][ticket.agent] += 1
                # INVARIANT: between two turns of who waits nobody has more than one.
                assert self.since[agent][ticket.agent] <= 1, (agent, self.since)
            self.since[ticket.agent] = Counter()

    @rule()
    def somebody_goes_in_the_end(self) -> None:
        if self.waiting:
            self.now += self.line.next_s() + 1e-6
            count = len(self.gone)
            self.let_go()
            assert len(self.gone) > count

    @invariant()
    def the_rate_is_kept(self) -> None:
        recent = [at for at, _ in self.gone if at > self.now - self.rate.per_s]
        assert len(recent) <= 2 * self.rate.count
        assert len(self.line) == len(self.waiting)


Turns.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTurns = Turns.TestCase


def test_one_call_does_not_wait_behind_sixty_four_of_another() -> None:
    now = [0.0]
    line = Line(lambda: now[0])
    line.limit(Rate(count=1, per_s=1.0))
    many = [line.join("busy") for _ in range(64)]
    assert line.let_go() is many[0]
    one = line.join("quiet")
    assert line.turns_before(one) == 1
    assert line.wait_s(many[63]) == pytest.approx(64, abs=1)
    now[0] = 1.0
    assert line.let_go() is many[1]
    assert line.let_go() is None
    now[0] = 2.0
    assert line.let_go() is one
    line.limit(Rate(count=100, per_s=1.0))
    now[0] = 3.0
    assert [line.let_go() for _ in range(3)] == many[2:5]


def test_after_a_storm_calls_begin_one_after_the_other() -> None:
    now = [100.0]
    line = Line(lambda: now[0])
    line.hold(2)
    line.hold(1)
    for _ in range(4):
        line.join("bot")
    starts: list[float] = []
    while len(line):
        now[0] += line.next_s()
        if line.let_go() is not None:
            starts.append(now[0])
    assert 102 <= starts[0] <= 102.125
    assert all(later - sooner > 0.1 for sooner, later in itertools.pairwise(starts))
    now[0] += 10
    assert (line.next_s(), line.held_s) == (0, 0)


@pytest.mark.parametrize(
    ("headers", "quota"),
    [
        ({"ratelimit": '"default";r=50;t=30'}, (50, 30)),
        ({"ratelimit": '"burst";r=9;t=5, "day";r=0;t=90', "ratelimit-policy": '"burst";q=10;w=10'}, (0, 90)),
        ({"ratelimit": '"burst";r=0', "ratelimit-policy": '"burst";q=10;w=10;pk=:cHJk:'}, (0, 10)),
        ({"ratelimit": "limit=100, remaining=50, reset=5"}, (50, 5)),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "7"}, (0, 7)),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "7"}, (0, 7)),
        (
            {
                "x-ratelimit-remaining": "3",
                "x-ratelimit-reset": "1445412510",
                "date": "Wed, 21 Oct 2015 07:28:00 GMT",
            },
            (3, 30),
        ),
        ({"x-ratelimit-remaining-requests": "59", "x-ratelimit-reset-requests": "1m0.5s"}, (59, 60.5)),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, (0, 0.05)),
        ({"x-ratelimit-remaining-tokens": "700", "x-ratelimit-reset-tokens": "1s"}, None),
        ({"x-ratelimit-remaining": "0"}, None),
        ({"x-ratelimit-remaining": "nan", "x-ratelimit-reset": "5"}, None),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "99999999"}, (0, 3600)),
        ({"ratelimit": '";;;;r=' * 400}, None),
        ({}, None),
    ],
)
def test_what_is_left_is_read_from_every_usual_header(
    headers: dict[str, str], quota: tuple[float, float] | None
) -> None:
    found = quota_of(headers)
    told = None if found is None else (found.remaining, found.reset_s)
    assert told == (None if quota is None else pytest.approx(quota))


class _Waiting:
    def __init__(self, *_: object) -> None: ...

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


def _call(agent: str, deadline_s: float = 30.0) -> Any:
    return SimpleNamespace(env=SimpleNamespace(agent=agent), deadline_s=deadline_s, waiting=_Waiting)


def test_who_would_wait_too_long_is_told_at_once_and_who_gives_up_is_not_served() -> None:
    async def scene() -> list[int]:
        upstream = Upstream("api")
        upstream.line.limit(Rate(count=20, per_s=1.0))
        first = [await upstream.wait(_call("a")) for _ in range(20)]
        with pytest.raises(QuotaExceeded, match="has a turn in"):
            await upstream.wait(_call("a", 0.0))
        lost = asyncio.create_task(upstream.wait(_call("a")))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        both = await asyncio.gather(upstream.wait(_call("a")), upstream.wait(_call("b")))
        upstream.told(100)
        with pytest.raises(QuotaExceeded, match="left alone"):
            await upstream.wait(_call("b"))
        return [*first, *both]

    assert asyncio.run(scene()) == list(range(1, 23))
