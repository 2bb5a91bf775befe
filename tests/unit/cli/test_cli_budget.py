"""budget: what is asked and how it is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

SHOWN: dict[str, Any] = {
    "id": "bot-1",
    "state": "parked",
    "process": "none",
    "waiting_for": "budget `tokens`",
    "on_exhausted": "park",
    "budgets": [
        {
            "name": "tokens", "kind": "total", "limit": 200000.0, "used": 199000.0, "left": 100.0, "reserved": 900.0,
            "origin": "operator", "period_ms": None, "refill_ms": None,
        },
        {
            "name": "http.get", "kind": "rate", "limit": 10.0, "used": 10.0, "left": None, "reserved": 0.0,
            "origin": "manifest", "period_ms": 1000, "refill_ms": 300,
        },
    ],
    "used": {"calls": 7.0, "destructive": 0.0, "tokens": 199000.0, "usd": 0.0123},
    "context_max_tokens": None,
}  # fmt: skip


def test_budgets_are_shown_with_use_and_refill(door, run) -> None:
    door.answers["Budget"] = SHOWN
    out = run("budget", "bot").stdout
    assert "budget `tokens`" in out
    assert ["tokens", "200,000", "199,000", "900", "100", "never", "operator"] in [
        row.split() for row in out.splitlines()
    ]
    assert "0.0123" in out
    assert json.loads(run("budget", "bot", "--json").stdout) == SHOWN


def test_a_limit_is_set(door, run) -> None:
    door.answers["Budget"] = SHOWN
    assert run("budget", "bot", "set", "tokens", "500k").exit_code == 0
    request = door.asked("Budget")
    assert (request.agent, request.name, request.value) == ("bot", "tokens", "500k")


@pytest.mark.parametrize(
    "words", [("set",), ("set", "tokens"), ("put", "tokens", "1"), ("set", "a", "b", "c")]
)
def test_changes_that_make_no_sense(words, door, run) -> None:
    result = run("budget", "bot", *words)
    assert result.exit_code == 2
    assert "set NAME VALUE" in result.stderr


def test_bytes_are_shown_as_sizes(door, run) -> None:
    line = {
        **SHOWN["budgets"][0],
        "name": "bytes",
        "limit": 10485760.0,
        "used": 3072.0,
        "reserved": 512.0,
        "left": 1 << 20,
    }
    pool = {**line, "pool": "fleet", "period": "day", "agents": 1, "resets_at": None}
    door.answers["Budget"] = {**SHOWN, "budgets": [line], "pools": [pool]}
    rows = run("budget", "bot").stdout.splitlines()
    for first in ("bytes", "fleet"):
        row = next(row for row in rows if row.startswith(first))
        assert all(f" {size} " in row for size in ("10 MiB", "3.0 KiB", "512 B", "1.0 MiB"))
