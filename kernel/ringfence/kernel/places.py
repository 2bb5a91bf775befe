"""What is recorded of each place of a program, in a few bytes: a place is a lane and its step. No I/O.

A hundred thousand steps are 1.7 MB here. What a place's row says beside this is read from the journal when it is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

Place = tuple[str, int]

RETRY: Final = 1
UNKNOWN: Final = 2
EXPIRED: Final = 4
ASIDE: Final = 8
CUT: Final = 16

NEWEST: Final = 1 << 62
"""Position of a row that this kernel wrote: later than all that were read."""

GAP_MAX: Final = 1024
"""Steps of a lane that may be missing before one; a place further off is kept by itself."""


class Held(NamedTuple):
    """The newest outcome of one place.

    Attributes:
        step: thread-wide.
        pos: where its row stands in the chain: the order in which outcomes were recorded.
        retry: whether the call is made afresh where nothing followed it in its lane.
        unknown: whether nobody knows yet what became of it.
        expired: whether it was refused because nobody answered its approval in time.
        aside: whether it says nothing of the program's way that it isn't asked for again.
        cut: whether it was ended from outside, as when its agent was killed: the program may have heard of no end.
    """

    step: int
    pos: int
    retry: bool
    unknown: bool
    expired: bool = False
    aside: bool = False
    cut: bool = False

    @property
    def flags(self) -> int:
        """What is true of it, in one byte."""
        known = RETRY * self.retry | UNKNOWN * self.unknown | EXPIRED * self.expired
        return known | ASIDE * self.aside | CUT * self.cut

    @classmethod
    def of(cls, step: int, pos: int, flags: int) -> Held:
        """From its parts as a lane keeps them."""
        retry, unknown, expired, aside, cut = (
            bool(flags & one) for one in (RETRY, UNKNOWN, EXPIRED, ASIDE, CUT)
        )
        return cls(step, pos, retry, unknown, expired, aside, cut)


@dataclass(slots=True)
class _Lane:
    """Steps of one lane from `base` on; step 0: nothing is known of it."""

    base: int
    steps: array[int] = field(default_factory=lambda: array("q"))
    positions: array[int] = field(default_factory=lambda: array("q"))
    flags: bytearray = field(default_factory=bytearray)


class Places:
    """Outcomes by place."""

    __slots__ = ("_lanes", "_odd")

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._odd: dict[Place, Held] = {}

    @property
    def bare(self) -> bool:
        """Whether nothing was ever known of a place."""
        return not self._lanes and not self._odd

    def get(self, place: Place) -> Held | None:
        """What is known of a place."""
        name, at = place
        lane = self._lanes.get(name)
        if lane is not None and 0 <= at - lane.base < len(lane.steps):
            step = lane.steps[at - lane.base]
            if not step:
                return None
            return Held.of(step, lane.positions[at - lane.base], lane.flags[at - lane.base])
        return self._odd.get(place) if self._odd else None

    def __contains__(self, place: Place) -> bool:
        # Asked for every call, mostly of lanes that nothing is known of.
        name, at = place
        lane = self._lanes.get(name)
        if lane is not None and 0 <= at - lane.base < len(lane.steps):
            return lane.steps[at - lane.base] != 0
        return place in self._odd

    def put(self, place: Place, held: Held) -> None:
        """Note what is known of a place from here on."""
        name, at = place
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(at)
        index = at - lane.base
        if index < 0 or index > len(lane.steps) + GAP_MAX:
            self._odd[place] = held
            return
        while len(lane.steps) <= index:
            lane.steps.append(0)
            lane.positions.append(0)
            lane.flags.append(0)
            if self._odd:
                self._move_in(name, lane)
        lane.steps[index], lane.positions[index] = held.step, held.pos
        lane.flags[index] = held.flags

    def _move_in(self, name: str, lane: _Lane) -> None:
        # INVARIANT: a place is known in one way: where the lane has come to it, there.
        at = lane.base + len(lane.steps) - 1
        held = self._odd.pop((name, at), None)
        if held is not None:
            lane.steps[-1], lane.positions[-1] = held.step, held.pos
            lane.flags[-1] = held.flags

    def pop(self, place: Place) -> Held | None:
        """Forget a place."""
        held = self.get(place)
        name, at = place
        if held is not None and self._odd.pop(place, None) is None:
            lane = self._lanes[name]
            lane.steps[at - lane.base] = 0
        return held

    def first(self, name: str) -> int | None:
        """Give the first step of a lane that something was known of; None: nothing is known of the lane."""
        lane = self._lanes.get(name)
        if lane is None:
            return None
        return min([lane.base, *(at for odd, at in self._odd if odd == name)])

    def items(self) -> Iterator[tuple[Place, Held]]:
        """Every place that something is known of."""
        for name, lane in self._lanes.items():
            for index, step in enumerate(lane.steps):
                if step:
                    yield (name, lane.base + index), Held.of(step, lane.positions[index], lane.flags[index])
        yield from self._odd.items()

    def __iter__(self) -> Iterator[Place]:
        return (place for place, _ in self.items())
