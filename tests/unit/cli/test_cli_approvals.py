"""`approvals show`: what it prints of one call."""

from __future__ import annotations

from typing import Any

WAITS: dict[str, Any] = {
    "id": "a7",
    "agent": "bot-1",
    "name": "bot",
    "step": 5,
    "action": "exec.run",
    "resource": "make",
    "effect": "WRITE",
    "arguments": {},
    "edited": None,
    "why": ["r1"],
    "detail": {},
    "state": "pending",
    "age_ms": 1,
    "expires_at": None,
    "decided_by": None,
    "decided_at": None,
    "reason": None,
}


def test_what_is_touched_beyond_the_list_is_counted(door, run) -> None:
    changes = [{"kind": "modify", "path": f"/workspace/{n}"} for n in range(6)]
    door.answers["ApprovalShow"] = {**WAITS, "detail": {"touches": 9, "changes": changes}}
    assert "  modify   /workspace/5\n  and 3 more\n" in run("approvals", "show", "a7").stdout
    door.answers["ApprovalShow"] = {**WAITS, "detail": {"touches": 6, "changes": changes}}
    assert "more" not in run("approvals", "show", "a7").stdout


def test_the_details_of_a_question_are_shown_once(door, run) -> None:
    ask = {"question": "pay?", "details": {"invoice": "2026-117"}}
    door.answers["ApprovalShow"] = {**WAITS, "action": "ask", "arguments": ask, "detail": ask}
    assert run("approvals", "show", "a7").stdout.count("2026-117") == 1
