"""Whose turn it is to live: bounds hold, nobody is overtaken for ever, and priorities and shares are kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ringfence.kernel.slots import AGING_S, Slots, Wish
from ringfence.policy.kernel_file import ManifestError, parse_kernel_file
from ringfence.policy.scheduling import SlotLimits

TEAMS = ("red", "blue", "")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def wish(key: object, clock: Clock, priority: str = "normal", memory: int = 1, team: str = "") -> Wish:
    labels = frozenset({("team", team)}) if team else frozenset[tuple[str, str]]()
    return Wish(key=key, priority=priority, memory_bytes=memory, labels=labels, since=clock.now)


class Machine(RuleBasedStateMachine):
    """Agents come, start, end and give up at random; the bounds change."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.limits = SlotLimits(
            agents=3, memory_bytes=10, starts=2, labels={("team", "red"): 2}, share_by="team"
        )
        self.slots = Slots(lambda: self.limits, self.clock)
        self.wishes: dict[int, Wish] = {}
        self.live: set[int] = set()
        self.starting: set[int] = set()
        self.next = 0

    def took(self, key: int) -> None:
        assert key not in self.live
        self.live.add(key)
        self.starting.add(key)

    def pump(self) -> None:
        for key in self.slots.pump():
            self.took(key)  # type: ignore[arg-type]

    @rule(
        priority=st.sampled_from(["low", "normal", "high"]),
        memory=st.integers(1, 10),
        team=st.sampled_from(TEAMS),
    )
    def ask(self, priority: str, memory: int, team: str) -> None:
        self.next += 1
        self.wishes[self.next] = wish(self.next, self.clock, priority, memory, team)
        if not self.slots.ask(self.wishes[self.next]):
            self.took(self.next)

    @rule(data=st.data())
    def started(self, data: st.DataObject) -> None:
        if self.starting:
            key = data.draw(st.sampled_from(sorted(self.starting)))
            self.starting.discard(key)
            self.slots.started(key)
            self.pump()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.wishes:
            key = data.draw(st.sampled_from(sorted(self.wishes)))
            del self.wishes[key]
            self.live.discard(key)
            self.starting.discard(key)
            self.slots.release(key)
            self.pump()

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        if self.wishes:
            key = data.draw(st.sampled_from(sorted(self.wishes)))
            if not self.slots.ask(self.wishes[key]) and key not in self.live:
                self.took(key)

    @rule(seconds=st.sampled_from([1.0, AGING_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.pump()

    @invariant()
    def bounds_hold(self) -> None:
        held = [self.wishes[key] for key in self.live]
        assert len(held) <= 3
        assert sum(one.memory_bytes for one in held) <= 10
        assert sum(1 for one in held if ("team", "red") in one.labels) <= 2
        assert len(self.starting) <= 2
        assert (self.slots.held, self.slots.queued) == (len(held), len(self.wishes) - len(held))
        assert self.slots.memory_bytes == sum(one.memory_bytes for one in held)

    @invariant()
    def no_turn_is_withheld(self) -> None:
        assert self.slots.pump() == []

    def teardown(self) -> None:
        """Everybody comes to their turn once the others end."""
        for _ in range(10 * len(self.wishes) + 10):
            if not self.wishes:
                return
            self.pump()
            for key in list(self.live):
                self.slots.started(key)
                self.slots.release(key)
                self.starting.discard(key)
                self.live.discard(key)
                del self.wishes[key]
        assert not self.wishes


TestSlots: Any = Machine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def order(limits: SlotLimits, wishes: list[Wish], clock: Clock) -> list[object]:
    """In which order they live, one after the other, behind one that came first."""
    slots = Slots(lambda: limits, clock)
    assert slots.ask(wish("first", clock)) == ""
    assert all(slots.ask(one) for one in wishes)
    slots.started("first")
    slots.release("first")
    lived: list[object] = []
    while given := slots.pump():
        lived += given
        for key in given:
            slots.started(key)
            slots.release(key)
    return lived


def test_priority_goes_first_and_then_who_came_first() -> None:
    clock = Clock()
    wishes = [wish(f"{p}{n}", clock, p) for n in (1, 2) for p in ("low", "normal", "high")]
    assert order(SlotLimits(agents=1), wishes, clock) == [
        "high1",
        "high2",
        "normal1",
        "normal2",
        "low1",
        "low2",
    ]


def test_who_waits_long_is_overtaken_by_nobody() -> None:
    clock = Clock()
    old = wish("old", clock, "low")
    clock.now = 2 * AGING_S + 1
    assert order(SlotLimits(agents=1), [old, wish("new", clock, "high")], clock) == ["old", "new"]


def test_label_values_share_evenly() -> None:
    clock = Clock()
    slots = Slots(lambda: SlotLimits(agents=4, share_by="team"), clock)
    for n in range(4):
        slots.ask(wish(f"red{n}", clock, team="red"))
    assert all(slots.ask(wish(f"more{n}", clock, team="red")) for n in range(4))
    assert all(slots.ask(wish(f"blue{n}", clock, team="blue")) for n in range(4))
    got: list[object] = []
    for n in range(3):
        slots.started(f"red{n}")
        slots.release(f"red{n}")
        got += slots.pump()
    # One red one lives still: the next two are blue, and then each has two.
    assert got == ["blue0", "blue1", "more0"]


def test_a_large_one_is_not_passed_by_for_ever() -> None:
    clock = Clock()
    slots = Slots(lambda: SlotLimits(memory_bytes=10), clock)
    assert slots.ask(wish("half", clock, memory=6)) == ""
    assert slots.ask(wish("large", clock, memory=8)) == "memory: 8 bytes asked for, 4 left"
    assert slots.ask(wish("small", clock, memory=2)) == "memory: 8 bytes asked for, 4 left"
    slots.release("half")
    assert slots.pump() == ["large", "small"]
    assert "all agents of this kernel share 10" in slots.never(wish("giant", clock, memory=11))


def test_a_full_label_holds_up_no_other() -> None:
    clock = Clock()
    slots = Slots(lambda: SlotLimits(agents=3, labels={("team", "red"): 1}), clock)
    assert slots.ask(wish("red1", clock, team="red")) == ""
    assert slots.ask(wish("red2", clock, team="red")) == "a slot: all 1 of team=red are taken"
    assert slots.ask(wish("blue", clock, team="blue")) == ""


def test_bounds_may_be_lowered_and_raised_while_agents_live() -> None:
    clock = Clock()
    limits = [SlotLimits(agents=2)]
    slots = Slots(lambda: limits[0], clock)
    assert [slots.ask(wish(n, clock)) for n in range(2)] == ["", ""]
    limits[0] = SlotLimits(agents=1)
    assert slots.ask(wish(2, clock)) == "a slot: all 1 are taken"
    slots.release(0)
    assert slots.pump() == []
    limits[0] = SlotLimits()
    assert slots.pump() == [2]


FILE = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  scheduler: {section}\n"


def test_the_section_is_read() -> None:
    section = '{agents: 40, memory: 8Gi, starts: 4, labels: {"team=billing": 10}, share_by: team}'
    found = parse_kernel_file(FILE.format(section=section)).scheduler
    assert (found.agents, found.memory_bytes, found.starts, found.share_by) == (40, 8 << 30, 4, "team")
    assert dict(found.labels) == {("team", "billing"): 10}
    assert parse_kernel_file("apiVersion: ringfence/v1\nkind: Kernel\nspec: {}\n").scheduler == SlotLimits()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{agents: 0}", "4:23"),
        ("{agents: many}", "`spec.scheduler.agents`"),
        ("{memory: 1}", "`spec.scheduler.memory`"),
        ("{labels: {team: 3}}", "`team` is no label with its value"),
        ('{labels: {"team=a": 0}}', "`spec.scheduler.labels.team=a`"),
        ("{share_by: 'a b'}", "`a b` is no name of a label"),
        ("{slots: 3}", "`slots`"),
    ],
)
def test_what_is_wrong_in_it_is_named_with_its_place(section: str, said: str) -> None:
    with pytest.raises(ManifestError) as refused:
        parse_kernel_file(FILE.format(section=section), "ringfence.yaml")
    assert said in str(refused.value)
    assert "ringfence.yaml:4:" in str(refused.value)


def test_who_waits_for_starts_alone_is_short_of_nothing_that_others_hold() -> None:
    """Nobody who only rests has to give anything up for it."""
    clock = Clock()
    limits = SlotLimits(agents=3, memory_bytes=10, starts=1, labels={("team", "red"): 1})
    slots: Slots[str] = Slots(lambda: limits, clock)
    assert slots.ask(wish("a", clock)) == ""
    assert slots.ask(wish("b", clock)).startswith("its turn")
    assert not slots.short
    slots.started("a")
    assert slots.pump() == ["b"]
    slots.started("b")
    assert slots.ask(wish("c", clock, team="red")) == ""
    assert slots.ask(wish("d", clock)).startswith("a slot")
    assert slots.short
    slots.release("d")
    assert not slots.short
    slots.release("b")
    slots.started("c")
    assert slots.ask(wish("e", clock, team="red")).startswith("a slot: all 1 of team=red")
    assert slots.short
    slots.release("e")
    assert slots.ask(wish("f", clock, memory=9)).startswith("memory")
    assert slots.short


def test_who_is_next_does_not_depend_on_who_came_to_the_door_first() -> None:
    clock = Clock()
    limits = SlotLimits(agents=1, memory_bytes=None, starts=1, labels={}, share_by="")
    slots = Slots[str](lambda: limits, clock)
    assert not slots.ask(wish("holder", clock))
    clock.now = 5 * AGING_S
    # Since when, in ages of waiting, and how important.
    asked = {"late": (4.5, "normal"), "old": (1.9, "low"), "high": (4.0, "high"), "early": (4.2, "normal")}
    for key, (since, priority) in asked.items():
        assert slots.ask(Wish(key=key, priority=priority, since=since * AGING_S))
    order: list[str] = []
    last = "holder"
    for _ in asked:
        slots.started(last)
        slots.release(last)
        (last,) = slots.pump()
        order.append(last)
    assert order == ["old", "high", "early", "late"]
