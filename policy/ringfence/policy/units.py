"""Sizes, counts, durations and rates, as they are written in files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

_SIZE: Final = re.compile(r"([0-9]{1,12})(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|k|K|M|G|T)?B?", re.ASCII)
_SIZES: Final = {
    "": 1,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
_COUNT: Final = re.compile(r"([0-9]{1,15})(\.[0-9]{1,6})?([kKM])?", re.ASCII)
_COUNTS: Final = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6}
TOTALS: Final = ("calls", "tokens", "usd", "bytes", "destructive")
"""What a budget may limit in all."""

_DURATION: Final = re.compile(r"([0-9]{1,9})(\.[0-9]{1,3})?(ms|s|m|h|d)", re.ASCII)
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RATE: Final = re.compile(r"([0-9]{1,9})/([smhd])", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many calls in so many seconds."""

    count: int
    per_s: float

    @property
    def text(self) -> str:
        """As it is written."""
        unit = next(
            (name for name, seconds in _SECONDS.items() if seconds == self.per_s and name != "ms"), ""
        )
        return f"{self.count}/{unit}" if unit else f"{self.count} in {self.per_s:g} s"


def parse_size(text: str) -> int | None:
    """Bytes of `256Mi`, `1Gi`, `10MB` or a plain number; None where it is none of these."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    return round(float(found[1] + (found[2] or "")) * _SIZES[found[3] or ""])


def parse_count(text: str) -> float | None:
    """The number in `200k`, `1.5M`, `10000` or `5.00`; None where it is none of these."""
    found = _COUNT.fullmatch(text)
    if found is None:
        return None
    return round(float(found[1] + (found[2] or "")) * _COUNTS[found[3] or ""], 6)


def parse_amount(text: str) -> Decimal | None:
    """As `parse_count`, exactly."""
    found = _COUNT.fullmatch(text)
    if found is None:
        return None
    return Decimal(found[1] + (found[2] or "")) * Decimal(_COUNTS[found[3] or ""])


def parse_total(total: str, text: str) -> float | None:
    """What a limit of a total says: a size of `bytes`, a number with a fraction of `usd`, else a whole number; None: neither."""
    if total == "bytes":
        return parse_size(text)
    amount = parse_count(text)
    return None if amount is None or (total != "usd" and amount != int(amount)) else amount


def parse_duration(text: str) -> float | None:
    """Seconds of `500ms`, `30s`, `15m`, `2h` or `7d`; None where it is none of these."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    return round(float(found[1] + (found[2] or "")) * _SECONDS[found[3]], 6)


def parse_rate(text: str) -> Rate | None:
    """The rate in `10/s`, `60/m`, `5/h` or `100/d`; None where it is none of these, or zero."""
    found = _RATE.fullmatch(text)
    if found is None or int(found[1]) == 0:
        return None
    return Rate(count=int(found[1]), per_s=_SECONDS[found[2]])
