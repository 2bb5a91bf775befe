"""The same effect, made again on purpose in a graph of LangGraph: whoever is killed, and wherever, each is made, and none twice.

The observer is the bank: it counts what it was sent, by the key that the kernel gave each payment.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.frameworks import SITE, Recipe, recipe
from support.model import Turn
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("langgraph_effects.py")
BANK = """    bank: {{type: http, base: "{base}", idempotency_header: Idempotency-Key}}
"""
PAID = [
    *["left 200", "right 200", "right 200"],
    *["more 200"] * 3,
    *["outer 200", "inner 200", "inner 200", "outer 200"],
]
CUTS = [
    # Two tasks beside each other: both have paid or are about to, and nothing of the superstep is saved.
    ("http.post:after_outcome", "agent"),
    ("http.post:before_outcome", "kernel"),
    # The superstep has ended, and its checkpoint is not saved yet.
    ("checkpoint.save:before_intent", "agent"),
    # In a turn of the loop, behind the same payment of others.
    ("http.post:before_outcome", "kernel"),
    # Behind one turn, before the next.
    ("checkpoint.save:after_outcome", "agent"),
    ("http.post:after_effect", "agent"),
]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("bank") / "sent")
    yield target
    target.close()


@pytest.fixture(scope="module")
def graph(postgres_server: Any, template_database: str, bank: Target) -> Iterator[Recipe]:
    more = BANK.format(base=bank.base)
    with recipe("langgraph", postgres_server, template_database, resources=more) as made:
        yield made


def submitted(graph: Recipe, bank: Target, name: str, more: str = "", **env: str) -> str:
    """The graph of this test with the example's manifest, and the right to pay."""

    def changed(text: str) -> str:
        said = "".join(f"      {key}: {value}\n" for key, value in {"BANK": bank.base, **env}.items())
        text = text.replace("name: langgraph", f"name: {name}").replace("python3.11", SITE)
        text = text.replace("    env:\n", f"    env:\n{said}")
        text = text.replace("    allow:\n", f'    allow:\n      - http.post: "{bank.base}/**"\n')
        return text + more

    return graph.submit(changed=changed, files={"agent.py": PROGRAM.read_text()})


def keys(bank: Target) -> list[str]:
    return [sent["headers"]["idempotency-key"] for sent in bank.deliveries("/pay")]


def test_what_a_graph_does_again_on_purpose_is_done_as_often_and_no_more(graph: Recipe, bank: Target) -> None:
    scene, kernel = graph.scene, graph.scene.kernel
    graph.host.script(Turn(words=("more",)))
    agent = submitted(graph, bank, "effects")
    for point, killed in CUTS:
        kernel.arm(point)
        graph.reach(lambda point=point: kernel.hit(point), f"{point} is not reached")
        if killed == "agent":
            scene.kill_program(agent)
        else:
            kernel.kill()
        kernel.disarm(point)
        if killed == "kernel":
            kernel.start()
    graph.end(agent)
    assert scene.said(agent) == [PAID]
    assert len(set(keys(bank))) == len(PAID)
    assert len(graph.host.asked) == 3
    posts = [step for step in scene.operator.steps(agent) if step["action"] == "http.post"]
    assert [step["outcome"] for step in posts] == ["ok"] * len(PAID)
    # Whoever goes on from within it comes to the same payments, and they are recognised as made.
    scene.operator.ask("Rollback", agent=agent, to=str(posts[1]["step"]), start=True)
    fork = scene.operator.ask("Fork", agent=agent, at=str(posts[4]["step"]), name="fork", start=True)["id"]
    for one in (agent, fork):
        graph.end(one)
        assert scene.said(one)[-1] == PAID
    assert len(set(keys(bank))) == len(PAID)


def test_a_graph_that_would_go_on_while_it_is_saved_is_refused(graph: Recipe, bank: Target) -> None:
    sent = len(keys(bank))
    agent = submitted(graph, bank, "hasty", "  restart: {policy: never}\n", DURABILITY="async")
    graph.end(agent, "failed")
    assert 'say `durability="sync"`' in graph.scene.output(agent, stderr=True)
    assert len(keys(bank)) == sent
