"""Agents that sleep for a message: no process meanwhile, woken by it whoever sent it, over a killed kernel too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

ALL = ['messages.*: "*"', 'fs.*: "/workspace/**"']
LINGER = "approvals: {linger: 200ms}"
WAITER = """
from ringfence import agent
print("start", flush=True)
with agent.boot() as rf:
    rf.fs.append_text("log", "x")
    for _ in range(2):
        rf.fs.append_text("log", rf.messages.receive().text)
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def await_sleep(scene: Scene, agent: str) -> None:
    def asleep() -> bool:
        shown = scene.show(agent)
        return (shown["process"], shown["state"], shown["waiting_for"]) == ("none", "sleeping", "a message")

    eventually(asleep, f"{agent} does not sleep")


def starts(scene: Scene, agent: str) -> int:
    return scene.output(agent).splitlines().count("start")


def log_of(scene: Scene, agent: str) -> str:
    return (scene.live(agent) / "log").read_text()


def test_each_message_wakes_it_once_and_nothing_is_repeated(scene: Scene) -> None:
    agent = scene.submit(WAITER, allow=ALL, more=LINGER)
    sender = scene.hold(allow=ALL)
    await_sleep(scene, agent)
    sender.rf.messages.send(agent, "a")
    eventually(lambda: log_of(scene, agent) == "xa", "it was not woken")
    await_sleep(scene, agent)
    scene.operator.ask("Send", agent=agent, text="b")
    scene.await_end(agent)
    assert (log_of(scene, agent), starts(scene, agent)) == ("xab", 3)


def test_a_message_wakes_one_that_slept_when_its_kernel_was_killed(scene: Scene) -> None:
    agent = scene.submit(WAITER, allow=ALL, more=LINGER)
    await_sleep(scene, agent)
    scene.kernel.kill()
    scene.kernel.start()
    eventually(lambda: scene.show(agent)["state"] == "sleeping", "it was not taken over")
    assert (scene.show(agent)["process"], starts(scene, agent)) == ("none", 1)
    scene.operator.ask("Send", agent=agent, text="a")
    eventually(lambda: log_of(scene, agent) == "xa", "it was not woken")
    await_sleep(scene, agent)
    scene.kernel.kill()
    # As another kernel would send it meanwhile: nobody announces it to the next one.
    scene.sql(
        "insert into messages (recipient, sender, sender_name, is_json, body) "
        "select key, 'other', 'other', false, 'b' from agents where id = %s",
        agent,
    )
    scene.kernel.start()
    scene.await_end(agent)
    assert log_of(scene, agent) == "xab"


def test_a_program_that_ends_takes_no_message_any_more(scene: Scene) -> None:
    program = """
import os, threading
from ringfence import agent
with agent.boot() as rf:
    rf.thread(rf.messages.receive)
    while not rf.fs.search(glob="go"):
        rf.sleep(0.05)
    os._exit(0)
"""
    agent = scene.submit(program, allow=ALL)

    def receives() -> list[dict[str, Any]]:
        return [s for s in scene.operator.steps(agent) if s["action"] == "messages.receive"]

    eventually(lambda: scene.show(agent)["steps"] > 3, "it does not run")
    (scene.live(agent) / "go").touch()
    scene.await_end(agent)
    eventually(lambda: bool(receives()), "the wait goes on")
    (receive,) = receives()
    assert receive["outcome"] == "cancelled"
