"""`console`: short words are commands, news come between two keys, and scripts end at their first failure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ringfence.console.cli import root
from ringfence.console.errors import ConsoleError
from ringfence.console.line_mode import SHORT, help_lines, split, translate

KNOWN = frozenset(root.commands)

WAITS = {
    "id": "a7",
    "agent": "bot-1a2b3",
    "name": "bot",
    "step": 3,
    "action": "fs.delete",
    "resource": "/workspace/\x1b[2Jx",
    "effect": "DESTROY",
    "state": "pending",
    "age_ms": 1,
    "expires_at": "2026-01-31T08:00:00.000000Z",
    "arguments": {"path": "x"},
    "edited": None,
    "detail": {},
    "why": [],
    "decided_at": None,
    "decided_by": None,
    "reason": None,
}


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("ps", "ps"),
        ("ps --all", "ps --all"),
        ("approvals", "approvals ls"),
        ("approvals show a7", "approvals show a7"),
        ("show a7", "approvals show a7"),
        ("show bot", "show bot"),
        ("show a7-x1y2z", "show a7-x1y2z"),
        ("approve a7", "approvals approve a7"),
        ("approve a7 --edit f.json", "approvals approve a7 --edit f.json"),
        ("steps bot -f", "steps bot -f"),
        ("explain bot 17", "policy explain bot 17"),
        ("rollback bot --to 3 --preview", "rollback bot --to 3 --preview"),
        ("ringfence kill bot", "kill bot"),
        ("deny --help", "approvals deny --help"),
    ],
)
def test_a_line_is_a_command(line: str, command: str) -> None:
    assert translate(split(line), KNOWN) == command.split()


@pytest.mark.parametrize("line", ["deny a7 don't do that", 'deny a7 "don\'t do that"'])
def test_what_follows_an_id_is_the_reason(line: str) -> None:
    assert translate(split(line), KNOWN) == ["approvals", "deny", "a7", "--reason", "don't do that"]


@pytest.mark.parametrize("line", ["deny a7", "show", "undo bot", "console", "up", 'steps "bot'])
def test_what_is_no_command_is_said(line: str) -> None:
    with pytest.raises(ConsoleError) as caught:
        translate(split(line), KNOWN)
    assert caught.value.code == 2
    assert "\n" not in caught.value.message


def test_every_short_word_is_in_the_help_and_a_command() -> None:
    shown = "\n".join(help_lines())
    for name, short in SHORT.items():
        assert f"  {short.usage} " in shown
        assert short.usage.split()[0] == name
        assert short.command[0] in KNOWN
    assert max(len(line) for line in help_lines()) <= 80 or help_lines()[-1] == max(help_lines(), key=len)


def test_a_script_runs_its_lines_and_ends_at_the_first_failure(door: Any, run: Any, refusal: Any) -> None:
    door.answers["List"] = {"agents": []}
    door.answers["Show"] = refusal("no agent `nix`", 4, "NoSuchAgent")
    door.answers["Approve"] = {"id": "a7", "step": 3, "agent": "bot", "state": "approved"}
    script = "# first look\nps --all\n\nshow nix\napprove a7\n"
    done = run("console", stdin=script)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (4, "ringfence: no agent `nix`")
    assert [name for name, _ in door.requests] == ["List", "Show"]
    assert run("console", stdin="approve a7 yes, but only March\nquit\nshow nix\n").exit_code == 0
    assert door.asked("Approve").reason == "yes, but only March"


def test_a_script_prints_json(door: Any, run: Any) -> None:
    door.answers["List"] = {"agents": []}
    door.answers["Approvals"] = {"approvals": [WAITS]}
    done = run("console", "--json", stdin="approvals\n")
    assert json.loads(done.stdout)[0]["id"] == "a7"
    assert run("console", stdin="").exit_code == 0


def test_there_is_no_web_console(run: Any) -> None:
    done = run("console", "--web")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "no web console" in done.stderr


@pytest.fixture
def asking(door: Any) -> dict[str, list[Any]]:
    """What waits; a test adds to it while a console runs."""
    inbox: dict[str, list[Any]] = {"approvals": []}
    door.answers["Approvals"] = lambda _: inbox
    door.answers["ApprovalShow"] = WAITS
    door.answers["Status"] = {"version": "0.1", "agents": {"running": 1}}
    door.answers["List"] = {"agents": []}
    return inbox


def test_news_come_while_the_prompt_waits(door: Any, asking: Any, terminal: Any, refusal: Any) -> None:
    door.answers["Deny"] = {"id": "a7", "agent": "bot-1a2b3", "step": 3, "state": "denied"}
    door.answers["Kill"] = refusal("no agent `nix`", 4, "NoSuchAgent")
    code, shown = terminal(
        "console",
        script=[
            (b"ringfence> ", lambda: asking["approvals"].append(WAITS)),
            (b"! a7: bot asks for fs.delete /workspace/\\x1b[2Jx", b"show a7\n"),
            (b"decide:", b"kill nix\n"),
            (b"no agent `nix`", b"deny a7 don't do that\n"),
            (b"denied; bot-1a2b3 is told", b"half a line\x03"),
            (b"ringfence> ", b"quit\n"),
        ],
    )
    assert code == 0, shown
    assert door.asked("Deny").reason == "don't do that"
    assert shown.count("! a7") == 1
    assert "1 agent;" in shown


def test_ctrl_c_behind_a_commands_last_word_leaves_nobody_outside(
    door: Any, asking: Any, terminal: Any
) -> None:
    """It comes while the command closes what it opened, or between it and the next line."""
    del asking
    door.answers["Deny"] = {"id": "a7", "agent": "bot-1a2b3", "step": 3, "state": "denied"}
    rounds = [step for _ in range(8) for step in ((b"ringfence> ", b"deny a7 no\n"), (b"is told", b"\x03"))]
    code, shown = terminal("console", script=[*rounds, (b"ringfence> ", b"quit\n")])
    assert code == 0, shown


def test_ctrl_d_leaves_and_a_command_may_be_broken_off(door: Any, asking: Any, terminal: Any) -> None:
    del asking

    def endless(_: Any) -> Any:
        yield {"step": 1, "action": "now", "verdict": "allow", "outcome": "ok"}
        while door.answers["Steps"]:
            yield {"step": 2, "action": "now", "verdict": "allow", "outcome": "ok"}

    door.answers["Steps"] = endless
    code, shown = terminal(
        "console",
        script=[(b"ringfence> ", b"steps bot -f\n"), (b"allow", b"\x03"), (b"ringfence> ", b"\x04")],
    )
    door.answers["Steps"] = None
    assert code == 0, shown


def test_tab_and_arrow_keys(asking: Any, terminal: Any) -> None:
    asking["approvals"].append(WAITS)
    code, shown = terminal(
        "console",
        script=[
            (b"ringfence> ", b"approva\t\n"),
            (b"/workspace", b""),
            (b"ringfence> ", b"\x1b[A\n"),
            (b"STATE", b"show a\t\n"),
            (b"decide:", b"q\n"),
        ],
    )
    assert code == 0, shown


def test_without_a_kernel_it_ends_at_once(door: Any, terminal: Any) -> None:
    (door.data / "kernel.json").unlink()
    code, shown = terminal("console")
    assert code == 6
    assert "ringfence> " not in shown
