"""points, rollback, diff, resolve."""

from __future__ import annotations

import json

import pytest

POINT = {
    "id": "p3",
    "step": 3,
    "kind": "workspace",
    "covers": ["/workspace/a", "/workspace/b"],
    "size_bytes": 3482,
    "verified": True,
    "at": "2026-01-31T08:00:00Z",
}


def test_points(door, run) -> None:
    door.answers["Points"] = {"points": [POINT]}
    assert run("points", "bot").stdout.splitlines()[1].split() == [
        "p3",
        "3",
        "workspace",
        "3.4",
        "KiB",
        "yes",
        "2026-01-31T08:00:00",
        "/workspace/a,",
        "/workspace/b",
    ]
    assert json.loads(run("points", "bot", "--json").stdout) == [POINT]
    assert not any(request.verify for name, request in door.requests if name == "Points")


def test_points_verify_of_all(door, run) -> None:
    door.answers["List"] = {"agents": [{"id": "a1"}, {"id": "a2"}]}
    door.answers["Points"] = lambda request: {"points": [{**POINT, "verified": request.agent == "a1"}]}
    result = run("points", "verify", "--json")
    assert result.exit_code == 1
    assert [(p["agent"], p["verified"]) for p in json.loads(result.stdout)] == [("a1", True), ("a2", False)]
    assert "1 of 2 points can't be read back: a2/p3" in result.stderr
    assert door.asked("List").all
    assert all(request.verify for name, request in door.requests if name == "Points")


@pytest.mark.parametrize(
    ("words", "keep", "older"),
    [
        ((), None, None),
        (("--keep", "0"), 0, None),
        (("--keep", "20"), 20, None),
        (("--older-than", "7d"), None, 604_800_000),
    ],
)
def test_points_prune(door, run, words, keep, older) -> None:
    document = {"agent": "a1", "pruned": ["p1", "p2"], "kept": 3, "before_step": 3, "freed_bytes": 2048}
    door.answers["PrunePoints"] = document
    result = run("points", "prune", "bot", *words)
    assert (result.exit_code, result.stdout) == (0, "pruned 2 points, 2.0 KiB freed; 3 stay\n")
    asked = door.asked("PrunePoints")
    assert asked.agent == "bot"
    assert (asked.keep if asked.HasField("keep") else None) == keep
    assert (asked.older_than_ms if asked.HasField("older_than_ms") else None) == older
    assert json.loads(run("points", "prune", "bot", "--json").stdout) == document


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("prune",), "`points` takes one agent"),
        (("prune", "a", "b"), "`points` takes one agent"),
        (("bot", "--keep", "3"), "go with `ringfence points prune AGENT`"),
        (("prune", "bot", "--older-than", "soon"), "`soon` is not a duration"),
        (("prune", "bot", "--keep", "-1"), "-1"),
    ],
)
def test_points_prune_refuses(door, run, words, said) -> None:
    result = run("points", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not door.requests


def test_points_verify_of_one(door, run) -> None:
    door.answers["Points"] = {"points": [POINT]}
    assert run("points", "verify", "a1").exit_code == 0
    assert run("points", "a", "b").exit_code == 2
    assert run("points").exit_code == 2


DONE = {
    "preview": False,
    "to_step": 3,
    "changes": [
        {"kind": "file", "target": "/workspace/a\x1b", "action": "restore", "detail": ""},
        {"kind": "state", "target": "k", "action": "remove", "detail": "version 2"},
    ],
    "conflicts": [],
    "not_undoable": [{"step": 5, "action": "http.post", "resource": "https://pay/x", "effect": "EXTERNAL"}],
    "others": [],
    "point": "p9",
    "branch": 1,
    "state": "paused",
}


def test_rollback_without_a_terminal_goes_ahead(door, run) -> None:
    door.answers["Rollback"] = DONE
    result = run("rollback", "bot", "--to", "p3", "--path", "data", "--start")
    assert result.exit_code == 0
    request = door.asked("Rollback")
    assert (request.agent, request.to, request.path, request.start, request.preview) == (
        "bot",
        "p3",
        "data",
        True,
        False,
    )
    out = result.stdout
    assert "went back to step 3: 2 changes" in out
    assert "restore  file  /workspace/a\\x1b\n" in out
    assert "remove   state  k  (version 2)" in out
    assert "can't be undone:\n  step 5  action http.post  resource https://pay/x  effect EXTERNAL" in out
    assert "point from just before  p9" in out


def test_preview_does_nothing(door, run) -> None:
    door.answers["Rollback"] = {
        **DONE,
        "preview": True,
        "conflicts": [{"kind": "file", "target": "/workspace/u"}],
    }
    result = run("rollback", "bot", "--to", "3", "--preview", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["preview"] is True
    assert door.asked("Rollback").preview is True


def test_conflicts_left_alone_are_exit_5(door, run) -> None:
    door.answers["Rollback"] = {
        **DONE,
        "conflicts": [{"kind": "file", "target": "/workspace/u", "reason": "changed since by others"}],
    }
    result = run("rollback", "bot", "--to", "3")
    assert result.exit_code == 5
    assert (
        "left alone, because others changed it since or it could not be taken back:\n  file  /workspace/u: changed since by others"
        in result.stdout
    )
    assert result.stderr.startswith("ringfence: 1 change of others left as found")
    report = run("rollback", "bot", "--to", "3", "--json")
    assert report.exit_code == 5
    assert json.loads(report.stdout)["conflicts"]


def test_diff(door, run) -> None:
    change = {
        "path": "/workspace/a",
        "kind": "modified",
        "before": "x",
        "after": "y",
        "diff": "--- before\n+++ after\n@@ -1 +1 @@\n-a\n+b\x1b[2J\n",
    }
    door.answers["Diff"] = {"changes": [change]}
    out = run("diff", "bot", "--from", "p1", "--to", "p3").stdout
    assert out.splitlines()[0] == "modified  /workspace/a"
    assert "    +b\\x1b[2J" in out
    request = door.asked("Diff")
    assert (getattr(request, "from"), request.to) == ("p1", "p3")
    assert json.loads(run("diff", "bot", "--json").stdout) == {"changes": [change]}


def test_a_diff_says_where_a_last_line_has_no_end(door, run) -> None:
    text = "--- before\n+++ after\n@@ -1 +1 @@\n-a\x0bb\n\\ No newline at end of file\n+c\n"
    door.answers["Diff"] = {"changes": [{"path": "/workspace/a", "kind": "modified", "diff": text}]}
    assert run("diff", "bot").stdout.splitlines()[-3:] == [
        "    -a\\x0bb",
        "    \\ No newline at end of file",
        "    +c",
    ]


def test_diff_of_nothing(door, run) -> None:
    door.answers["Diff"] = {"changes": []}
    assert run("diff", "bot").stdout == ""


def test_resolve(door, run) -> None:
    door.answers["Resolve"] = {"step": 17, "outcome": "ok", "state": "running"}
    assert run("resolve", "bot", 17, "--as", "done", "--result", '{"status": 200}').stdout == "step 17: ok\n"
    request = door.asked("Resolve")
    assert (request.step, request.outcome, request.result) == (17, "done", '{"status": 200}')


@pytest.mark.parametrize(
    "words", [("--as", "done", "--result", "{"), ("--as", "not-done", "--result", "{}"), ()]
)
def test_resolve_that_makes_no_sense(words, door, run) -> None:
    assert run("resolve", "bot", 17, *words).exit_code == 2
    assert door.requests == []


def test_agents_elsewhere_are_named_beside_conflicts(door, run) -> None:
    one = {**DONE, "agent": "bot", "conflicts": [{"kind": "state", "target": "k"}]}
    skipped = [{"agent": "far", "reason": "another kernel runs it"}]
    door.answers["RollbackAll"] = {"agents": [one], "skipped": skipped}
    result = run("rollback", "--all", "--to", "2026-01-31T08:00:00Z")
    assert result.exit_code == 5
    assert "1 change of others left as found" in result.stderr
    assert "far: another kernel runs it" in result.stderr


def test_a_point_of_many_paths_takes_a_line(door, run) -> None:
    paths = [f"/workspace/{number}" for number in range(100)]
    door.answers["Points"] = {"points": [{"id": "p1", "step": 1, "kind": "workspace", "covers": paths}]}
    result = run("points", "bot")
    assert "/workspace/11 and 88 more" in " ".join(result.stdout.split())
    assert json.loads(run("points", "bot", "--json").stdout)[0]["covers"] == paths
