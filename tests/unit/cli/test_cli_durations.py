from __future__ import annotations

from datetime import UTC, datetime

import pytest
from ringfence.console.durations import count, parse_duration_ms, parse_time, size, span


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("30s", 30_000),
        ("1h", 3_600_000),
        ("1h30m", 5_400_000),
        ("1.5h", 5_400_000),
        ("250ms", 250),
        ("7d", 604_800_000),
        (" 2w ", 1_209_600_000),
    ],
)
def test_durations(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(
    "text", ["", "30", "h", "-1h", "1y", "1h 30m", "1h30", "1e3s", "٣s", "999999999d", "nan"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"^`"):
        parse_duration_ms(text)


def test_a_bare_number_where_it_has_a_unit() -> None:
    assert parse_duration_ms("30", bare_unit="s") == 30_000
    assert parse_duration_ms("1m", bare_unit="s") == 60_000


NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1h", "2026-01-31T11:00:00.000000Z"),
        ("2026-01-31T08:00:00Z", "2026-01-31T08:00:00.000000Z"),
        ("2026-01-31T08:00:00+02:00", "2026-01-31T06:00:00.000000Z"),
        ("2026-01-31", "2026-01-31T00:00:00.000000Z"),
    ],
)
def test_times(text: str, moment: str) -> None:
    assert parse_time(text, now=NOW) == moment


def test_what_is_no_time() -> None:
    with pytest.raises(ValueError, match="`yesterday` is not a time"):
        parse_time("yesterday")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0.0ms"),
        (3.21, "3.2ms"),
        (840, "840ms"),
        (9999, "10.0s"),
        (12_000, "12s"),
        (250_000, "4m10s"),
        (11_100_000, "3h05m"),
        (190_000_000, "2d04h"),
        (-5, "0.0ms"),
    ],
)
def test_span(ms: float, text: str) -> None:
    assert span(ms) == text


def test_sizes_and_counts() -> None:
    assert [size(n) for n in (0, 812, 3482, 125_829_120, 1 << 60)] == [
        "0 B",
        "812 B",
        "3.4 KiB",
        "120 MiB",
        "1024.0 PiB",
    ]
    assert [count(n) for n in (0, 950, 9999, 12_400, 3_100_000)] == ["0", "950", "9999", "12.4k", "3.1M"]
