"""The kill matrix for a model's reply: SIGKILL at every failpoint of a streamed call; tokens are settled once.

The host lives in the test's process and outlives the kernels, so it knows how often it was really asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.model import ModelHost, Turn
from support.scenes import Scene, scene_of_its_own

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

PROGRAM = """
from ringfence import agent

with agent.boot() as rf:
    rf.now()
    reply = rf.llm.complete(
        model="m", messages=[{"role": "user", "content": "count"}], max_tokens=100, stream=True
    )
    rf.fs.append_text("said.txt", reply.text)
    rf.checkpoint.save({"done": True})
"""
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {{resources: {{model: {{type: llm, base: "{base}", price: {{input: 1000, output: 1000}}}}}}}}
"""
POINTS = (
    "before_intent",
    "after_intent",
    "before_effect",
    "mid_stream",
    "after_effect",
    "before_outcome",
    "after_outcome",
)
ASKED = ("mid_stream", "after_effect", "before_outcome", "after_outcome")
"""Points at which the host has been asked already."""
INTENT = ("after_intent", "before_effect", "mid_stream", "after_effect", "before_outcome")
"""Points between the intent and the outcome."""
USED = {"tokens": 18, "usd": pytest.approx(0.018)}


@pytest.fixture(scope="module")
def host() -> Iterator[ModelHost]:
    host = ModelHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, host: ModelHost) -> Iterator[Scene]:
    config = CONFIG.format(base=host.base)
    with scene_of_its_own(postgres_server, template_database, config=config) as scene:
        yield scene


def stand(scene: Scene, host: ModelHost, point: str) -> str:
    """An agent that has come to the point and goes no further. Two reservations don't fit its budget."""
    host.script(Turn())
    scene.kernel.arm(f"llm.complete:{point}")
    agent = scene.submit(
        PROGRAM,
        allow=["llm.complete: m", 'fs.*: "/workspace/**"'],
        more="budgets: {total: {tokens: 150, usd: 0.15}, on_exhausted: refuse}",
    )
    scene.kernel.await_hit(f"llm.complete:{point}")
    return agent


def check(scene: Scene, host: ModelHost, agent: str, asked: int, attempts: int) -> None:
    scene.await_end(agent)
    assert (scene.live(agent) / "said.txt").read_text() == "Good day."
    assert len(host.asked) == asked
    (step,) = [s for s in scene.operator.steps(agent) if s["action"] == "llm.complete"]
    assert (step["outcome"], step["attempts"], step["used"]) == ("ok", attempts, USED)
    (row,) = [a for a in scene.operator.ask("List", all=True)["agents"] if a["id"] == agent]
    assert {"tokens": row["tokens"], "usd": row["cost_usd"]} == USED
    budgets = {b["name"]: b for b in scene.operator.ask("Budget", agent=agent)["budgets"]}
    assert [(budgets[n]["used"], budgets[n]["reserved"]) for n in ("tokens", "usd")] == [
        (18, 0),
        (pytest.approx(0.018), 0),
    ]


@pytest.mark.parametrize("point", POINTS)
def test_the_kernel_is_killed(scene: Scene, host: ModelHost, point: str) -> None:
    agent = stand(scene, host, point)
    scene.kernel.kill()
    scene.kernel.disarm(f"llm.complete:{point}")
    scene.kernel.start()
    # What was asked before the kernel died is asked again, and both attempts can be seen.
    again = point in ASKED and point != "after_outcome"
    check(scene, host, agent, 2 if again else 1, 2 if point in INTENT else 1)


@pytest.mark.parametrize("point", POINTS)
def test_the_agent_is_killed(scene: Scene, host: ModelHost, point: str) -> None:
    agent = stand(scene, host, point)
    scene.kill_program(agent)
    scene.kernel.disarm(f"llm.complete:{point}")
    # The kernel finishes the call, and the next start finds its reply.
    check(scene, host, agent, 1, 1)
