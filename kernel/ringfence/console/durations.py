"""Durations, times, sizes and ages as people write and read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.policy.units import parse_size

_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)
_FRACTION = re.compile(r"(\d\d:\d\d:\d\d)\.\d+Z", re.ASCII)
_DURATION_MS_MAX = 100 * 366 * 86_400_000
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_KIBI = 1024
_TEN = 10


def parse_duration_ms(text: str, *, bare_unit: str | None = None) -> int:
    """Read `90s`, `1h`, `1h30m`, `1.5h` or `250ms` as milliseconds.

    Args:
        text: what the user wrote.
        bare_unit: unit of a number without one; None: such a number is refused.

    Raises:
        ValueError: not a duration, or longer than a century; the text says what is one.
    """
    stripped = text.strip()
    if bare_unit is not None and re.fullmatch(r"\d+(\.\d+)?", stripped, re.ASCII):
        stripped += bare_unit
    parts = _PART.findall(stripped)
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        msg = f"`{text}` is not a duration; write one like `30s`, `15m`, `1h30m` or `7d`"
        raise ValueError(msg)
    total = round(sum(float(number) * _UNIT_MS[unit] for number, unit in parts))
    if total > _DURATION_MS_MAX:
        msg = f"`{text}` is longer than a century; write a shorter duration"
        raise ValueError(msg)
    return total


def asked_ms(text: str, *, bare_unit: str | None = None) -> int:
    """As `parse_duration_ms`, for what stands on a command line.

    Raises:
        ConsoleError: not a duration.
    """
    try:
        return parse_duration_ms(text, bare_unit=bare_unit)
    except ValueError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from None


def asked_bytes(text: str) -> int:
    """Read `500Mi`, `2Gi`, `10MB` or a plain number of bytes.

    Raises:
        ConsoleError: not a size.
    """
    found = parse_size(text.strip())
    if found is None:
        raise ConsoleError(f"`{text}` is not a size; write `500Mi` or `2Gi`", ExitCode.USAGE)
    return found


def parse_time(text: str, *, now: datetime | None = None) -> str:
    """Read a time as RFC 3339 in UTC: RFC 3339 itself (a date alone: its midnight), or how long ago, as `1h`.

    Args:
        text: what the user wrote.
        now: the present, for tests.

    Raises:
        ValueError: neither of them.
    """
    try:
        moment = (now or datetime.now(UTC)) - timedelta(milliseconds=parse_duration_ms(text))
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            msg = f"`{text}` is not a time; write one like `2026-01-31T08:00:00Z`, or how long ago, like `1h`"
            raise ValueError(msg) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seconds(text: str) -> str:
    """Cut the parts of a second off the times in a text: people look at it."""
    return _FRACTION.sub(r"\1Z", text)


def utc(text: object) -> str:
    """Write a time of a document to the second, for columns that say that it is UTC."""
    return str(text or "")[:19]


def span(milliseconds: float) -> str:
    """Write a duration briefly: `3.2ms`, `840ms`, `12s`, `4m10s`, `3h05m`, `2d04h`."""
    ms = max(0.0, milliseconds)
    if ms < _TEN:
        return f"{ms:.1f}ms"
    if ms < _UNIT_MS["s"]:
        return f"{ms:.0f}ms"
    seconds = ms / 1000
    if seconds < _TEN:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if minutes == 0:
        return f"{rest}s"
    if hours == 0:
        return f"{minutes}m{rest:02d}s"
    if days == 0:
        return f"{hours}h{minutes_left:02d}m"
    return f"{days}d{hours_left:02d}h"


def size(count: float) -> str:
    """Write a size in bytes briefly: `812 B`, `3.4 KiB`, `120 MiB`."""
    value = float(count)
    for unit in _SIZE_UNITS[:-1]:
        if abs(value) < _KIBI:
            return f"{value:.0f} {unit}" if unit == "B" or value >= _TEN else f"{value:.1f} {unit}"
        value /= _KIBI
    return f"{value:.1f} {_SIZE_UNITS[-1]}"


def plural(number: int, noun: str) -> str:
    """Write a number of things: `1 change`, `3 changes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def count(number: float) -> str:
    """Write a count briefly: `950`, `12.4k`, `3.1M`."""
    for limit, suffix in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if abs(number) >= limit:
            divisor = 1000 if suffix == "k" else limit
            return f"{number / divisor:.1f}{suffix}"
    return f"{number:g}"
