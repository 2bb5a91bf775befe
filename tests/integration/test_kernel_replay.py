"""Replay on a real kernel: lanes, checkpoints, denials decided afresh, divergence, large results, unknown outcomes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

FILES = ['fs.*: "/workspace/**"']


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def kill_program(scene: Scene, agent: str) -> None:
    """SIGKILL from outside to the sandbox's first process, and wait until the next one runs."""
    shown = scene.show(agent)
    os.kill(shown["pid"], signal.SIGKILL)
    eventually(lambda: scene.show(agent)["restarts"] > shown["restarts"], f"{agent} was not started again")


def test_parallel_lanes_are_answered_from_the_journal(scene: Scene) -> None:
    program = """
import json, time
from ringfence import agent
with agent.boot() as rf:
    def work(lane):
        seen = []
        for number in range(6):
            rf.fs.append_text(f"lane{lane}.txt", str(number))
            seen.append(rf.random())
        return seen
    drawn = rf.parallel([lambda lane=lane: work(lane) for lane in range(4)])
    print(json.dumps(drawn), flush=True)
    if rf.fs.search(glob="never") == []:
        time.sleep(1000)
"""
    agent = scene.submit(program, allow=FILES)
    eventually(lambda: len(scene.output(agent).splitlines()) == 1, "the first run did not come so far")
    # The last search is recorded after the line was printed.
    steps = 4 * 12 + 1
    eventually(lambda: len(scene.operator.steps(agent)) == steps, "a step is missing")
    kill_program(scene, agent)
    eventually(lambda: len(scene.output(agent).splitlines()) == 2, "the second run did not come so far")
    first, second = scene.said(agent)
    assert first == second
    assert len({value for lane in first for value in lane}) == 24
    for lane in range(4):
        assert (scene.live(agent) / f"lane{lane}.txt").read_text() == "012345"
    lanes = {s["lane"] for s in scene.operator.steps(agent)}
    assert lanes == {"0", "0.0", "0.1", "0.2", "0.3"}
    assert len(scene.operator.steps(agent)) == steps
    scene.operator.ask("Kill", agent=agent)


def test_a_checkpoint_is_where_the_next_process_goes_on(scene: Scene) -> None:
    program = """
import json, time
from ringfence import agent
with agent.boot() as rf:
    restored = rf.checkpoint.restored
    print(json.dumps(restored), flush=True)
    at = restored["page"] if restored else 0
    for page in range(at, 3):
        rf.fs.append_text("pages.txt", str(page))
        rf.checkpoint.save({"page": page + 1, "text": "ä" * 2000})
    if restored is None:
        rf.fs.append_text("after.txt", "once")
        time.sleep(1000)
    rf.fs.append_text("after.txt", "once")
"""
    agent = scene.submit(program, allow=FILES)
    eventually((scene.live(agent) / "after.txt").exists, "it did not come to its end")
    eventually(lambda: scene.operator.steps(agent)[-1]["outcome"] == "ok", "the last call has no outcome")
    kill_program(scene, agent)
    scene.await_end(agent)
    first, second = scene.said(agent)
    assert first is None
    assert (second["page"], len(second["text"])) == (3, 2000)
    assert (scene.live(agent) / "pages.txt").read_text() == "012"
    # The same place after the checkpoint: answered from the journal, not done again.
    assert (scene.live(agent) / "after.txt").read_text() == "once"
    assert scene.show(agent)["checkpoint"]["schema_version"] == 1


def test_a_denied_call_is_decided_afresh_after_a_grant(scene: Scene) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    rf.fs.append_text("log.txt", "x")
    rf.fs.write_text("out/report.md", "written")
"""
    agent = scene.run(
        program, expect="failed", allow=['fs.append: "/workspace/log.txt"'], more="restart: {policy: never}"
    )
    denied = scene.operator.steps(agent)[-1]
    assert (denied["verdict"], denied["outcome"], denied["resource"]) == (
        "deny",
        "denied",
        "/workspace/out/report.md",
    )
    assert not (scene.live(agent) / "out").exists()
    scene.operator.ask("Grant", agent=agent, rule='fs.write: "/workspace/out/**"')
    scene.operator.ask("Start", agent=agent)
    scene.await_end(agent)
    assert (scene.live(agent) / "out" / "report.md").read_text() == "written"
    assert (scene.live(agent) / "log.txt").read_text() == "x"


def test_a_denial_that_the_program_went_past_stays_what_it_was(scene: Scene) -> None:
    program = """
import time
from ringfence import agent
with agent.boot() as rf:
    try:
        rf.fs.write_text("a.txt", "a")
        print("written", flush=True)
    except agent.Denied:
        print("denied", flush=True)
    rf.now()
    print("past", flush=True)
    time.sleep(1000)
"""
    agent = scene.submit(program, allow=['fs.read: "/workspace/**"'])
    eventually(lambda: "past" in scene.output(agent), "it did not come past its denial")
    scene.operator.ask("Grant", agent=agent, rule='fs.write: "/workspace/**"')
    kill_program(scene, agent)
    eventually(lambda: scene.output(agent).count("past") == 2, "the second run did not come so far")
    assert scene.output(agent).split() == ["denied", "past", "denied", "past"]
    assert not (scene.live(agent) / "a.txt").exists()
    scene.operator.ask("Kill", agent=agent)


def test_a_program_that_differs_is_parked_and_told_where(scene: Scene) -> None:
    program = """
import os, time
from ringfence import agent
with agent.boot() as rf:
    rf.now()
    rf.state.put("diverge/token", os.urandom(4).hex())   # not through rf.random: another value each time
    rf.now()
    print("here", flush=True)
    time.sleep(1000)
"""
    agent = scene.submit(program, allow=['state.*: "**"'])
    eventually(lambda: "here" in scene.output(agent), "it did not come so far")
    scene.kill_program(agent)
    ended = scene.operator.wait(agent)
    assert ended["state"] == "parked"
    assert ended["waiting_for"] == "a divergence"
    assert "step 2 was state.put on `diverge/token`" in ended["error"]
    assert f"ringfence rollback {agent} --to 1" in ended["error"]
    assert scene.show(agent)["process"] == "none"
    events = [r for r in scene.operator.stream("Audit", agent=agent) if r["action"] == "diverged"]
    assert [json.loads(event["body"])["step"] for event in events] == [2]
    assert scene.sql("select version from state where key = 'diverge/token'") == [(1,)]
    # What differs is shown, with the ways on.
    told = scene.show(agent)["divergence"]
    assert told["step"] == 2
    assert told["recorded"]["resource"] == "diverge/token"
    changed = [line for line in told["diff"] if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    old, new = told["recorded"]["arguments"]["value"], told["made"]["arguments"]["value"]
    assert changed == [f'-  "value": "{old}"', f'+  "value": "{new}"']
    assert [choice["command"].split()[1] for choice in told["choices"]] == ["rollback", "fork", "start"]
    shown = console("show", agent, "--data", str(scene.kernel.data))
    assert f'+  "value": "{new}"' in shown.stdout
    assert f"ringfence fork {agent} --at 1 --start" in shown.stdout
    # Started again it differs again; on a copy it goes on its new way.
    scene.operator.ask("Start", agent=agent)
    assert scene.operator.wait(agent)["state"] == "parked"
    fork = scene.operator.ask("Fork", agent=agent, at="1", start=True)["id"]
    eventually(lambda: "here" in scene.output(fork), "the copy did not come so far")
    assert scene.show(fork)["divergence"] is None
    scene.operator.ask("Kill", agent=fork)
    # The way out that the message names: continue before it.
    scene.operator.ask("Rollback", agent=agent, to="1", start=True)
    eventually(lambda: scene.output(agent).count("here") == 2, "it did not go on on its new branch")
    scene.operator.ask("Kill", agent=agent)


def test_a_large_result_is_an_artifact_and_is_replayed_from_it(scene: Scene) -> None:
    program = """
import hashlib, time
from ringfence import agent
with agent.boot() as rf:
    data = rf.fs.read_bytes("large.bin")
    print(len(data), hashlib.sha256(data).hexdigest(), flush=True)
    rf.now()
    time.sleep(1000)
"""
    large = bytes(range(256)) * 4096
    agent = scene.submit(program, allow=FILES, files={"large.bin": large})
    eventually(lambda: scene.output(agent).count("\n") == 1, "the first run did not come so far")
    eventually(lambda: len(scene.operator.steps(agent)) == 2, "the second step is missing")
    (body,) = scene.sql(
        "select body from journal join agents on chain = key where id = %s and step = 1 and outcome = 'ok'",
        agent,
    )[0]
    assert len(body) < 4096
    assert "artifact" in json.loads(bytes(body))
    # What the file holds now does not matter to the past.
    (scene.live(agent) / "large.bin").write_bytes(b"changed")
    kill_program(scene, agent)
    eventually(lambda: scene.output(agent).count("\n") == 2, "the second run did not come so far")
    first, second = scene.output(agent).splitlines()
    assert first == second
    assert first.startswith(f"{len(large)} ")
    scene.operator.ask("Kill", agent=agent)


def test_what_two_processes_of_one_agent_ask_is_answered_once(scene: Scene) -> None:
    held = scene.hold(allow=FILES)
    first, second = held.stream(), held.stream()
    arguments = json.dumps({"path": "twice.txt", "data": "eA=="}).encode()
    first.post("fs.append", arguments, step=0)
    second.post("fs.append", arguments, step=0)
    replies = [stream.receive().reply for stream in (first, second)]
    assert [reply.failure.reason for reply in replies] == ["", ""]
    assert len({reply.step for reply in replies}) == 1
    assert (held.live / "twice.txt").read_text() == "x"
    first.close()
    second.close()


def test_a_reply_lost_with_its_connection_is_given_to_the_next(scene: Scene) -> None:
    held = scene.hold(allow=FILES)
    arguments = json.dumps({"path": "lost.txt", "data": "eA=="}).encode()
    for _ in range(3):
        stream = held.stream()
        stream.post("fs.append", arguments, step=0)
        stream.close()
    stream = held.stream()
    reply = stream.ask("fs.append", arguments, step=0)
    assert reply.failure.reason == ""
    assert (held.live / "lost.txt").read_text() == "x"
    assert [s["action"] for s in held.steps()] == ["fs.append"]
    stream.close()


def test_purge_withholds_what_was_recorded(scene: Scene) -> None:
    held = scene.hold(
        allow=['fs.read: "/workspace/secret.txt"', 'state.*: "**"'], files={"secret.txt": "told"}
    )
    assert held.rf.fs.read_text("secret.txt") == "told"
    held.rf.state.put("purge/other", 1)
    held.disconnect()
    arguments = json.dumps({"path": "secret.txt"}).encode()
    stream = held.stream()
    assert stream.ask("fs.read", arguments, step=0).failure.reason == ""
    scene.operator.ask("Revoke", agent=held.id, rule_or_grant="fs.read", purge=True)
    withheld = stream.ask("fs.read", arguments, step=0)
    assert withheld.failure.reason == "Revoked"
    assert "--purge" in withheld.failure.message
    assert not withheld.result
    # A plain revoke leaves the past alone: the recorded write is answered still.
    scene.operator.ask("Revoke", agent=held.id, rule_or_grant="state.*")
    put = json.dumps({"key": "purge/other", "value": 1}).encode()
    assert stream.ask("state.put", put, step=1).failure.reason == ""
    stream.close()


def test_a_restored_checkpoint_that_was_damaged_is_refused(scene: Scene) -> None:
    """C40: named with its schema version, never taken for none; the one before it is offered."""
    program = """
import time
from ringfence import agent
with agent.boot() as rf:
    print(rf.checkpoint.restored, flush=True)
    rf.checkpoint.save({"page": 1})
    rf.now()
    print("saved", flush=True)
    time.sleep(1000)
"""
    agent = scene.submit(program, more="restart: {policy: on-failure, max: 1}")
    eventually(lambda: "saved" in scene.output(agent), "it did not save")
    changed = scene.sql(
        "update checkpoints set state = overlay(state placing '9' from octet_length(state) - 1 for 1) "
        "where agent = %s returning 1",
        scene.key_of(agent),
    )
    assert changed == [(1,)]
    scene.kill_program(agent)
    ended = scene.operator.wait(agent)
    assert ended["state"] == "failed"
    assert "checkpoint `1` (schema version 1) is damaged" in ended["error"]
    assert scene.output(agent).splitlines() == ["None", "saved"]
    assert scene.show(agent)["checkpoint"] == {"step": 1, "schema_version": 1, "damaged": True}
    # The way out that the message names.
    assert f"ringfence rollback {agent} --to 0 --start" in ended["error"]
    scene.operator.ask("Rollback", agent=agent, to="0", start=True)
    eventually(lambda: scene.output(agent).count("saved") == 2, "it did not go on")
    scene.operator.ask("Kill", agent=agent)
