"""Agents that only wait: their process ends past `linger`, their calls go on, and they wake once, by replay."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ringfence.kernel.timers import STORM
from support.kernels import Refused, eventually
from support.scenes import Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

LINGER = "approvals: {linger: 200ms}"
RULES = ["sleep", "now", 'state.*: "**"', 'fs.*: "/workspace/**"']


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def program(body: str, boot: str = "with agent.boot() as rf:") -> str:
    """A program that says at each start that it started."""
    lines = [
        "import asyncio, json, os, sys, time",
        "from ringfence import agent",
        "print(json.dumps('start'), flush=True)",
    ]
    return "\n".join([*lines, boot, *(f"    {line}" for line in body.strip().splitlines())]) + "\n"


def await_sleep(scene: Scene, agent: str) -> dict[str, Any]:
    eventually(
        lambda: (shown := scene.show(agent))["process"] == "none" and shown["state"] == "sleeping",
        f"{agent} was not put to sleep: {scene.show(agent)}",
    )
    return scene.show(agent)


def starts(scene: Scene, agent: str) -> int:
    return scene.said(agent).count("start")


LONG = program("rf.state.put('slept/' + rf.identity.agent, 1)\nrf.sleep(3600)\nprint(json.dumps('over'))")


def test_a_long_sleep_holds_no_process_and_says_until_when(scene: Scene) -> None:
    agent = scene.submit(LONG, allow=RULES, more=LINGER)
    shown = await_sleep(scene, agent)
    kind, until = shown["waiting_for"].split()
    left = datetime.fromisoformat(until) - datetime.now(UTC)
    assert kind == "timer"
    assert timedelta(minutes=55) < left < timedelta(minutes=60)
    ((state, asleep, wake_at),) = scene.sql("select state, asleep, wake_at from agents where id = %s", agent)
    assert (state, asleep) == ("sleeping", True)
    assert abs(wake_at - datetime.fromisoformat(until)) < timedelta(seconds=1)
    assert starts(scene, agent) == 1


def test_a_week_is_no_matter_of_a_calls_deadline(scene: Scene) -> None:
    agent = scene.submit(program("rf.sleep(7 * 24 * 3600)"), allow=RULES, more=LINGER)
    shown = await_sleep(scene, agent)
    until = datetime.fromisoformat(shown["waiting_for"].split()[1])
    assert timedelta(days=6, hours=23) < until - datetime.now(UTC) < timedelta(days=7)


@pytest.mark.parametrize("boot", ["sync", "async"])
def test_it_wakes_by_itself_and_repeats_nothing(scene: Scene, boot: str) -> None:
    if boot == "sync":
        text = program("rf.fs.append_text('log', 'x')\nrf.sleep(3)\nrf.fs.append_text('log', 'y')")
    else:
        text = (
            program(
                "async with agent.boot_async() as rf:\n"
                "    await rf.fs.append_text('log', 'x')\n"
                "    await asyncio.gather(rf.sleep(3), rf.sleep(3.1))\n"
                "    await rf.fs.append_text('log', 'y')",
                "async def main():",
            )
            + "asyncio.run(main())\n"
        )
    agent = scene.submit(text, allow=RULES, more=LINGER)
    await_sleep(scene, agent)
    scene.await_end(agent)
    assert (scene.live(agent) / "log").read_text() == "xy"
    assert starts(scene, agent) == 2
    assert scene.show(agent)["restarts"] == 0
    actions = [step["action"] for step in scene.operator.steps(agent)]
    assert sorted(actions) == sorted(["fs.append", "sleep", "fs.append"] + ["sleep"] * (boot == "async"))


def test_sleepers_that_wake_together_sleep_once_and_go_on_at_their_time(scene: Scene) -> None:
    """They are started before it, and are not put to sleep again for what is left."""
    until = (datetime.now(UTC) + timedelta(seconds=8)).timestamp()
    text = program(f"rf.sleep(max(0, {until} - rf.now().timestamp()))\nprint(json.dumps(time.time()))")
    agents = [scene.submit(text, allow=RULES, more=LINGER) for _ in range(STORM)]
    for agent in agents:
        scene.await_end(agent)
        assert starts(scene, agent) <= 2
        events = [row["action"] for row in scene.operator.stream("Audit", agent=agent)]
        assert events.count("agent.sleep") <= 1
    told = [float(word) for agent in agents for word in scene.said(agent) if word != "start"]
    assert len(told) == len(agents)
    assert min(told) >= until - 0.001


def test_a_sleep_shorter_than_linger_keeps_its_process(scene: Scene) -> None:
    agent = scene.submit(program("rf.sleep(0.6)"), allow=RULES, more="approvals: {linger: 500ms}")
    scene.await_end(agent)
    assert starts(scene, agent) == 1
    events = [row["action"] for row in scene.operator.stream("Audit", agent=agent)]
    assert "agent.sleep" not in events


def test_a_lane_that_works_keeps_the_process(scene: Scene) -> None:
    """The main lane waits for others; one sleeps and one works, and then that one is over as well."""
    text = program(
        "sleeper = rf.thread(lambda: rf.sleep(3600))\n"
        "def work():\n"
        "    end = time.monotonic() + 1.5\n"
        "    while time.monotonic() < end:\n"
        "        pass\n"
        "    print(json.dumps('worked'), flush=True)\n"
        "rf.thread(work).join()\n"
        "sleeper.join()"
    )
    agent = scene.submit(text, allow=RULES, more=LINGER)
    await_sleep(scene, agent)
    assert scene.said(agent) == ["start", "worked"]


def test_a_program_without_the_library_keeps_its_process(scene: Scene) -> None:
    held = scene.hold(allow=RULES, more="approvals: {linger: 50ms}")
    stream = held.stream()
    stream.post("sleep", b'{"duration_ms":3600000}', step=0)
    eventually(lambda: scene.show(held.id)["state"] == "sleeping", "it does not show that it waits")
    stream.post("sleep", b'{"duration_ms":300}', lane="0.0", step=0)
    stream.receive()
    assert scene.show(held.id)["process"] == "live"
    stream.close()


def test_who_slept_past_an_approvals_end_is_denied_once_and_a_person_has_it_ask_anew(scene: Scene) -> None:
    """C32: its process is ended before the approval is; replay has to find the refusal."""
    agent = scene.submit(
        program(
            "try:\n"
            "    rf.fs.write_text('a', '1')\n"
            "except agent.Denied as denied:\n"
            "    print(json.dumps(str(denied)), flush=True)\n"
            "    sys.exit(3)"
        ),
        ask=['fs.write: "/workspace/**"'],
        more="approvals: {expire: 2s, linger: 200ms}\nrestart: {policy: on-failure, max: 1}",
    )
    eventually(lambda: scene.show(agent)["state"] == "failed", f"it never ended: {scene.show(agent)}")
    asked = "select a.state from approvals a join agents g on g.key = a.agent where g.id = %s order by a.key"
    assert scene.sql(asked, agent) == [("expired",)]
    # Started, woken, and once more as its manifest has it: the same answer each time it came so far.
    said = scene.said(agent)
    assert said[0] == "start"
    assert said[-4:-2] == said[-2:] == ["start", said[-1]]
    assert "nobody answered approval" in said[-1]
    assert "agent.sleep" in [row["action"] for row in scene.operator.stream("Audit", agent=agent)]
    scene.operator.ask("Start", agent=agent)
    eventually(lambda: len(scene.sql(asked, agent)) == 2, "it does not ask anew")
    (waits,) = scene.operator.ask("Approvals", agent=agent)["approvals"]
    scene.operator.ask("Approve", id=waits["id"])
    eventually(lambda: scene.show(agent)["state"] == "done", "it does not go on")
    assert (scene.live(agent) / "a").read_text() == "1"
    assert scene.sql(asked, agent) == [("expired",), ("approved",)]


def test_kill_pause_resume_and_start_of_a_sleeping_agent(scene: Scene) -> None:
    agent = scene.submit(LONG, allow=RULES, more=LINGER)
    await_sleep(scene, agent)
    assert scene.operator.ask("Pause", agent=agent) == {"id": agent, "state": "paused", "process": "none"}
    assert scene.operator.ask("Resume", agent=agent)["process"] == "live"
    await_sleep(scene, agent)
    # `start` has it look again; it finds its sleep under way and sleeps on.
    assert scene.operator.ask("Start", agent=agent)["process"] == "live"
    await_sleep(scene, agent)
    assert scene.operator.ask("Kill", agent=agent)["state"] == "killed"
    assert [s["outcome"] for s in scene.operator.steps(agent) if s["action"] == "sleep"] == ["cancelled"]
    assert scene.sql("select state, asleep, wake_at from agents where id = %s", agent) == [
        ("killed", False, None)
    ]
    scene.operator.ask("Start", agent=agent)
    await_sleep(scene, agent)
    assert starts(scene, agent) == 4
    scene.operator.ask("Kill", agent=agent)


def test_a_rollback_of_a_sleeping_agent_leaves_it_paused(scene: Scene) -> None:
    text = program("rf.fs.write_text('a', '1')\nrf.fs.write_text('a', '2')\nrf.sleep(3600)")
    agent = scene.submit(text, allow=RULES, more=LINGER)
    await_sleep(scene, agent)
    rolled = scene.operator.ask("Rollback", agent=agent, to="1")
    assert rolled["state"] == "paused"
    shown = scene.show(agent)
    assert (shown["state"], shown["process"]) == ("paused", "none")
    assert (scene.live(agent) / "a").read_text() == "1"
    scene.operator.ask("Resume", agent=agent)
    await_sleep(scene, agent)
    assert (scene.live(agent) / "a").read_text() == "2"
    scene.operator.ask("Kill", agent=agent)


def test_a_program_that_is_ended_in_its_sleep_is_started_again_at_once(scene: Scene) -> None:
    """Its death counts as one, although it waited: the wait itself goes on."""
    agent = scene.submit(program("rf.sleep(3600)"), allow=RULES, more="approvals: {linger: 1h}")
    eventually(lambda: scene.show(agent)["state"] == "sleeping", "it does not sleep")
    scene.kill_program(agent)
    eventually(lambda: starts(scene, agent) == 2, "it was not started again")
    eventually(lambda: scene.show(agent)["state"] == "sleeping", "it does not sleep on")
    assert scene.show(agent)["restarts"] == 1
    with pytest.raises(Refused):
        scene.operator.ask("Start", agent=agent)
    scene.operator.ask("Kill", agent=agent)
