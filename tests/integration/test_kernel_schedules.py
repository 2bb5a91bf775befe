"""Schedules on a real kernel: each fire is a run of its own, and who may stop, skip and begin one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from support.kernels import Refused, eventually
from support.scenes import Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

FILES = ['fs.*: "/workspace/**"']
NIGHTLY = 'schedule: {cron: "30 2 * * *", timezone: Europe/Berlin}'
EACH_SECOND = "schedule: {every: 1s}"
COUNTING = """
import json
from ringfence import agent
with agent.boot() as rf:
    rf.fs.append_text("runs", rf.identity.thread + "\\n")
    restored = rf.checkpoint.restored
    rf.checkpoint.save({"seen": True})
    print(json.dumps([rf.identity.thread, rf.identity.branch, restored]))
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def listed(scene: Scene, agent: str) -> dict[str, Any]:
    rows = scene.operator.ask("ScheduleList")["schedules"]
    return next(row for row in rows if row["agent"] == agent)


def audit(scene: Scene, agent: str, action: str) -> list[dict[str, Any]]:
    rows = scene.operator.stream("Audit", agent=agent)
    return [json.loads(row["body"]) for row in rows if row["action"] == action]


def run_once(scene: Scene, agent: str, outcome: str = "done") -> dict[str, Any]:
    before = listed(scene, agent)["runs"]
    scene.operator.ask("ScheduleRun", agent=agent)
    eventually(
        lambda: (row := listed(scene, agent))["runs"] == before + 1 and row["last_outcome"] == outcome,
        f"{agent} did not run: {listed(scene, agent)} {scene.output(agent, stderr=True)[-1500:]}",
    )
    return listed(scene, agent)


def test_a_scheduled_agent_sleeps_until_its_time(scene: Scene) -> None:
    agent = scene.submit(COUNTING, allow=FILES, more=NIGHTLY)
    shown = scene.show(agent)
    fire = datetime.fromisoformat(shown["schedule"]["next_at"])
    assert (shown["state"], shown["process"], shown["steps"]) == ("sleeping", "none", 0)
    assert shown["waiting_for"] == f"schedule {fire.strftime('%Y-%m-%dT%H:%M:%SZ')}"
    assert fire > datetime.now(UTC)
    assert (fire.hour, fire.minute) in ((0, 30), (1, 30))
    row = listed(scene, agent)
    assert row == {
        "agent": agent,
        "name": shown["name"],
        "state": "sleeping",
        "cron": "30 2 * * *",
        "every_ms": None,
        "timezone": "Europe/Berlin",
        "paused": False,
        "next_at": shown["schedule"]["next_at"],
        "starts_at": shown["schedule"]["next_at"],
        "missed": "once",
        "overlap": "skip",
        "jitter_ms": 0,
        "queued": [],
        "runs": 0,
        "last_at": None,
        "last_outcome": None,
        "last_error": None,
    }


def test_each_run_is_a_thread_of_its_own_on_the_same_workspace(scene: Scene) -> None:
    agent = scene.submit(COUNTING, allow=FILES, more=f"{NIGHTLY}\nbudgets: {{total: {{calls: 2}}}}")
    upcoming = listed(scene, agent)["next_at"]
    for number in (1, 2, 3):
        row = run_once(scene, agent)
        assert (row["runs"], row["next_at"], row["state"]) == (number, upcoming, "sleeping")
    said = scene.said(agent)
    threads = [thread for thread, _, _ in said]
    assert len(set(threads)) == 3
    assert [(branch, restored) for _, branch, restored in said] == [(1, None), (2, None), (3, None)]
    # What the last run left is there, and two calls a run are enough for each of them.
    assert (scene.live(agent) / "runs").read_text().split() == threads
    steps = scene.operator.steps(agent)
    assert [(s["step"], s["branch"], s["lane_step"], s["action"]) for s in steps] == [
        (1, 1, 0, "fs.append"),
        (2, 1, 1, "checkpoint.save"),
        (3, 2, 0, "fs.append"),
        (4, 2, 1, "checkpoint.save"),
        (5, 3, 0, "fs.append"),
        (6, 3, 1, "checkpoint.save"),
    ]
    assert {s["outcome"] for s in steps} == {"ok"}
    assert scene.show(agent)["thread"] == threads[-1]
    assert [body["asked_by"] for body in audit(scene, agent, "schedule.run")] == ["operator"] * 3


def test_an_interval_fires_again_and_again(scene: Scene) -> None:
    agent = scene.submit(COUNTING, allow=FILES, more=EACH_SECOND)
    eventually(lambda: listed(scene, agent)["runs"] >= 3, "it does not run")
    scene.operator.ask("SchedulePause", agent=agent)
    eventually(lambda: listed(scene, agent)["last_outcome"] == "done", "the last run does not end")
    row = listed(scene, agent)
    assert len((scene.live(agent) / "runs").read_text().split()) == row["runs"]
    fires = [body["fire"] for body in audit(scene, agent, "schedule.run")]
    assert fires == sorted(set(fires))
    assert (row["paused"], row["next_at"], row["every_ms"], row["timezone"]) == (True, None, 1000, None)
    assert scene.show(agent)["waiting_for"] == "schedule, which is paused"
    # A paused one can be run by hand, and stays paused.
    assert run_once(scene, agent)["paused"]
    resumed = scene.operator.ask("ScheduleResume", agent=agent)
    assert not resumed["paused"]
    eventually(lambda: listed(scene, agent)["runs"] > row["runs"] + 1, "it does not fire again")
    scene.operator.ask("Kill", agent=agent)


def test_a_fire_while_a_run_is_under_way_is_skipped_and_told(scene: Scene) -> None:
    text = "import time\nprint('started', flush=True)\nwhile True:\n    time.sleep(60)\n"
    agent = scene.submit(text, more=EACH_SECOND)
    eventually(lambda: len(audit(scene, agent, "schedule.skip")) >= 2, "no fire was skipped")
    row = listed(scene, agent)
    assert (row["runs"], row["last_outcome"], row["state"]) == (1, "running", "running")
    assert {body["because"] for body in audit(scene, agent, "schedule.skip")} == {"the agent is running"}
    with pytest.raises(Refused, match="is not over") as refused:
        scene.operator.ask("ScheduleRun", agent=agent)
    assert refused.value.exit_code == 5
    scene.operator.ask("Kill", agent=agent)
    assert (listed(scene, agent)["state"], listed(scene, agent)["last_outcome"]) == ("killed", "killed")


def test_a_run_that_is_not_over_is_ended_for_the_next_one(scene: Scene) -> None:
    text = """
import json, os, time
from ringfence import agent
with agent.boot() as rf:
    print(json.dumps(rf.identity.thread), flush=True)
    rf.fs.append_text("runs", rf.identity.thread + "\\n")
    time.sleep(1000)
"""
    agent = scene.submit(text, allow=FILES, more="schedule: {every: 2s, overlap: replace}")
    eventually(lambda: len(audit(scene, agent, "schedule.replace")) >= 2, "no run was replaced")
    scene.operator.ask("SchedulePause", agent=agent)
    row = listed(scene, agent)
    eventually(lambda: len(scene.said(agent)) == row["runs"], "the last run does not come to its program")
    # Each run is one of its own, and of them one is left.
    threads = scene.said(agent)
    assert len(set(threads)) == len(threads) == len(audit(scene, agent, "schedule.run"))
    shown = scene.show(agent)
    assert (shown["state"], shown["thread"], shown["restarts"]) == ("running", threads[-1], 0)
    assert (row["last_outcome"], row["overlap"]) == ("running", "replace")
    assert {body["was"] for body in audit(scene, agent, "schedule.replace")} <= {"running", "pending"}
    scene.operator.ask("Kill", agent=agent)
    assert scene.show(agent)["process"] == "none"


def test_a_failed_run_shows_its_error_and_the_next_one_comes(scene: Scene) -> None:
    text = "import sys\nprint('no luck', file=sys.stderr)\nsys.exit(3)\n"
    agent = scene.submit(text, more=f"{NIGHTLY}\nrestart: {{max: 1}}")
    row = run_once(scene, agent, "failed")
    assert "exit status 3: no luck; it was restarted 1 times" in row["last_error"]
    shown = scene.show(agent)
    assert (shown["state"], shown["error"], shown["exit_code"]) == ("sleeping", row["last_error"], 3)
    assert shown["waiting_for"].startswith("schedule 2")
    assert run_once(scene, agent, "failed")["runs"] == 2
    assert scene.show(agent)["restarts"] == 1


def test_killed_stays_killed_until_it_is_started_and_then_waits_again(scene: Scene) -> None:
    agent = scene.submit(COUNTING, allow=FILES, more=EACH_SECOND)
    scene.operator.ask("Kill", agent=agent)
    runs = listed(scene, agent)["runs"]
    other = scene.submit(COUNTING, allow=FILES, more=EACH_SECOND)
    eventually(lambda: listed(scene, other)["runs"] > 2, "the other one does not run")
    scene.operator.ask("Kill", agent=other)
    assert (scene.show(agent)["state"], listed(scene, agent)["runs"]) == ("killed", runs)
    for verb, hint in (("ScheduleRun", "ringfence start"), ("Resume", "ringfence start")):
        with pytest.raises(Refused, match=hint):
            scene.operator.ask(verb, agent=agent)
    assert scene.operator.ask("Start", agent=agent)["state"] in ("sleeping", "running", "pending")
    eventually(lambda: listed(scene, agent)["runs"] > runs, "it does not fire after its start")
    scene.operator.ask("Kill", agent=agent)


def test_pausing_the_agent_between_runs_and_what_start_says(scene: Scene) -> None:
    agent = scene.submit(COUNTING, allow=FILES, more=NIGHTLY)
    with pytest.raises(Refused, match="ringfence schedule run"):
        scene.operator.ask("Start", agent=agent)
    assert scene.operator.ask("Pause", agent=agent)["state"] == "paused"
    with pytest.raises(Refused, match="ringfence resume"):
        scene.operator.ask("ScheduleRun", agent=agent)
    assert scene.operator.ask("Resume", agent=agent) == {"id": agent, "state": "sleeping", "process": "none"}
    assert scene.show(agent)["waiting_for"].startswith("schedule 2")
    assert run_once(scene, agent)["runs"] == 1


def test_a_run_can_be_rolled_back_and_gone_on_with(scene: Scene) -> None:
    agent = scene.submit(COUNTING, allow=FILES, more=NIGHTLY)
    run_once(scene, agent)
    run_once(scene, agent)
    first, second = (scene.live(agent) / "runs").read_text().split()
    with pytest.raises(Refused, match="not on a branch of its present run"):
        scene.operator.ask("Rollback", agent=agent, to="1")
    scene.operator.ask("Rollback", agent=agent, to="p3")
    assert (scene.live(agent) / "runs").read_text().split() == [first]
    assert scene.show(agent)["state"] == "paused"
    scene.operator.ask("Start", agent=agent)
    # The agent is shown as asleep a moment before the end of its run is stored.
    eventually(lambda: listed(scene, agent)["last_outcome"] == "done", "the run does not end")
    # The same run, so the same thread; then the schedule goes on.
    assert (scene.live(agent) / "runs").read_text().split() == [first, second]
    assert (scene.show(agent)["state"], listed(scene, agent)["runs"]) == ("sleeping", 2)
    assert run_once(scene, agent)["runs"] == 3


def test_a_run_that_sleeps_holds_no_process_and_ends_by_itself(scene: Scene) -> None:
    text = "from ringfence import agent\nwith agent.boot() as rf:\n    rf.sleep(2)\n"
    agent = scene.submit(text, more=f"{NIGHTLY}\napprovals: {{linger: 100ms}}")
    scene.operator.ask("ScheduleRun", agent=agent)
    eventually(lambda: (scene.show(agent)["waiting_for"] or "").startswith("timer"), "it does not sleep")
    eventually(lambda: scene.show(agent)["process"] == "none", "its process stays")
    assert listed(scene, agent)["last_outcome"] == "running"
    eventually(lambda: listed(scene, agent)["last_outcome"] == "done", "the run does not end")
    assert scene.show(agent)["waiting_for"].startswith("schedule")


def test_waiting_for_a_scheduled_agent_is_waiting_for_a_run(scene: Scene) -> None:
    text = "import sys\nsys.exit(0)\n"
    agent = scene.submit(text, more="schedule: {every: 2s}")
    assert scene.operator.wait(agent)["state"] == "done"
    assert listed(scene, agent)["runs"] == 1
    scene.operator.ask("Kill", agent=agent)


def test_agents_without_a_schedule(scene: Scene) -> None:
    held = scene.hold()
    for verb in ("SchedulePause", "ScheduleResume", "ScheduleRun"):
        with pytest.raises(Refused, match="has no schedule") as refused:
            scene.operator.ask(verb, agent=held.id)
        assert refused.value.exit_code == 4
    assert scene.show(held.id)["schedule"] is None
