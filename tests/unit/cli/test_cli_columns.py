"""Every table fits a terminal of 80 columns, whatever agents chose, and obeys NO_COLOR and a dumb terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ringfence.console import render
from ringfence.console.render import Column, RunningTable, table_lines

LONG = "/workspace/" + "r" * 90 + "/end.csv"
AT = "2026-01-31T08:00:00.123456Z"
NAME = "invoice-reader-of-the-finance-team"
ID = f"{NAME}-1a2b3"
AGENT = {
    "id": ID,
    "name": NAME,
    "state": "sleeping",
    "process": "frozen",
    "steps": 1234567,
    "tokens": 98_765_432,
    "cost_usd": 1234.56,
    "age_ms": 90_061_000,
    "waiting_for": f"timer {AT}",
}
STEP = {
    "step": 123456,
    "action": "checkpoint.save_it",
    "resource": LONG,
    "verdict": "allow",
    "outcome": "cancelled",
    "duration_ms": 3_723_000,
    "rollback_point": "p123456",
    "replayed": True,
    "branch": 3,
}
RULE = {
    "id": "g12345",
    "verdict": "allow",
    "text": f'fs.write: "{LONG}"',
    "origin": "manifest of the operator",
}
GRANT = {
    "id": "g12345",
    "verdict": "allow",
    "rule": f'fs.write: "{LONG}"',
    "origin": "operator root at noon",
    "uses_left": 12345,
    "expires_at": AT,
    "revoked_at": AT,
}
BUDGET = {
    "name": "messages.receive",
    "kind": "rate",
    "limit": 1000000.0,
    "used": 999999.123456,
    "left": 123456.123456,
    "reserved": 1234.5,
    "origin": "manifest",
    "period_ms": 3_600_000,
    "refill_ms": 3_599_000,
}
POINT = {
    "id": "p123456",
    "step": 123456,
    "kind": "workspace",
    "covers": [LONG, LONG],
    "size_bytes": 123_456_789,
    "verified": False,
    "at": AT,
}
SERVER = {
    "name": "github-of-the-finance-team",
    "transport": "stdio",
    "tools": 1000,
    "changed": 1000,
    "trusted": False,
    "unavailable": f"secret `{LONG}` is not set",
}
PEER = {
    "name": "oracle-of-the-finance-team",
    "url": f"https://{LONG}.example.com/agents/oracle",
    "seen": True,
    "changed": True,
    "trusted": False,
    "unavailable": f"secret `{LONG}` is not set",
}
TOOL = {
    "tool": f"create_{'issue_' * 20}",
    "effect": "EXTERNAL",
    "offered_hash": "sha256:0",
    "present": False,
    "taken_by": NAME,
    "definition": {"description": LONG},
}
APPROVAL = {
    "id": "a12345",
    "agent": ID,
    "name": NAME,
    "step": 123456,
    "action": "checkpoint.save",
    "resource": LONG,
    "state": "approved",
    "age_ms": 90_061_000,
}
SCHEDULE = {
    "agent": ID,
    "name": NAME,
    "state": "sleeping",
    "cron": "15,45 2-6 * JAN-JUN MON-FRI",
    "every_ms": None,
    "timezone": "America/Argentina/ComodRivadavia",
    "paused": False,
    "next_at": AT,
    "runs": 123456,
    "last_at": AT,
    "last_outcome": "running",
    "last_error": "e" * 90,
}
RECORD = {
    "time": AT,
    "chain": 12,
    "kind": "progress",
    "step": 123456,
    "action": "checkpoint.save",
    "verdict": "allow",
    "outcome": "cancelled",
    "resource": LONG,
}
EVENT = {"time": AT, "kind": "event", "action": "operator.submit_refused", "resource": ID}
AFFECTED = {"step": 123456, "action": "checkpoint.save", "resource": LONG, "fate": "under way"}
WALL = {"name": "read-only image", "ok": False, "detail": "d" * 90}

PRUNED = {
    "dry_run": True,
    "agents": [
        {
            "agent": "invoice-bot-4kq2m",
            "behind_step": 123456,
            "archived_rows": 123456,
            "kept_rows": 12345,
            "files": ["invoice-bot-4kq2m/000000000001-000000001000.jsonl.zst"],
            "archive_bytes": 123456789,
            "pruned_files": 123,
            "freed_bytes": 123456789,
        }
    ],
    "removed": [],
    "messages": 12,
    "logs_bytes": 0,
    "artifacts": 0,
    "artifact_bytes": 0,
    "skipped": [],
}

CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "ps": (("ps",), {"List": {"agents": [AGENT]}}),
    "top": (("top", "--once", "--interval", "100ms"), {"List": {"agents": [AGENT]}}),
    "steps": (("steps", "bot"), {"Steps": lambda _: [STEP]}),
    "points": (("points", "bot"), {"Points": {"points": [POINT]}}),
    "points verify": (
        ("points", "verify"),
        {"List": {"agents": [AGENT]}, "Points": {"points": [{**POINT, "verified": True}]}},
    ),
    "approvals": (("approvals",), {"Approvals": {"approvals": [APPROVAL]}}),
    "layers": (
        ("layers", "bot"),
        {
            "Layers": {
                "layers": [
                    {"layer": "environment", "items": 1234567, "size_bytes": 98_765_432, "about": LONG}
                ]
            }
        },
    ),
    "schedule": (("schedule", "ls"), {"ScheduleList": {"schedules": [SCHEDULE]}}),
    "mcp ls": (("mcp", "ls"), {"McpServers": {"servers": [SERVER]}}),
    "a2a ls": (("a2a", "ls"), {"A2aPeers": {"peers": [PEER]}}),
    "mcp tools": (("mcp", "tools", "github"), {"McpTools": {"server": "github", "tools": [TOOL]}}),
    "prune": (("prune", "--dry-run"), {"Prune": PRUNED}),
    "audit": (("audit",), {"Audit": lambda _: [RECORD, EVENT]}),
    "budget": (
        ("budget", "bot"),
        {"Budget": {"id": "bot", "budgets": [BUDGET], "used": {"calls": 123456789}}},
    ),
    "policy show": (
        ("policy", "show", "bot"),
        {"PolicyShow": {"rules": [RULE], "ceilings": [RULE]}},
    ),
    "revoke": (
        ("revoke", "bot", "g1"),
        {"Revoke": {"revoked": [], "affected": [AFFECTED], "epoch": 2, "elapsed_ms": 3}},
    ),
    "show": (
        ("show", "bot"),
        {
            "Show": {
                "id": "bot",
                "state": "running",
                "rules": [RULE],
                "grants": [GRANT, {**GRANT, "revoked_at": None}],
                "budgets": [BUDGET],
                "sandbox": {"backend": "native", "walls": [WALL]},
            }
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_80_columns_are_enough(case: str, door: Any, terminal: Any) -> None:
    words, answers = CASES[case]
    door.answers |= answers
    code, plain = terminal(*words, NO_COLOR="1")
    assert code == 0, plain
    # A busy machine may have been told how far it is: that line is erased before the table comes.
    plain = plain.rpartition("\r\x1b[K")[2]
    assert max(map(len, plain.splitlines())) <= 80, plain
    assert "\x1b" not in plain
    dumb_code, dumb = terminal(*words, TERM="dumb")
    assert (dumb_code, "\x1b" in dumb) == (0, False)


def test_every_command_with_a_table_is_looked_at() -> None:
    # `tree` draws lines, `doctor` has facts about this host; all others that print columns are above.
    modules = Path(render.__file__).parent.glob("commands_*.py")
    users = {m.stem.removeprefix("commands_") for m in modules if "Column(" in m.read_text(encoding="utf-8")}
    assert users == {
        "a2a",
        "agents",
        "approvals",
        "audit",
        "budget",
        "mcp",
        "move",
        "output",
        "prune",
        "rights",
        "schedule",
        "top",
        "undo",
    }


def test_a_pipe_gets_everything(door: Any, run: Any) -> None:
    door.answers["List"] = {"agents": [AGENT]}
    assert ID in run("ps").stdout
    assert "1234.56" in run("ps").stdout


def test_what_is_kept_is_cut_last() -> None:
    columns = (Column(title="ID", flex=True, kept=True), Column(title="TEXT", flex=True))
    (_, row) = table_lines(columns, [["i" * 30, "t" * 90]], 60)
    assert "i" * 30 in row
    assert len(row) == 60


def test_a_wide_cell_takes_from_the_last_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(render, "to_terminal", lambda: True)
    monkeypatch.setattr(render, "columns_available", lambda: 40)
    table = RunningTable((Column(title="A", minimum=5), Column(title="B", flex=True)))
    table.add(["a" * 20, "b" * 90])
    assert max(map(len, capsys.readouterr().out.splitlines())) == 40
