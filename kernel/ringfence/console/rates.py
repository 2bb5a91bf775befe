"""What agents did between two looks at them: the numbers of `top`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.console.documents import as_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_RATES = (("calls_per_s", "steps", 1.0), ("tokens_per_s", "tokens", 1.0), ("usd_per_h", "cost_usd", 3600.0))
_URGENCY = ("unknown", "failed", "parked", "waiting", "paused", "killed", "running", "pending", "sleeping")

ORDERS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]] = {
    "calls": lambda agent: (-(agent["calls_per_s"] or 0), -(agent.get("steps") or 0)),
    "tokens": lambda agent: (-(agent["tokens_per_s"] or 0), -(agent.get("tokens") or 0)),
    "cost": lambda agent: (-(agent["usd_per_h"] or 0), -(agent.get("cost_usd") or 0)),
    "state": lambda agent: (urgency(str(agent.get("state", ""))),),
    "age": lambda agent: (-(agent.get("age_ms") or 0),),
    "name": lambda agent: (str(agent.get("name", "")),),
}
"""Keys to sort by, the most interesting agent first."""


def urgency(state: str) -> int:
    """How much a state wants a person; the least number most."""
    return _URGENCY.index(state) if state in _URGENCY else len(_URGENCY)


class Rates:
    """Turns looks at the agents into rates, each since the look before."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, Any]] = {}
        self._at_s = 0.0

    def add(self, agents: Iterable[Mapping[str, Any]], at_s: float) -> list[dict[str, Any]]:
        """Take a look.

        Args:
            agents: documents of `ps`.
            at_s: when, in seconds of a clock that is never set.

        Returns:
            The documents with `calls_per_s`, `tokens_per_s` and `usd_per_h`. None for an agent that was not
            there before, and where a number went down: the agent goes on from an earlier step.
        """
        seen = {str(agent.get("id")): agent for agent in agents}
        elapsed_s = at_s - self._at_s
        found = [
            {**agent, **_rates(as_record(self._before.get(key)), agent, elapsed_s)}
            for key, agent in seen.items()
        ]
        self._before, self._at_s = dict(seen), at_s
        return found


def ordered(agents: Sequence[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Sort by a key of `ORDERS`; among equals by name and id, so that rows keep their places."""
    order = ORDERS[by]
    return sorted(agents, key=lambda agent: (*order(agent), str(agent.get("name")), str(agent.get("id"))))


def _rates(before: Mapping[str, Any], now: Mapping[str, Any], elapsed_s: float) -> dict[str, float | None]:
    rates: dict[str, float | None] = {}
    for name, key, scale in _RATES:
        grown = float(now.get(key) or 0) - float(before.get(key) or 0)
        known = before and elapsed_s > 0 and grown >= 0
        rates[name] = round(grown / elapsed_s * scale, 4) if known else None
    return rates
