"""Slots: which agents may have a live process now, and who is next. No I/O, and no clock of its own.

Whoever may not start yet is queued. Order: priority first, then the label value that holds the fewest slots for `share_by`, then who
asked first. Ten minutes of waiting count as one priority more, so nobody waits for ever.

INVARIANT: what is held never exceeds a bound, but for agents that lived before a bound was lowered.
INVARIANT: nobody overtakes an agent that waits for a slot or for memory; one that waits for its label's quota holds up no other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from ringfence.policy.scheduling import SlotLimits
from ringfence.policy.sections import PRIORITIES

Key = TypeVar("Key", bound=Hashable)

AGING_S: Final = 600.0
"""Seconds of waiting that count as one priority more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish(Generic[Key]):
    """An agent that is to live.

    Attributes:
        key: which.
        priority: as in its manifest.
        memory_bytes: that it may use.
        labels: all it counts for.
        since: when it asked, on the clock of `Slots`.
    """

    key: Key
    priority: str = "normal"
    memory_bytes: int = 0
    labels: frozenset[tuple[str, str]] = field(default_factory=frozenset[tuple[str, str]])
    since: float = 0.0


class Slots(Generic[Key]):
    """The live agents of one kernel, and those that wait to be."""

    def __init__(self, limits: Callable[[], SlotLimits], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._held: dict[Key, Wish[Key]] = {}
        self._starting: set[Key] = set()
        self._queue: dict[Key, Wish[Key]] = {}
        # The same by priority, in the order in which they asked: whoever is next is found without a look at all of them.
        self._lines: dict[str, dict[Key, Wish[Key]]] = {}
        self._memory = 0
        self._labels: Counter[tuple[str, str]] = Counter()

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Agents that live, or are being started."""
        return len(self._held)

    @property
    def memory_bytes(self) -> int:
        """What these may use of memory together."""
        return self._memory

    @property
    def queued(self) -> int:
        """Agents that wait for their turn."""
        return len(self._queue)

    @property
    def short(self) -> bool:
        """Whether somebody waits for what others hold, and not merely for the starts before it."""
        limits = self._limits()
        if not self._queue:
            return False
        if limits.agents is not None and len(self._held) >= limits.agents:
            return True
        if limits.memory_bytes is None and not limits.labels:
            return False
        return any(self._bound(wish) for wish in self._queue.values())

    def never(self, wish: Wish[Key]) -> str:
        """Why an agent can't ever have its turn under these bounds; empty: it can."""
        most = self._limits().memory_bytes
        if most is not None and wish.memory_bytes > most:
            return (
                f"it asks for {wish.memory_bytes} bytes of memory, and all agents of this kernel share {most}; "
                "ask for less in `sandbox.memory`, or have the operator raise `spec.scheduler.memory`"
            )
        return ""

    def fits(self, wish: Wish[Key]) -> bool:
        """Whether an agent that asked now would have its turn, with nobody waiting."""
        return not self._queue and not self._obstacle(wish)[0]

    # -- turns ----------------------------------------------------------------------------------------------------

    def ask(self, wish: Wish[Key]) -> str:
        """Ask for a turn. Who has one keeps it; who waits keeps its place.

        Returns:
            Empty: it has its turn, until `release`. Else what it waits for; `pump` names it when its turn has come.
        """
        if wish.key in self._held:
            return ""
        wish = self._enqueued(wish)
        why = self._first_obstacle(wish)
        if not why:
            self._hold(wish)
            self._dequeue(wish.key)
        return why

    def started(self, key: Key) -> None:
        """It is not being started any more: it lives, or has given up its turn."""
        self._starting.discard(key)

    def release(self, key: Key) -> None:
        """It lives no more, or waits no more."""
        self._dequeue(key)
        self._starting.discard(key)
        wish = self._held.pop(key, None)
        if wish is not None:
            self._memory -= wish.memory_bytes
            for label in wish.labels:
                self._labels[label] -= 1

    def pump(self) -> list[Key]:
        """Give turns to all whose time has come; each has it from here on, until `release`."""
        given: list[Key] = []
        for wish in self._in_order():
            why, hard = self._obstacle(wish)
            if not why:
                self._hold(wish)
                given.append(wish.key)
            elif hard:
                break
        for key in given:
            self._dequeue(key)
        return given

    def waits(self, key: Key) -> bool:
        """Whether it waits for its turn."""
        return key in self._queue

    # -- how ------------------------------------------------------------------------------------------------------

    def _enqueued(self, wish: Wish[Key]) -> Wish[Key]:
        """Put a wish in line; gives the one that was there before."""
        found = self._queue.get(wish.key)
        if found is not None:
            return found
        self._queue[wish.key] = wish
        line = self._lines.setdefault(wish.priority, {})
        later = bool(line) and next(reversed(line.values())).since > wish.since
        line[wish.key] = wish
        if later:
            self._lines[wish.priority] = {w.key: w for w in sorted(line.values(), key=lambda w: w.since)}
        return wish

    def _dequeue(self, key: Key) -> None:
        wish = self._queue.pop(key, None)
        if wish is not None:
            del self._lines[wish.priority][key]

    def _hold(self, wish: Wish[Key]) -> None:
        self._held[wish.key] = wish
        self._starting.add(wish.key)
        self._memory += wish.memory_bytes
        self._labels.update(wish.labels)

    def _first_obstacle(self, wish: Wish[Key]) -> str:
        """What holds an agent up: a bound, or those before it."""
        why, _ = self._obstacle(wish)
        if why:
            return why
        for other in self._in_order():
            if other.key == wish.key:
                return ""
            before, hard = self._obstacle(other)
            if hard:
                return before
        return ""

    def _obstacle(self, wish: Wish[Key]) -> tuple[str, bool]:
        """The bound that it doesn't fit in, empty for none; and whether others wait behind it."""
        if bound := self._bound(wish):
            return bound
        limits = self._limits()
        if len(self._starting) >= limits.starts:
            return f"its turn: {limits.starts} agents are being started", True
        return "", False

    def _bound(self, wish: Wish[Key]) -> tuple[str, bool] | None:
        """The same, of what others hold as long as they live."""
        limits = self._limits()
        for (name, value), most in limits.labels.items():
            if (name, value) in wish.labels and self._labels[name, value] >= most:
                return f"a slot: all {most} of {name}={value} are taken", False
        if limits.agents is not None and len(self._held) >= limits.agents:
            return f"a slot: all {limits.agents} are taken", True
        if limits.memory_bytes is not None and self._memory + wish.memory_bytes > limits.memory_bytes:
            left = max(0, limits.memory_bytes - self._memory)
            return f"memory: {wish.memory_bytes} bytes asked for, {left} left", True
        return None

    def _in_order(self) -> Iterator[Wish[Key]]:
        """Who waits, the next one first. Nobody may come or go while it is walked."""
        now, limits = self._clock(), self._limits()
        if not limits.share_by:
            # Of one priority, whoever asked first has waited longest, so that each line is in order already.
            return heapq.merge(
                *(line.values() for line in self._lines.values()), key=lambda w: (-_rank(w, now), w.since)
            )
        return self._by_shares(now, limits.share_by)

    def _by_shares(self, now: float, share_by: str) -> Iterator[Wish[Key]]:
        shares = Counter(_value(wish.labels, share_by) for wish in self._held.values())
        waiting = list(self._queue.values())
        while waiting:
            first = min(waiting, key=lambda w: (-_rank(w, now), shares[_value(w.labels, share_by)], w.since))
            waiting.remove(first)
            yield first
            # Those behind it are ordered as if it had its slot.
            shares[_value(first.labels, share_by)] += 1


def _rank(wish: Wish[Any], now: float) -> int:
    return PRIORITIES.index(wish.priority) + int((now - wish.since) / AGING_S)


def _value(labels: frozenset[tuple[str, str]], name: str) -> str:
    """The value of a label; the first of several, empty for none."""
    return min((value for key, value in labels if key == name), default="")


def wish_of(
    key: Key, priority: str, memory_bytes: int, labels: Iterable[Mapping[str, str]], since: float
) -> Wish[Key]:
    """What an agent with such a manifest asks for; it counts for its own labels, and for those of all above it."""
    return Wish(
        key=key,
        priority=priority,
        memory_bytes=memory_bytes,
        labels=frozenset(pair for carried in labels for pair in carried.items()),
        since=since,
    )
