from __future__ import annotations

import json

import pytest

ROW = {
    "agent": "nightly-abcde",
    "name": "nightly",
    "state": "sleeping",
    "cron": "30 2 * * *",
    "every_ms": None,
    "timezone": "Europe/Berlin",
    "paused": False,
    "next_at": "2026-11-30T01:30:00.000000Z",
    "runs": 2,
    "last_at": "2026-11-29T01:30:00.004000Z",
    "last_outcome": "failed",
    "last_error": "exit status 1",
}
OFTEN = ROW | {
    "agent": "often-bcdef",
    "cron": None,
    "every_ms": 900_000,
    "timezone": None,
    "paused": True,
    "next_at": None,
    "runs": 0,
    "last_at": None,
    "last_outcome": None,
}


def test_ls_shows_when_a_run_begins_with_its_jitter_and_how_many_wait(door, run) -> None:
    busy = ROW | {
        "starts_at": "2026-11-30T01:37:10.000000Z",
        "last_outcome": "running",
        "queued": ["2026-11-29T01:30:00.000000Z"],
    }
    door.answers["ScheduleList"] = {"schedules": [busy]}
    result = run("schedule", "ls")
    assert "2026-11-30 01:37:10Z" in result.stdout
    assert "running, 1 queued" in result.stdout


def test_ls_shows_when_next_and_how_the_last_run_ended(door, run) -> None:
    door.answers["ScheduleList"] = {"schedules": [ROW, OFTEN]}
    result = run("schedule", "ls")
    assert result.exit_code == 0
    heading, nightly, often = [line.split("  ") for line in result.stdout.splitlines()]
    assert [word.strip() for word in heading if word.strip()] == [
        "AGENT",
        "WHEN",
        "NEXT",
        "RUNS",
        "LAST",
        "OUTCOME",
    ]
    assert [word.strip() for word in nightly if word.strip()] == [
        "nightly-abcde",
        "30 2 * * * Europe/Berlin",
        "2026-11-30 01:30:00Z",
        "2",
        "2026-11-29 01:30:00Z",
        "failed",
    ]
    assert [word.strip() for word in often if word.strip()] == [
        "often-bcdef",
        "every 15m",
        "paused",
        "0",
        "-",
        "-",
    ]
    assert json.loads(run("schedule", "ls", "--json").stdout) == [ROW, OFTEN]


def test_no_schedules(door, run) -> None:
    door.answers["ScheduleList"] = {"schedules": []}
    result = run("schedule", "ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "every: 15m" in result.stderr
    assert json.loads(run("schedule", "ls", "--json").stdout) == []


@pytest.mark.parametrize(
    ("verb", "method", "answer", "said"),
    [
        ("pause", "SchedulePause", OFTEN, "often-bcdef: sleeping, paused"),
        ("resume", "ScheduleResume", ROW, "nightly-abcde: sleeping, next 2026-11-30 01:30:00Z"),
        (
            "run",
            "ScheduleRun",
            ROW | {"state": "running", "next_at": None},
            "nightly-abcde: running, no next time",
        ),
    ],
)
def test_pause_resume_and_run(door, run, verb, method, answer, said) -> None:
    door.answers[method] = answer
    result = run("schedule", verb, "nightly")
    assert (result.exit_code, result.stdout) == (0, f"{said}\n")
    assert door.asked(method).agent == "nightly"
    assert json.loads(run("schedule", verb, "nightly", "--json").stdout) == answer


def test_what_the_kernel_refuses(door, run, refusal) -> None:
    door.answers["ScheduleRun"] = lambda _: refusal("a run of `a` is not over", 5)
    result = run("schedule", "run", "a")
    assert result.exit_code == 5
    assert result.stderr == "ringfence: a run of `a` is not over\n"


def test_submit_wait_says_what_it_waits_for(door, run, tmp_path) -> None:
    manifest = tmp_path / "agent.yaml"
    manifest.write_text(
        "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: nightly}\nspec:\n  run: {command: [python, agent.py]}\n"
        '  schedule: {cron: "30 2 * * *", timezone: Europe/Berlin}\n'
    )
    waits = {
        "id": "nightly-abcde",
        "name": "nightly",
        "state": "sleeping",
        "waiting_for": "schedule 2026-11-30T01:30:00Z",
    }
    door.answers["Submit"] = waits
    door.answers["Wait"] = {"id": "nightly-abcde", "state": "done", "exit_code": 0, "error": None}
    result = run("submit", manifest, "--wait")
    assert (result.exit_code, result.stdout) == (0, "nightly-abcde\n")
    assert "nightly: waits for schedule 2026-11-30T01:30:00Z\n" in result.stderr
