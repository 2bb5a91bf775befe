"""`spec.scheduler` on a real kernel: who waits for a turn, who goes first, and who gives a turn up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.kernels import Refused, eventually
from support.scenes import Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  scheduler: {agents: 1, memory: 512Mi}
"""

BUSY = """
import time
print("on", flush=True)
time.sleep(1000)
"""

WAITS = """
from ringfence import agent
with agent.boot() as rf:
    rf.fs.append_text("log", "before ")
    got = rf.messages.receive()
    rf.fs.append_text("log", got.text)
"""

PASSES = "from ringfence import agent\nwith agent.boot() as rf:\n    rf.fs.append_text('log', 'done')\n"
FILES = ['fs.*: "/workspace/**"']
FULL = "a slot: all 1 are taken"


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG) as scene:
        yield scene


def alive(scene: Scene, agent: str) -> bool:
    return scene.show(agent)["process"] == "live" and "on" in scene.output(agent)


def waits(scene: Scene, agent: str) -> tuple[str, str]:
    shown = scene.show(agent)
    return shown["state"], shown["waiting_for"]


def scheduler(scene: Scene) -> dict[str, Any]:
    return scene.operator.ask("Status")["scheduler"]


def test_one_waits_for_the_end_of_another_and_the_kernel_may_die_meanwhile(scene: Scene) -> None:
    first = scene.submit(BUSY)
    eventually(lambda: alive(scene, first), "it does not start")
    low, high, third = (scene.submit(BUSY, more=f"priority: {p}") for p in ("low", "high", "normal"))
    for agent in (low, high, third):
        assert waits(scene, agent) == ("pending", FULL)
    assert (scheduler(scene)["live"], scheduler(scene)["waiting"]) == (1, 3)
    scene.kernel.kill()
    scene.kernel.start()
    # All are to live, as before; one of them does.
    eventually(lambda: (scheduler(scene)["live"], scheduler(scene)["waiting"]) == (1, 3), "they don't queue")
    everyone = (first, low, high, third)
    eventually(lambda: any(alive(scene, a) for a in everyone), "none of them lives")
    living = next(a for a in everyone if scene.show(a)["process"] == "live")
    left = [a for a in (high, third, first, low) if a != living]
    # Killed or paused while they wait, they are not started when their turn comes.
    scene.operator.ask("Kill", agent=left[2])
    scene.operator.ask("Pause", agent=left[0])
    assert scheduler(scene)["waiting"] == 1
    scene.operator.ask("Kill", agent=living)
    eventually(lambda: alive(scene, left[1]), "the next one is not started")
    scene.operator.ask("Resume", agent=left[0])
    assert waits(scene, left[0]) == ("pending", FULL)
    assert scene.show(left[2])["state"] == "killed"
    scene.operator.ask("Kill", agent=left[1])
    eventually(lambda: alive(scene, left[0]), "the one that was paused is not started")
    scene.operator.ask("Kill", agent=left[0])
    eventually(lambda: scheduler(scene)["live"] == 0, "a slot is held by nobody")


def test_priority_goes_first(scene: Scene) -> None:
    first = scene.submit(BUSY)
    eventually(lambda: alive(scene, first), "it does not start")
    order = ["low", "normal", "high"]
    agents = {p: scene.submit(PASSES, allow=FILES, more=f"priority: {p}") for p in order}
    scene.operator.ask("Kill", agent=first)
    for agent in agents.values():
        scene.await_end(agent)
    began = {
        p: scene.sql(
            "select min(started_us) from journal where chain = %s and action = 'agent.start'", scene.key_of(a)
        )
        for p, a in agents.items()
    }
    assert sorted(order, key=lambda p: began[p]) == ["high", "normal", "low"]


def test_who_only_waits_gives_its_slot_up_and_gets_one_again(scene: Scene) -> None:
    """It would linger for an hour where nobody else needs its slot."""
    rests = scene.submit(WAITS, allow=[*FILES, 'messages.receive: "**"'], more="approvals: {linger: 1h}")
    eventually(lambda: scene.show(rests)["state"] == "sleeping", "it does not wait")
    assert scene.show(rests)["process"] == "live"
    other = scene.submit(PASSES, allow=FILES)
    scene.await_end(other)
    assert scene.show(rests)["process"] == "none"
    busy = scene.submit(BUSY)
    eventually(lambda: alive(scene, busy), "it does not start")
    scene.operator.ask("Send", agent=rests, text="after")
    eventually(lambda: waits(scene, rests) == ("pending", FULL), "it does not wait for a slot")
    scene.operator.ask("Kill", agent=busy)
    scene.await_end(rests)
    assert (scene.live(rests) / "log").read_text() == "before after"


def test_what_can_never_have_its_turn_is_refused(scene: Scene) -> None:
    with pytest.raises(Refused, match=r"asks for 1073741824 bytes.*share 536870912") as refused:
        scene.submit(PASSES, more="sandbox: {memory: 1Gi}")
    assert refused.value.exit_code == 1
    assert scene.operator.ask("List", all=True)["agents"][-1]["state"] != "failed"


def test_a_reload_raises_a_bound_at_once(scene: Scene) -> None:
    first = scene.submit(BUSY)
    eventually(lambda: alive(scene, first), "it does not start")
    second = scene.submit(BUSY)
    assert waits(scene, second) == ("pending", FULL)
    file = scene.kernel.config
    before = file.read_text()
    file.write_text(before.replace("agents: 1", "agents: 2"))
    scene.operator.ask("Reload")
    eventually(lambda: alive(scene, second), "the second is not started")
    shown = console("status", "--data", str(scene.kernel.data))
    assert "2 of 2 agents live" in shown.stdout, shown.stdout
    for agent in (first, second):
        scene.operator.ask("Kill", agent=agent)
    file.write_text(before)
    scene.operator.ask("Reload")
