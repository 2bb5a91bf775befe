"""ps, show, pause, resume, start, kill, logs, steps: what is asked, printed and exited with."""

from __future__ import annotations

import json

import pytest

AGENT = {
    "id": "a1",
    "name": "invoice-bot",
    "state": "running",
    "process": "live",
    "steps": 12400,
    "tokens": 0,
    "cost_usd": 0.0,
    "age_ms": 250_000,
    "waiting_for": None,
}
STEP = {
    "step": 3,
    "lane": "0",
    "lane_step": 2,
    "branch": 0,
    "action": "fs.write",
    "resource": "/workspace/out/a.md",
    "effect": "WRITE",
    "verdict": "allow",
    "rule": "r1",
    "outcome": "ok",
    "started_at": "2026-01-31T08:00:00.000000Z",
    "duration_ms": 3.25,
    "rollback_point": "p3",
    "replayed": False,
    "error": None,
}


def test_ps_json_is_the_array(door, run) -> None:
    door.answers["List"] = {"agents": [AGENT]}
    assert json.loads(run("ps", "--json").stdout) == [AGENT]
    assert door.asked("List").all is False


def test_ps_table_in_a_pipe(door, run) -> None:
    long = {**AGENT, "name": "n" * 120, "waiting_for": "step 3\n\x1b[2J"}
    door.answers["List"] = {"agents": [AGENT, long]}
    result = run("ps", "--all")
    heading, first, second = result.stdout.splitlines()
    assert heading.split() == [
        "ID",
        "NAME",
        "STATE",
        "PROCESS",
        "STEPS",
        "TOKENS",
        "USD",
        "AGE",
        "WAITING",
        "FOR",
    ]
    assert first.split() == ["a1", "invoice-bot", "running", "live", "12.4k", "0", "0.00", "4m10s"]
    assert "n" * 120 in second
    assert second.endswith("step 3\\n\\x1b[2J")
    assert door.asked("List").all is True
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


def test_ps_without_agents(door, run) -> None:
    door.answers["List"] = {"agents": []}
    result = run("ps")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no live agents" in result.stderr


SHOW = {
    **AGENT,
    "thread": "t1",
    "branch": 1,
    "workspace": "/data/agents/a1/live",
    "manifest": {"version": "abc", "source": "agent.yaml", "text": "apiVersion: ringfence/v1\nkind: Agent\n"},
    "rules": [{"id": "r1", "verdict": "deny", "text": 'fs.*: "/workspace/.env"', "origin": "manifest"}],
    "grants": [
        {
            "id": "g7",
            "rule": 'fs.read: "/workspace/**"',
            "verdict": "allow",
            "origin": "operator",
            "uses_left": 2,
            "expires_at": None,
            "revoked_at": None,
        },
        {
            "id": "g8",
            "rule": "now",
            "verdict": "allow",
            "origin": "manifest",
            "uses_left": None,
            "expires_at": None,
            "revoked_at": "2026-01-31T08:00:00Z",
        },
    ],
    "budgets": [{"name": "calls", "kind": "total", "limit": 100.0, "used": 12.0, "left": 88.0}],
    "sandbox": {"backend": "native", "walls": [{"name": "landlock", "ok": False, "detail": "ABI 0"}]},
    "checkpoint": {"step": 9, "schema_version": 2},
    "error": None,
    "restarts": 0,
    "exit_code": None,
}


def test_show(door, run) -> None:
    door.answers["Show"] = SHOW
    out = run("show", "invoice-bot").stdout
    for words in (
        "workspace   /data/agents/a1/live",
        "checkpoint  step 9, schema 2",
        "version abc",
        "g7     allow",
        "revoked 2026",
        "calls   total    100    12    88",
        "landlock  missing        ABI 0",
    ):
        assert words in out, words
    assert "apiVersion" not in out
    assert json.loads(run("show", "invoice-bot", "--json").stdout) == SHOW


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"uses_left": None, "expires_at": None}, "any   in force"),
        ({"uses_left": 2, "expires_at": None}, "2     in force"),
        ({"uses_left": 0, "expires_at": None}, "0     used up"),
        ({"uses_left": 0, "expires_at": "2999-01-31T08:00:00.000000Z"}, "0     used up"),
        ({"uses_left": None, "expires_at": "2999-01-31T08:00:00.000000Z"}, "any   until 2999"),
        ({"uses_left": None, "expires_at": "2020-01-31T08:00:00.000000Z"}, "any   expired 2020"),
    ],
)
def test_show_says_whether_a_grant_is_in_force(facts, state, door, run) -> None:
    grant = {"id": "g7", "verdict": "allow", "rule": "now", "origin": "operator", "revoked_at": None, **facts}
    door.answers["Show"] = {"id": "a1", "grants": [grant]}
    assert state in run("show", "a1").stdout


def test_show_says_what_a_program_asks_otherwise(door, run) -> None:
    differs = [{"at": "/messages/0/content", "recorded": "It is Monday", "made": "It is \x1b[2JTuesday"}]
    stray = {"step": 9, "action": "llm.complete", "recorded_step": 4, "recorded_action": "llm.complete"}
    other = {**stray, "step": None, "action": "fs.write", "differences": [], "more": 0, "left": 1}
    door.answers["Show"] = {
        "id": "a1",
        "strays": [{**stray, "differences": differs, "more": 2, "left": 3}, other],
    }
    out = run("show", "a1").stdout
    for words in (
        "step 9 is not on record, while 3 recorded calls had not been asked for again;",
        "it differs from step 4 here",
        "at /messages/0/content\n    - It is Monday\n    + It is ",
        "… 2 more",
        "a call of fs.write is not on record",
        "the first of them is step 4, llm.complete",
    ):
        assert words in out, words
    assert "\x1b" not in out


def test_show_and_status_name_what_is_unavailable(door, run) -> None:
    missing = [
        {
            "name": "crm",
            "reason": "secret `crm-dsn` is not set; the operator sets it: ringfence secrets set crm-dsn",
        }
    ]
    door.answers["Show"] = {"id": "a1", "unavailable": missing}
    assert "unavailable  crm: secret `crm-dsn` is not set" in run("show", "a1").stdout
    door.answers["Status"] = {"database": {"state": "ok"}, "config": {"unavailable": missing}}
    result = run("status")
    assert result.exit_code == 1
    assert "unavailable  crm: secret `crm-dsn` is not set" in result.stdout


def test_show_of_a_kernel_that_says_less(door, run) -> None:
    door.answers["Show"] = {"id": "a1", "state": "done"}
    result = run("show", "a1")
    assert result.exit_code == 0
    assert "checkpoint  none" in result.stdout


@pytest.mark.parametrize("command", ["pause", "resume", "start", "kill"])
def test_verbs(command, door, run) -> None:
    method = command.capitalize()
    door.answers[method] = {"id": "a1", "state": "paused", "process": "frozen"}
    assert run(command, "bot").stdout == "a1: paused\n"
    assert door.asked(method).agent == "bot"
    assert json.loads(run(command, "bot", "--json").stdout) == {
        "id": "a1",
        "state": "paused",
        "process": "frozen",
    }


def test_logs_in_a_pipe_are_the_bytes(door, run) -> None:
    door.answers["Logs"] = lambda _: [b"\x1b[2Jab\xff", b"\x00\n"]
    result = run("logs", "bot", "--stderr")
    assert result.stdout_bytes == b"\x1b[2Jab\xff\x00\n"
    assert (door.asked("Logs").stderr, door.asked("Logs").follow) == (True, False)


def test_logs_as_json(door, run) -> None:
    data = "é\n".encode()
    door.answers["Logs"] = lambda _: [data[:1], data[1:], b"\xff"]
    assert json.loads(run("logs", "bot", "--json").stdout) == [
        {"stream": "stdout", "text": "é\n"},
        {"stream": "stdout", "text": "�"},
    ]
    lines = run("logs", "bot", "--json", "-f").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["é\n", "�"]


def test_steps_as_json(door, run) -> None:
    door.answers["Steps"] = lambda _: [STEP, {**STEP, "step": 4}]
    assert json.loads(run("steps", "bot", "--json").stdout) == [STEP, {**STEP, "step": 4}]
    lines = run("steps", "bot", "-f", "--json").stdout.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 4]
    door.answers["Steps"] = lambda _: []
    assert run("steps", "bot", "--json").stdout == "[]\n"
    assert run("steps", "bot", "-f", "--json").stdout == ""


def test_steps_as_people_read_them(door, run) -> None:
    denied = {
        **STEP,
        "step": 5,
        "verdict": "deny",
        "outcome": "denied",
        "rollback_point": None,
        "error": "denied by r1\n",
        "branch": 2,
        "replayed": True,
    }
    running = {**STEP, "step": 6, "outcome": None, "duration_ms": None}
    asked = {**STEP, "step": 7, "attempts": 2, "used": {"tokens": 1800.0, "usd": 0.01}}
    carried = {**STEP, "step": 8, "used": {"bytes": 2048}}
    door.answers["Steps"] = lambda _: [STEP, denied, running, asked, carried]
    lines = run("steps", "bot").stdout.splitlines()
    assert lines[0].split() == ["STEP", "ACTION", "VERDICT", "OUTCOME", "TIME", "POINT", "RESOURCE"]
    assert lines[1].split() == ["3", "fs.write", "allow", "ok", "3.2ms", "p3", "/workspace/out/a.md"]
    assert lines[2].split()[2:4] == ["deny", "denied"]
    assert lines[2].endswith("/workspace/out/a.md (replayed, branch 2)")
    assert lines[3] == "       denied by r1\\n"
    assert lines[4].split()[3] == "running"
    assert lines[5].endswith("(2 attempts, 1800 tokens)")
    assert lines[6].endswith("(carried 2.0 KiB)")


@pytest.mark.parametrize(
    ("state", "process", "waits", "advice"),
    [
        ("unknown", "live", "the outcome of step 17", "ringfence resolve bot-1 17 --as done"),
        ("parked", "none", "approval a7", "ringfence approvals show a7"),
        ("parked", "none", "budget `tokens`", "ringfence budget bot-1 set NAME VALUE"),
        ("failed", "none", None, "ringfence logs bot-1 --stderr"),
        ("killed", "none", None, "ringfence start bot-1"),
        ("paused", "frozen", None, "ringfence resume bot-1"),
        ("paused", "none", None, "ringfence start bot-1"),
        ("running", "live", None, ""),
        ("done", "none", None, ""),
    ],
)
def test_show_says_what_to_do_next(state, process, waits, advice, door, run) -> None:
    door.answers["Show"] = {"id": "bot-1", "state": state, "process": process, "waiting_for": waits}
    done = run("show", "bot-1")
    assert advice in done.stderr
    assert bool(done.stderr) == bool(advice)
    assert run("show", "bot-1", "--json").stderr == ""


def test_a_program_that_failed_shows_its_next_start_and_its_last_error(door, run) -> None:
    waits = "a restart until 2026-11-30T08:00:04Z (3rd of 5; last error: exit status 3: no \x1b[2Jluck)"
    retry = {"number": 3, "max": 5, "at": "2026-11-30T08:00:04.000000Z", "error": "exit status 3"}
    agent = {**AGENT, "state": "pending", "process": "none", "waiting_for": waits, "restart": retry}
    door.answers["List"] = {"agents": [agent]}
    door.answers["Show"] = {**agent, "ended_at": "2026-11-30T08:00:00.123456Z"}
    listed, shown = run("ps").stdout, run("show", "bot-1").stdout
    for text in (listed, shown):
        assert "a restart until 2026-11-30T08:00:04Z (3rd of 5; last error: exit status 3" in text
        assert "\x1b" not in text
    assert "2026-11-30T08:00:00Z" in shown
    assert json.loads(run("ps", "--json").stdout)[0]["restart"] == retry
