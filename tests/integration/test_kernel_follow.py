"""Who follows an agent sees it to its end, also over the time in which it waits without a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.v1 import operator_pb2 as pb
from support.kernels import WAIT_S, Refused, eventually
from support.scenes import Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

PROGRAM = """
from ringfence import agent
with agent.boot() as rf:
    print("before", flush=True)
    rf.now()
    rf.state.put("followed", 1)
    rf.random()
    print("after", flush=True)
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def followed(scene: Scene, method: str, agent: str) -> Iterator[Any]:
    call, request = scene.operator._method(method, "unary_stream")
    for part in call(request(agent=agent, follow=True), timeout=WAIT_S):
        yield part.data if isinstance(part, pb.Chunk) else json.loads(part.json)


def asleep(scene: Scene) -> tuple[str, str]:
    """An agent whose process has ended while its call waits for a person; its id, and the approval's."""
    agent = scene.submit(
        PROGRAM, allow=["now", "random"], ask=['state.put: "**"'], more="approvals: {linger: 200ms}"
    )
    eventually(lambda: scene.show(agent)["process"] == "none", f"{agent} keeps its process")
    (waits,) = scene.operator.ask("Approvals", agent=agent)["approvals"]
    return agent, waits["id"]


def test_logs_go_on_after_a_wait_without_a_process(scene: Scene) -> None:
    agent, approval = asleep(scene)
    stream = followed(scene, "Logs", agent)
    assert next(stream) == b"before\n"
    scene.operator.ask("Approve", id=approval)
    # The program is started again and prints its first line anew.
    assert b"".join(stream).splitlines() == [b"before", b"after"]
    assert scene.show(agent)["state"] == "done"


def test_steps_go_on_after_a_wait_and_show_how_it_ended(scene: Scene) -> None:
    agent, approval = asleep(scene)
    stream = followed(scene, "Steps", agent)
    seen: list[tuple[str, str]] = []
    for step in stream:
        seen.append((step["action"], step["outcome"]))
        if step["outcome"] == "parked":
            scene.operator.ask("Approve", id=approval)
    assert seen == [("now", "ok"), ("state.put", "parked"), ("state.put", "ok"), ("random", "ok")]
    assert scene.show(agent)["state"] == "done"


@pytest.mark.parametrize("method", ["Logs", "Steps"])
def test_a_killed_agent_is_followed_no_further(method: str, scene: Scene) -> None:
    agent, _ = asleep(scene)
    stream = followed(scene, method, agent)
    next(stream)
    scene.operator.ask("Kill", agent=agent)
    list(stream)
    assert scene.show(agent)["state"] == "killed"


def test_what_send_and_start_say_of_an_agent_that_is_done(scene: Scene) -> None:
    agent = scene.run("print(1)")
    said: list[str] = []
    for method, more in (("Send", {"text": "x"}), ("Start", {})):
        with pytest.raises(Refused) as refused:
            scene.operator.ask(method, agent=agent, **more)
        said.append(str(refused.value))
    assert all(
        "roll it back first: " in text and f"ringfence rollback {agent} --to STEP --start" in text
        for text in said
    )
