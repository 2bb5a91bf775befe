"""grant, revoke and policy: what is asked, and the exit codes that scripts branch on."""

from __future__ import annotations

import json

import pytest

RULE = 'fs.write: "/workspace/out/**"'
MANIFEST = """apiVersion: ringfence/v1
kind: Agent
metadata: {name: bot}
spec:
  run: {command: [python, agent.py]}
  permissions:
    allow:
      - fs.read: "/workspace/**"
"""
KERNEL = """apiVersion: ringfence/v1
kind: Kernel
spec:
  ceilings:
    deny: [{fs.*: "**/.env"}]
"""


def test_grant_prints_the_id(door, run) -> None:
    door.answers["Grant"] = {
        "id": "g7",
        "rule": RULE,
        "verdict": "allow",
        "expires_at": None,
        "uses_left": 3,
        "epoch": 2,
    }
    result = run("grant", "bot", RULE, "--expires", "1h30m", "--uses", "3")
    assert (result.exit_code, result.stdout) == (0, "g7\n")
    request = door.asked("Grant")
    assert (request.agent, request.rule, request.expires_ms, request.uses) == ("bot", RULE, 5_400_000, 3)
    assert json.loads(run("grant", "bot", RULE, "--json").stdout)["epoch"] == 2
    assert not request.deny
    assert run("grant", "bot", "fs.*: /workspace/.env", "--deny").exit_code == 0
    assert door.requests[-1][1].deny


@pytest.mark.parametrize(
    "words",
    [
        (RULE, "--expires", "soon"),
        (RULE, "--expires", "0s"),
        ("fs.fly: /a",),
        ("nonsense",),
        (RULE, "--deny", "--uses", "2"),
    ],
)
def test_grants_that_make_no_sense(words, door, run) -> None:
    result = run("grant", "bot", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("ringfence: ")
    assert door.requests == []


REVOKED = {
    "epoch": 4,
    "revoked": [{"id": "g7", "rule": RULE}],
    "affected": [{"step": 9, "action": "fs.write", "resource": "/workspace/out/a", "fate": "cancelled"}],
    "elapsed_ms": 1.5,
}


def test_revoke_says_what_became_of_calls_in_flight(door, run) -> None:
    door.answers["Revoke"] = REVOKED
    out = run("revoke", "bot", "g7", "--purge").stdout
    assert f"revoked g7  {RULE}" in out
    assert "9  fs.write  cancelled  /workspace/out/a" in out
    assert "in force after 1.5ms: no later call can use it (epoch 4)" in out
    request = door.asked("Revoke")
    assert (request.rule_or_grant, request.all, request.purge) == ("g7", False, True)
    assert json.loads(run("revoke", "bot", "--all", "--json").stdout) == REVOKED


@pytest.mark.parametrize("words", [(), ("g7", "--all")])
def test_revoke_wants_one_thing(words, door, run) -> None:
    assert run("revoke", "bot", *words).exit_code == 2
    assert door.requests == []


@pytest.mark.parametrize(("verdict", "exit_code"), [("allow", 0), ("deny", 3), ("ask", 5), ("odd", 3)])
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_can_i(verdict, exit_code, flags, door, run) -> None:
    door.answers["PolicyCanI"] = {"verdict": verdict, "rule": "r1", "reason": "because r1"}
    result = run("policy", "can-i", "bot", "fs.read", "/workspace/a", *flags)
    assert result.exit_code == exit_code
    if flags:
        assert json.loads(result.stdout) == {"verdict": verdict, "rule": "r1", "reason": "because r1"}
    else:
        assert result.stdout == f"{verdict}: because r1\n"
    assert door.asked("PolicyCanI").resource == "/workspace/a"


def test_policy_show(door, run) -> None:
    door.answers["PolicyShow"] = {
        "rules": [{"id": "g1", "verdict": "allow", "text": RULE, "origin": "manifest"}],
        "ceilings": [{"id": "c1", "verdict": "deny", "text": "fs.*: /x"}],
    }
    out = run("policy", "show", "bot").stdout
    assert RULE in out
    assert "ceilings" in out
    assert "c1" in out


def test_policy_explain(door, run) -> None:
    door.answers["PolicyExplain"] = {
        "step": 17,
        "action": "fs.read",
        "resource": "/workspace/.env",
        "verdict": "deny",
        "rules": [{"id": "r2", "text": 'fs.*: "/workspace/.env"', "origin": "manifest"}],
        "grants": ["g1"],
        "epoch": 3,
        "policy_version": "v1",
        "reason": "denied by r2",
    }
    out = run("policy", "explain", "bot", "17").stdout
    assert "reason    denied by r2" in out
    assert "grants    g1" in out
    assert "r2    " in out
    assert door.asked("PolicyExplain").step == 17


@pytest.mark.parametrize(
    ("text", "kind"),
    [(MANIFEST, "Agent"), (KERNEL, "Kernel"), (KERNEL.replace("kind: Kernel", "kind: 'Kernel'"), "Kernel")],
)
def test_lint_needs_no_kernel(text, kind, run, tmp_path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    assert run("policy", "lint", file, "--data", tmp_path / "none").stdout == f"{file}: ok\n"
    assert json.loads(run("policy", "lint", file, "--json").stdout) == {
        "file": str(file),
        "kind": kind,
        "ok": True,
        "problems": [],
        "warnings": [],
    }


def test_lint_reads_standard_input(run) -> None:
    result = run("policy", "lint", "-", stdin=MANIFEST)
    assert (result.exit_code, result.stdout) == (0, "manifest: ok\n")


def test_lint_names_line_and_column(run, tmp_path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(MANIFEST.replace("fs.read", "fs.fly") + "  colour: red\n")
    result = run("policy", "lint", file)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"ringfence: {file}:8:9: ")
    assert lines[1].startswith(f"ringfence: {file}:9:3: ")
    report = run("policy", "lint", file, "--json")
    assert report.exit_code == 2
    assert report.stderr == ""
    problems = json.loads(report.stdout)["problems"]
    assert [(p["line"], p["column"]) for p in problems] == [(8, 9), (9, 3)]


def test_lint_says_what_this_release_can_not_enforce(run, tmp_path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(MANIFEST + "  serve: {port: 80}\n")
    result = run("policy", "lint", file)
    assert result.exit_code == 2
    assert ":9:" in result.stderr


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"a" * 300_000])
def test_lint_of_what_is_no_manifest(content, run, tmp_path) -> None:
    file = tmp_path / "agent.yaml"
    if content is not None:
        file.write_bytes(content)
    result = run("policy", "lint", file)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"`{file}`" in result.stderr


def test_explain_says_what_was_known(door, run) -> None:
    door.answers["PolicyExplain"] = {
        "step": 9,
        "action": "http.post",
        "verdict": "ask",
        "rules": [{"id": "w1", "text": "{action: http.post}", "origin": "manifest", "line": 12}],
        "because": ["w1: the thread is tainted by the resource `web` at step 4"],
        "facts": {
            "tainted": {"step": 4, "by": "the resource `web`"},
            "taints": None,
            "provenance": [
                {"argument": "/json/to", "text": "p\u0430y", "step": 4, "action": "http.get", "resource": "x", "untrusted": True}
            ],
        },
    }  # fmt: skip
    out = run("policy", "explain", "bot", "9").stdout
    assert "w1: the thread is tainted by the resource `web` at step 4" in out
    assert "by the resource `web`, at step 4" in out
    assert "manifest, line 12" in out
    assert "from step 4" in out
    # What passes for another letter is shown as what it is.
    assert "/json/to `p\\u0430y` stands in http.get of x, untrusted" in out


def test_lint_warns_and_is_strict_when_asked(run, tmp_path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(MANIFEST.replace("fs.read:", "fs.read: /workspace/a\n      - fs.read:"))
    plain = run("policy", "lint", file)
    assert plain.exit_code == 0
    assert ": warning: the rule `" in plain.stdout
    assert run("policy", "lint", file, "--strict").exit_code == 1
    report = json.loads(run("policy", "lint", file, "--json").stdout)
    assert (report["ok"], len(report["warnings"])) == (True, 1)
    against = run("policy", "lint", file, "--against", tmp_path / "none.yaml")
    assert against.exit_code == 2


def test_import_and_schema_need_no_kernel(run, tmp_path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"permissions": {"allow": ["Bash(git diff *)", "WebSearch"], "deny": ["Read(.env)"]}}')
    result = run("policy", "import", file, "--name", "helper")
    manifest = tmp_path / "agent.yaml"
    manifest.write_text(result.stdout)
    assert run("policy", "lint", manifest).exit_code == 0
    assert 'exec.run: "git diff *"  # Bash(git diff *)' in result.stdout
    assert "#   allow WebSearch: " in result.stdout
    report = json.loads(run("policy", "import", file, "--json").stdout)
    assert (report["allow"], report["deny"]) == (['exec.run: "git diff *"'], ['fs.read: "**/.env/**"'])
    assert [note["entry"] for note in report["notes"]] == ["WebSearch"]
    file.write_text('{"permissions": {"allow": ["Bash(x"]}}')
    assert run("policy", "import", file).exit_code == 2
    assert json.loads(run("policy", "schema", "kernel").stdout)["title"] == "Ringfence Kernel"
