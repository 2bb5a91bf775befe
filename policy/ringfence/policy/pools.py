"""Budgets of many agents together: of all that carry certain labels, or of the whole fleet, in all or for each window.

A pool's name is its selector: `fleet`, `team=billing` or `team=billing,env=prod`, in the order of the keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from ringfence.policy.problems import PatternError
from ringfence.policy.reader import Reader
from ringfence.policy.schedule import zone as find_zone
from ringfence.policy.strict_yaml import Node, Scalar
from ringfence.policy.units import TOTALS, parse_total

FLEET: Final = "fleet"
"""Name of the pool of all agents."""

KEYS: Final = ("total", "timezone")
PERIODS: Final = {"h": "hour", "d": "day", "w": "week", "month": "month"}
"""What may stand behind the `/` of an amount, and what it is called."""

_LABEL: Final = re.compile(
    r"([A-Za-z0-9](?:[A-Za-z0-9._/-]{0,125}[A-Za-z0-9])?)=([^=,\s][^=,]{0,126})", re.ASCII
)
_AMOUNT: Final = re.compile(r"([^/]+)(?:/([a-z]+))?", re.ASCII)
_MAX: Final = 64
_DECEMBER: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of time that a limit counts over: from `opens` to just before `closes`; None: it never ends."""

    opens: datetime
    closes: datetime | None


FOREVER: Final = Window(opens=datetime(1970, 1, 1, tzinfo=UTC), closes=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimit:
    """What a pool may spend of one total. `period`: a key of `PERIODS`; empty: in all."""

    amount: float
    period: str = ""

    @property
    def text(self) -> str:
        """For people: `50 a day`."""
        shown = f"{self.amount:.6f}".rstrip("0").rstrip(".")
        return (
            f"{shown} a{'n' if self.period == 'h' else ''} {PERIODS[self.period]}" if self.period else shown
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What some agents may spend together.

    Attributes:
        name: canonical selector.
        labels: that an agent has to carry, itself or one above it; empty: every agent.
        limits: by total.
        timezone: whose days and hours its windows follow.
    """

    name: str
    labels: Mapping[str, str]
    limits: Mapping[str, PoolLimit] = field(default_factory=dict[str, PoolLimit])
    timezone: str = "UTC"

    def holds(self, labels: Iterable[Mapping[str, str]]) -> bool:
        """Whether an agent is in it.

        Args:
            labels: its own, and those of each agent above it: a child can't leave its parent's pools.
        """
        wanted = self.labels.items()
        return any(all(carried.get(key) == value for key, value in wanted) for carried in labels)

    def window(self, total: str, now: datetime) -> Window:
        """The window of a total at a time, which is aware."""
        return window_at(self.limits[total].period, self.timezone, now)


def window_at(period: str, timezone: str, now: datetime) -> Window:
    """The window of a period that a time lies in, on the clock of a zone."""
    if not period:
        return FOREVER
    if period == "h":
        # Hours are as long as hours: where a clock is put back, the hour comes twice and counts twice.
        offset = now.astimezone(ZoneInfo(timezone)).utcoffset() or timedelta()
        part = timedelta(minutes=(offset.total_seconds() // 60) % 60)
        begin = (now.astimezone(UTC) + part).replace(minute=0, second=0, microsecond=0) - part
        return Window(opens=begin, closes=begin + timedelta(hours=1))
    local = now.astimezone(ZoneInfo(timezone))
    day = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0, tzinfo=None)
    if period == "w":
        day -= timedelta(days=day.weekday())
        end = day + timedelta(days=7)
    elif period == "month":
        day = day.replace(day=1)
        end = day.replace(year=day.year + day.month // _DECEMBER, month=day.month % _DECEMBER + 1)
    else:
        end = day + timedelta(days=1)
    zone = ZoneInfo(timezone)
    return Window(
        opens=day.replace(tzinfo=zone).astimezone(UTC), closes=end.replace(tzinfo=zone).astimezone(UTC)
    )


def selector(text: str) -> tuple[str, Mapping[str, str]]:
    """A selector's canonical form and its labels.

    Raises:
        PatternError: it is none.
    """
    if text == FLEET:
        return FLEET, {}
    labels: dict[str, str] = {}
    for part in text.split(","):
        found = _LABEL.fullmatch(part.strip())
        if found is None or found[1] in labels:
            raise PatternError(
                f"`{text}` is no selector of agents",
                "write `fleet`, `team=billing` or `team=billing,env=prod`",
            )
        labels[found[1]] = found[2]
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels)), labels


def parse_limit(total: str, text: str) -> PoolLimit | None:
    """The limit in `50.00/d`, `10k/h` or `1M`, of bytes `1GiB/d`; None where it is none."""
    found = _AMOUNT.fullmatch(text)
    amount = None if found is None else parse_total(total, found[1])
    if found is None or amount is None or (found[2] or "d") not in PERIODS:
        return None
    return PoolLimit(amount=amount, period=found[2] or "")


def read_pools(reader: Reader, node: Node, what: str) -> dict[str, Pool]:
    """Read the section; pools with a problem are left out."""
    pools: dict[str, Pool] = {}
    entries = reader.free_mapping(node, what)
    if len(entries) > _MAX:
        reader.wrong(node, f"`{what}` has {len(entries)} entries", f"at most {_MAX} are accepted")
        return {}
    for key, value in entries:
        try:
            name, labels = selector(key.text)
        except PatternError as error:
            reader.wrong(key, error.message, error.fix)
            continue
        if name in pools:
            reader.wrong(key, f"`{name}` is there twice", "keep one")
        pools[name] = _read_pool(reader, value, f"{what}.{key.text}", name, labels)
    return pools


def _read_pool(reader: Reader, node: Node, what: str, name: str, labels: Mapping[str, str]) -> Pool:
    fields = reader.mapping(node, what, KEYS)
    limits: dict[str, PoolLimit] = {}
    if "total" not in fields:
        reader.wrong(node, f"`{what}` has no `total`", "write `{total: {usd: 50.00/d}}`")
    else:
        place = fields["total"][1]
        for total, (_, value) in reader.mapping(place, f"{what}.total", TOTALS).items():
            limit = parse_limit(total, value.text) if isinstance(value, Scalar) else None
            if limit is None:
                example = "1GiB" if total == "bytes" else "50"
                ways = ", ".join(f"`/{period}`" for period in PERIODS)
                reader.wrong(
                    value,
                    f"`{what}.total.{total}` is no limit",
                    f"write an amount, such as `{example}` or `{example}/d`: {ways}",
                )
            else:
                limits[total] = limit
    zone = "UTC"
    if "timezone" in fields:
        place = fields["timezone"][1]
        zone = reader.text(place, f"{what}.timezone") or "UTC"
        if find_zone(zone) is None:
            reader.wrong(place, f"`{zone}` is no time zone", "write one such as `Europe/Berlin`")
            zone = "UTC"
    return Pool(name=name, labels=labels, limits=limits, timezone=zone)
