"""The life of an agent on a real kernel: start, end, restart, freeze, kill, and going on by replay."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import RingfenceError
from support.kernels import Refused, eventually
from support.scenes import HOLD, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

LONG = str(10_000_000 + os.getpid())
"""Seconds that only processes of this run sleep for."""

FILES = ['fs.*: "/workspace/**"']


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def test_a_program_gets_its_input_environment_and_workspace(scene: Scene) -> None:
    program = """
import json, os, sys
from ringfence import agent
with agent.boot() as rf:
    print(json.dumps({"input": sys.stdin.read(), "region": os.environ["REGION"], "args": sys.argv[1:],
                      "image": open("note.txt").read(), "live": rf.fs.read_text("note.txt"), "agent": rf.identity.agent,
                      "home": os.environ["HOME"]}))
    print("to stderr", file=sys.stderr)
"""
    manifest = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: greeter}
spec:
  run: {command: [python, agent.py, "two words"], env: {REGION: eu}}
  permissions: {allow: [fs.read: "/workspace/**"]}
"""
    agent = scene.operator.submit(
        manifest, {"agent.py": program, "note.txt": "noted"}, input_bytes="für dich".encode()
    )
    ended = scene.await_end(agent)
    assert ended["exit_code"] == 0
    assert scene.said(agent) == [
        {
            "input": "für dich",
            "region": "eu",
            "args": ["two words"],
            "image": "noted",
            "live": "noted",
            "agent": agent,
            "home": "/tmp",
        }
    ]
    assert scene.output(agent, stderr=True) == "to stderr\n"
    shown = scene.show(agent)
    assert (shown["name"], shown["state"], shown["process"], shown["steps"]) == ("greeter", "done", "none", 1)


def test_a_failing_program_is_started_again_up_to_its_limit(scene: Scene) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    rf.fs.append_text("tries.txt", "x")
    print("started", flush=True)
    raise SystemExit("the disk of the moon is full")
"""
    agent = scene.run(program, expect="failed", allow=FILES, more="restart: {policy: on-failure, max: 2}")
    ended = scene.operator.wait(agent)
    assert ended["exit_code"] == 1
    assert "exit status 1: the disk of the moon is full" in ended["error"]
    assert "restarted 2 times" in ended["error"]
    assert scene.output(agent).splitlines() == ["started"] * 3
    # Three runs, one effect: the second and third found it in the journal.
    assert (scene.live(agent) / "tries.txt").read_text() == "x"
    assert [s["action"] for s in scene.operator.steps(agent)] == ["fs.append"]


def test_a_program_that_is_never_started_again_fails_at_once(scene: Scene) -> None:
    agent = scene.run("raise SystemExit(7)", expect="failed", more="restart: {policy: never}")
    ended = scene.operator.wait(agent)
    assert ended["exit_code"] == 7
    assert ended["error"] == "exit status 7"
    assert scene.show(agent)["restarts"] == 0


def test_a_command_that_does_not_exist_is_refused_by_name_and_leaves_nothing(scene: Scene) -> None:
    manifest = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: nowhere}
spec: {run: {command: [no-such-program]}, permissions: {allow: []}}
"""
    with pytest.raises(Refused) as refused:
        scene.operator.submit(manifest, {})
    assert refused.value.exit_code == 1
    assert "no-such-program" in str(refused.value)
    # Nothing is left of it but the operator's record: the name is free, and its files are gone.
    assert "nowhere" not in {row["name"] for row in scene.operator.ask("List", all=True)["agents"]}
    assert not [path for path in scene.kernel.data.glob("*/*") if "nowhere" in path.name]
    refusals = [r for r in scene.operator.stream("Audit") if r.get("action") == "operator.submit_refused"]
    assert [r["resource"].startswith("nowhere-") for r in refusals] == [True]
    agent = scene.operator.submit(manifest.replace("no-such-program", "true"), {})
    assert scene.await_end(agent)["state"] == "done"
    assert scene.show("nowhere")["id"] == agent
    assert scene.operator.ask("AuditVerify")["ok"]


def test_a_paused_agent_makes_no_progress_and_goes_on(scene: Scene) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    for number in range(1, 100000):
        rf.state.put("pause/beat", number)
        if rf.state.get("pause/stop"):
            break
"""
    agent = scene.submit(program, allow=['state.*: "**"'])
    eventually(lambda: scene.sql("select version from state where key = 'pause/beat'") != [], "no beat came")
    paused = scene.operator.ask("Pause", agent=agent)
    assert (paused["state"], paused["process"]) == ("paused", "frozen")
    pid = scene.show(agent)["pid"]
    frozen = tree_of(pid)
    assert frozen
    # A call that was under way when it froze may still be recorded; the process itself can make no further one.
    held = scene.hold(allow=['state.*: "**"'])
    before = settled_beat(scene)
    for number in range(200):
        held.rf.state.put("pause/other", number)
    assert beat(scene) == before
    resumed = scene.operator.ask("Resume", agent=agent)
    assert (resumed["state"], resumed["process"]) == ("running", "live")
    eventually(lambda: beat(scene) > before, "it did not go on")
    held.rf.state.put("pause/stop", True)
    scene.await_end(agent)


def beat(scene: Scene) -> int:
    return scene.sql("select version from state where key = 'pause/beat'")[0][0]


def settled_beat(scene: Scene) -> int:
    """The beat when nothing of the frozen agent is in flight any more: twice the same with a commit in between."""
    seen = -1
    while seen != beat(scene):
        seen = beat(scene)
        scene.operator.ask("Status")
    return seen


def tree_of(pid: int) -> list[int]:
    """A process and all its descendants on this host, zombies left out."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        children.setdefault(int(parent), []).append(int(entry.name))
        states[int(entry.name)] = state
    found, todo = [], [pid]
    while todo:
        at = todo.pop()
        todo += children.get(at, [])
        if states.get(at, "Z") not in "ZX":
            found.append(at)
    return found


def test_kill_ends_every_descendant_however_it_hides(scene: Scene) -> None:
    hidden = "setsid sleep 7777 & (setsid sh -c 'sleep 7777 & sleep 7777' &) ; "
    hold = "printf '%s\\n' \"$RINGFENCE_TOKEN\"; exec sleep 100000"
    held = scene.hold(command=hidden + hold, more="sandbox: {pids: 32}")
    pid = scene.show(held.id)["pid"]
    eventually(lambda: len(tree_of(pid)) >= 5, "the children did not start")
    tree = tree_of(pid)
    killed = scene.operator.ask("Kill", agent=held.id)
    assert (killed["state"], killed["process"]) == ("killed", "none")
    # When kill returns nothing of it is left: no polling here.
    assert [p for p in tree if alive(p)] == []
    with pytest.raises(Refused) as refused:
        scene.operator.ask("Pause", agent=held.id)
    assert refused.value.exit_code == 5


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_start_after_kill_goes_on_by_replay(scene: Scene) -> None:
    program = """
import os, signal
from ringfence import agent
with agent.boot() as rf:
    for number in range(5):
        rf.fs.append_text("count.txt", str(number))
        if number == 2 and rf.fs.search(glob="go") == []:
            print("waiting", flush=True)
            signal.pause()
    print("end", flush=True)
"""
    agent = scene.submit(program, allow=FILES)
    eventually(lambda: "waiting" in scene.output(agent), "it did not come to its pause")
    assert scene.operator.ask("Kill", agent=agent)["state"] == "killed"
    assert scene.operator.wait(agent)["state"] == "killed"
    started = scene.operator.ask("Start", agent=agent)
    assert started["state"] == "running"
    # Its search is in the journal and answers the same; so it waits again, and nothing is appended twice.
    eventually(lambda: scene.output(agent).count("waiting") == 2, "it did not come to its pause again")
    assert (scene.live(agent) / "count.txt").read_text() == "012"
    with pytest.raises(Refused) as refused:
        scene.operator.ask("Start", agent=agent)
    assert "running already" in str(refused.value)
    scene.operator.ask("Kill", agent=agent)
    # Rolled back to before the search, the program asks it anew.
    (scene.live(agent) / "go").write_text("")
    searched = next(s["step"] for s in scene.operator.steps(agent) if s["action"] == "fs.search")
    scene.operator.ask("Rollback", agent=agent, to=str(searched - 1), start=True)
    scene.await_end(agent)
    assert (scene.live(agent) / "count.txt").read_text() == "01234"


def test_pull_brings_the_workspace_home(scene: Scene) -> None:
    held = scene.hold(
        allow=FILES,
        files={"keep/a.txt": "a", "keep/run.sh": (0o755, "#!/bin/sh\n"), "empty": None, "other.txt": "o"},
    )
    held.rf.fs.write_text("keep/new.txt", "new")
    (held.live / "keep" / "link").symlink_to("a.txt")
    with tarfile.open(fileobj=io.BytesIO(b"".join(scene.operator.stream("Pull", agent=held.id)))) as tar:
        members = {m.name.removeprefix("./"): m for m in tar.getmembers()}
        assert {
            "keep/a.txt",
            "keep/run.sh",
            "keep/new.txt",
            "keep/link",
            "empty",
            "other.txt",
        } <= members.keys()
        assert members["keep/run.sh"].mode & 0o777 == 0o755
        assert members["keep/link"].linkname == "a.txt"
        assert members["empty"].isdir()
    with tarfile.open(
        fileobj=io.BytesIO(b"".join(scene.operator.stream("Pull", agent=held.id, path="keep")))
    ) as tar:
        names = [m.name for m in tar.getmembers()]
    assert any(name.endswith("a.txt") for name in names)
    assert not any("other" in name for name in names)
    with pytest.raises(Refused) as refused:
        scene.operator.stream("Pull", agent=held.id, path="nowhere")
    assert refused.value.exit_code == 4


def test_logs_are_followed_to_the_end(scene: Scene) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    for number in range(20):
        rf.now()
        print(f"line {number}", flush=True)
"""
    agent = scene.submit(program)
    followed = b"".join(scene.operator.stream("Logs", agent=agent, follow=True)).decode()
    assert followed.splitlines() == [f"line {number}" for number in range(20)]


def test_agents_are_found_by_name_and_by_id(scene: Scene) -> None:
    twin = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: twin}
spec: {run: {command: ["true"]}, permissions: {allow: []}}
"""
    first = scene.operator.submit(twin, {})
    assert scene.show("twin")["id"] == first
    second = scene.operator.submit(twin, {})
    with pytest.raises(Refused) as refused:
        scene.show("twin")
    assert refused.value.exit_code == 2
    assert first in str(refused.value)
    assert second in str(refused.value)
    for agent in (first, second):
        assert scene.await_end(agent)["id"] == agent
    with pytest.raises(Refused) as refused:
        scene.show("nobody")
    assert refused.value.exit_code == 4


def test_kill_ends_the_command_that_an_agent_had_under_way(scene: Scene) -> None:
    held = scene.hold(allow=[*FILES, 'exec.run: "*"'])
    reasons: list[str] = []

    def run() -> None:
        try:
            held.rf.exec.run(["sh", "-c", f"touch begun; setsid sleep {LONG} & sleep {LONG}"])
        except RingfenceError as error:
            reasons.append(error.reason)

    worker = held.rf.thread(run)
    scratch = held.live.parent / "scratch"
    eventually(lambda: any(scratch.glob("*/upper/begun")), "the command did not start")
    eventually(lambda: len(running(LONG)) == 2, "its children did not start")
    scene.operator.ask("Kill", agent=held.id)
    assert running(LONG) == []
    assert not (held.live / "begun").exists()
    assert list(scratch.iterdir()) == []
    assert [(s["action"], s["outcome"], s["reason"]) for s in held.steps()] == [
        ("exec.run", "cancelled", "Killed")
    ]
    held.disconnect()
    worker.join()


def running(seconds: str) -> list[int]:
    """Processes on this host that sleep for just so long."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", seconds.encode()]:
                found.append(int(entry.name))
    return found


def test_a_killed_kernel_leaves_no_process_to_its_successor(scene: Scene) -> None:
    """C56. The last test: it kills the kernel of this module."""
    hidden = f"setsid sleep {LONG} & (setsid sh -c 'sleep {LONG} & sleep {LONG}' &) ; "
    held = scene.hold(allow=FILES, command=hidden + HOLD, more="sandbox: {pids: 32}")
    held.rf.fs.append_text("count.txt", "x")
    old = tree_of(scene.show(held.id)["pid"])
    eventually(lambda: len(running(LONG)) == 3, "the children did not start")
    scene.kernel.kill()
    scene.kernel.start()
    eventually(lambda: scene.show(held.id)["process"] == "live", "it was not started again")
    held.again()
    assert [pid for pid in old if alive(pid)] == []
    eventually(lambda: len(running(LONG)) == 3, "the children of the new start are missing")
    held.rf.fs.append_text("count.txt", "x")
    assert (held.live / "count.txt").read_text() == "x"
    scene.operator.ask("Kill", agent=held.id)
    assert running(LONG) == []
