"""Forks on a real kernel: the past is inherited, the first is untouched, and nothing that left the system is sent again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import Denied
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, console, scene_of_its_own
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    bank: {{type: http, base: "{base}"}}
"""

PROGRAM = """
import json
from ringfence import agent

with agent.boot() as rf:
    seen = rf.checkpoint.restored or {"at": "the start"}
    rf.fs.write_text("one.txt", "one")
    first = rf.http.post("%(base)s/pay/first", json={"amount": 1}).text
    rf.fs.write_text("two.txt", "two")
    rf.fs.delete("old.txt")
    second = rf.http.post("%(base)s/pay/second", json={"amount": 2}).text
    rf.state.put("fork/key", rf.random())
    print(json.dumps([first, second, rf.fs.read_text("one.txt"), rf.random()]))
"""


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("bank") / "sent")
    yield target
    target.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, bank: Target) -> Iterator[Scene]:
    config = CONFIG.format(base=bank.base)
    with scene_of_its_own(postgres_server, template_database, config=config) as scene:
        yield scene


def allow(bank: Target) -> list[str]:
    return ['fs.*: "/workspace/**"', f'http.*: "{bank.base}/**"', 'state.*: "**"']


def picture(root: Path) -> dict[str, Any]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def step_of(scene: Scene, agent: str, action: str, nr: int = 0) -> int:
    return [s["step"] for s in scene.operator.steps(agent) if s["action"] == action][nr]


def held_fork(scene: Scene, agent: str) -> Held:
    eventually(lambda: "\n" in scene.output(agent), f"{agent} gave no token")
    return Held(scene, agent, scene.token_of(agent), scene.socket_of(agent))


def test_a_fork_goes_on_from_its_step_and_repeats_no_payment(scene: Scene, bank: Target) -> None:
    program = PROGRAM % {"base": bank.base}
    first = scene.run(program, allow=allow(bank), files={"old.txt": "old"})
    before, steps = picture(scene.live(first)), scene.operator.steps(first)
    records = scene.operator.stream("Audit", agent=first)
    at = step_of(scene, first, "http.post")
    fork = scene.operator.ask("Fork", agent=first, at=str(at), name="second", start=False)
    assert (fork["state"], fork["at_step"], fork["conflicts"]) == ("paused", at, [])
    assert fork["shared"] == [
        {"step": s["step"], "action": s["action"], "resource": s["resource"], "effect": s["effect"]}
        for s in reversed(steps)
        if s["step"] > at and s["action"] in ("http.post", "state.put")
    ]
    # The copy stands at the step, the original where it was.
    assert picture(scene.live(fork["id"])) == {
        "agent.py": program.encode(),
        "old.txt": b"old",
        "one.txt": b"one",
    }
    assert picture(scene.live(first)) == before
    assert (scene.operator.steps(first), scene.operator.stream("Audit", agent=first)) == (steps, records)
    past = scene.operator.steps(fork["id"])
    assert [s["step"] for s in past] == list(range(1, at + 1))
    assert [s["inherited"] for s in past] == [f"{first}/{s['step']}" for s in past]
    assert scene.show(fork["id"])["thread"] == scene.show(first)["thread"]
    sent = len(bank.deliveries("/pay/first")), len(bank.deliveries("/pay/second"))
    assert sent == (1, 1)
    scene.operator.ask("Start", agent=fork["id"])
    scene.await_end(fork["id"])
    # The first payment was before the step and is replayed, the second came after it and is recognised.
    assert (len(bank.deliveries("/pay/first")), len(bank.deliveries("/pay/second"))) == sent
    (said,), (said_first,) = scene.said(fork["id"]), scene.said(first)
    assert said[:3] == said_first[:3]
    assert said[3] != said_first[3]  # what came after the step is its own
    again = scene.operator.steps(fork["id"])
    assert again[: len(past)] == past
    recognised = [s["recognised"] for s in again if s["action"] == "http.post"]
    assert recognised == [None, step_of(scene, first, "http.post", 1)]
    assert picture(scene.live(fork["id"])) == before
    assert scene.operator.ask("AuditVerify")["ok"]
    (event,) = [r for r in scene.operator.stream("Audit", agent=fork["id"]) if r["action"] == "agent.fork"]
    assert f'"source": "{first}"' in event["body"]
    assert records[-1]["hash"] in event["body"]


def test_rights_do_not_come_back_in_a_fork(scene: Scene, bank: Target) -> None:
    held = scene.hold(allow=[*allow(bank), 'exec.run: "*"'], more="budgets: {total: {calls: 100}}")
    held.rf.fs.write_text("a", "1")
    held.rf.fs.write_text("a", "2")
    held.rf.fs.write_text("a", "3")
    granted = held.operator.ask("Grant", agent=held.id, rule='fs.read: "/workspace/a"', uses=5)
    held.operator.ask("Revoke", agent=held.id, rule_or_grant='fs.*: "/workspace/**"')
    used = {b["name"]: b["used"] for b in scene.show(held.id)["budgets"]}
    fork = held.operator.ask("Fork", agent=held.id, at="1", start=True)
    assert fork["state"] == "running"
    other = held_fork(scene, fork["id"])
    assert {b["name"]: b["used"] for b in scene.show(fork["id"])["budgets"]} == used
    rules = {g["rule"] for g in scene.show(fork["id"])["grants"]}
    assert rules == {f'http.*: "{bank.base}/**"', 'state.*: "**"', 'exec.run: "*"', granted["rule"]}
    other.rf.fs.write_text("a", "1")  # replayed: it is of the past that the fork has
    other.refused(Denied, lambda: other.rf.fs.write_text("a", "4"))
    assert (scene.live(fork["id"]) / "a").read_text() == "1"
    assert (held.live / "a").read_text() == "3"
    assert held.rf.state.get("nothing") is None  # it goes on, and noticed nothing
    other.end()


def test_a_fork_can_be_rolled_back_beyond_its_beginning(scene: Scene, bank: Target) -> None:
    held = scene.hold(allow=allow(bank), files={"a": "0"})
    held.rf.fs.write_text("a", "1")
    held.rf.state.put("fork/back", "first")
    held.rf.fs.write_text("a", "2")
    held.rf.fs.write_text("a", "3")
    fork = held.operator.ask("Fork", agent=held.id, at="3")["id"]
    assert (scene.live(fork) / "a").read_text() == "2"
    facts = (scene.live(fork) / "a").stat()
    assert facts.st_uid == (scene.live(fork) / ".").stat().st_uid
    done = held.operator.ask("Rollback", agent=fork, to="0")
    assert done["conflicts"] == []
    assert (scene.live(fork) / "a").read_text() == "0"
    assert (scene.live(fork) / "a").stat().st_uid == facts.st_uid
    # The key is the first one's, who alone can undo it.
    assert [(r["step"], r["action"]) for r in done["not_undoable"]] == [(2, "state.put")]
    assert held.rf.state.get("fork/back") == "first"
    assert (held.live / "a").read_text() == "3"
    assert all(p["verified"] for p in held.operator.ask("Points", agent=fork, verify=True)["points"])


def test_what_cannot_be_forked_is_refused_and_leaves_nothing(scene: Scene, bank: Target) -> None:
    held = scene.hold(allow=allow(bank))
    held.rf.fs.write_text("a", "1")
    homes = {p.name for p in (scene.kernel.data / "agents").iterdir()}
    for at, name, code in (("7", "", 4), ("p9", "", 4), ("soon", "", 2), ("1", "no name", 2)):
        with pytest.raises(Refused) as caught:
            held.operator.ask("Fork", agent=held.id, at=at, name=name)
        assert caught.value.exit_code == code
    assert {p.name for p in (scene.kernel.data / "agents").iterdir()} == homes
    assert held.rf.fs.read_text("a") == "1"


def test_a_fork_that_a_crash_cut_short_never_runs_and_can_be_removed(scene: Scene, bank: Target) -> None:
    held = scene.hold(allow=allow(bank))
    held.rf.fs.write_text("a", "1")
    held.disconnect()
    scene.kernel.arm("fork:before_files")

    def fork() -> None:
        with pytest.raises(Refused):
            scene.operator.ask("Fork", agent=held.id, at="1", name="half")

    lost = threading.Thread(target=fork)
    lost.start()
    scene.kernel.await_hit("fork:before_files")
    scene.kernel.kill()
    lost.join()
    scene.kernel.disarm("fork:before_files")
    scene.kernel.start()
    (half,) = [a for a in scene.operator.ask("List", all=True)["agents"] if a["name"] == "half"]
    assert (half["state"], half["process"]) == ("failed", "none")
    with pytest.raises(Refused):
        scene.operator.ask("Start", agent=half["id"])
    scene.operator.ask("Remove", agent=half["id"])
    assert "half" not in {a["name"] for a in scene.operator.ask("List", all=True)["agents"]}
    assert not list((scene.kernel.data / "agents").glob(".incoming-*"))
    assert scene.operator.ask("AuditVerify")["ok"]
    # The original noticed nothing: it goes on where it was.
    eventually(lambda: scene.show(held.id)["process"] == "live", "the original was not started again")
    whole = scene.operator.ask("Fork", agent=held.id, at="1", name="whole")["id"]
    assert (scene.live(whole) / "a").read_text() == "1"


def test_a_run_of_a_schedule_is_forked_without_it(scene: Scene, bank: Target) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    rf.fs.write_text("a", str(rf.random()))
    rf.fs.write_text("b", "x")
"""
    agent = scene.submit(program, allow=allow(bank), more="schedule: {every: 1h}")
    scene.operator.ask("ScheduleRun", agent=agent)
    eventually(lambda: len(scene.operator.steps(agent)) == 3, "the run made no steps")
    eventually(lambda: scene.show(agent)["state"] == "sleeping", "the run did not end")
    drawn = (scene.live(agent) / "a").read_text()
    fork = scene.operator.ask("Fork", agent=agent, at="2", start=True)["id"]
    scene.await_end(fork)
    assert scene.show(fork)["schedule"] is None
    assert (scene.live(fork) / "a").read_text() == drawn
    assert scene.show(agent)["state"] == "sleeping"


def test_the_commands_say_what_was_done(scene: Scene, bank: Target) -> None:
    held = scene.hold(allow=allow(bank))
    held.rf.fs.write_text("a", "1")
    held.rf.state.put("fork/said", 1)
    data = ("--data", str(scene.kernel.data))
    done = console("fork", held.id, "--at", "1", "--name", "said", *data)
    assert done.returncode == 0, done.stderr
    assert f"{held.id} at step 1" in done.stdout
    assert "still so:\n  step 2  state.put  fork/said  WRITE\n" in done.stdout
    done = console("fork", held.id, "--at", "p2", "--name", "twice", "--json", *data)
    assert json.loads(done.stdout)["at_step"] == 1
    assert console("fork", held.id, "--at", "9", *data).returncode == 4
    learned = console("policy", "learn", held.id, *data)
    assert learned.stdout.startswith("permissions:\n  allow:\n")
    refused = console("rm", "twice", *data)
    assert (refused.returncode, "ringfence kill" in refused.stderr) == (5, True)
    scene.operator.ask("Kill", agent="twice")
    assert console("rm", "twice", *data).stdout.startswith("removed twice-")
    held.end()
    assert json.loads(console("rm", held.id, "--json", *data).stdout)["id"] == held.id
