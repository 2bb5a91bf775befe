"""On a real terminal: hostile output is shown and not obeyed, tables fit, and a rollback asks."""

from __future__ import annotations

import pytest

AGENT = {
    "id": "a1",
    "name": "n" * 60,
    "state": "running",
    "process": "live",
    "steps": 1,
    "tokens": 0,
    "cost_usd": 0,
    "age_ms": 1,
    "waiting_for": "w" * 60,
}


def test_logs_are_shown_and_not_obeyed(door, terminal) -> None:
    door.answers["Logs"] = lambda _: [b"\x1b[31mred\x1b[0m \x1b[2", b"J\x1b]0;title\x07 \xe2\x80", b"\xae\n"]
    assert terminal("logs", "bot") == (0, "red \\x1b[2J\\x1b]0;title\\x07 \\u202e\n")


def test_tables_fit_and_have_colours(door, terminal) -> None:
    door.answers["List"] = {"agents": [AGENT]}
    _, shown = terminal("ps")
    assert "\x1b[32mrunning" in shown
    _, plain = terminal("ps", NO_COLOR="1")
    assert "\x1b" not in plain
    assert all(len(line) <= 80 for line in plain.splitlines())
    assert "…" in plain


def test_steps_fit(door, terminal) -> None:
    step = {
        "step": 1,
        "action": "fs.write",
        "resource": "/workspace/" + "r" * 200 + "/end.md",
        "verdict": "allow",
        "outcome": "ok",
        "duration_ms": 1,
        "rollback_point": "p1",
    }
    door.answers["Steps"] = lambda _: [step]
    _, shown = terminal("steps", "bot", NO_COLOR="1")
    line = shown.splitlines()[1]
    assert len(line) <= 80
    assert line.endswith("/end.md")


ROLLBACK = {"to_step": 3, "changes": [], "conflicts": [], "not_undoable": [], "others": []}


@pytest.mark.parametrize(("typed", "code", "times"), [(b"n\n", 1, 1), (b"\n", 1, 1), (b"y\n", 0, 2)])
def test_a_rollback_shows_its_changes_and_asks(typed, code, times, door, terminal) -> None:
    door.answers["Rollback"] = lambda request: {**ROLLBACK, "preview": request.preview}
    result, shown = terminal("rollback", "bot", "--to", "3", "--start", prompt=b"[y/N]", typed=typed)
    assert result == code
    assert "would go back to step 3" in shown
    previews = [request.preview for _, request in door.requests]
    assert previews == [True, False][:times]
    assert not door.requests[0][1].start


@pytest.mark.parametrize("flag", ["--yes", "--json"])
def test_a_rollback_that_needs_no_asking(flag, door, terminal) -> None:
    door.answers["Rollback"] = {**ROLLBACK, "preview": False}
    result, _ = terminal("rollback", "bot", "--to", "3", flag)
    assert result == 0
    assert door.asked("Rollback").preview is False


def test_a_secret_is_asked_for_and_not_shown(door, terminal) -> None:
    result, shown = terminal("secrets", "set", "token", prompt=b"Value", typed=b"s3cret\n")
    assert result == 0
    assert door.asked("SecretSet").value == b"s3cret"
    assert "s3cret" not in shown
