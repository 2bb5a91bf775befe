"""LangGraph, unmodified, with a checkpointer of the kernel's: killed, a graph goes on at its last superstep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.frameworks import SITE, Recipe, recipe
from support.model import Turn
from support.scenes import manifest_of

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]

CONFORMANCE = Path(__file__).with_name("langgraph_conformance.py")


@pytest.fixture(scope="module")
def langgraph(postgres_server: Any, template_database: str) -> Iterator[Recipe]:
    with recipe("langgraph", postgres_server, template_database) as made:
        yield made


def test_a_graph_that_ran_out_of_its_budget_and_was_killed_goes_on_where_it_was(langgraph: Recipe) -> None:
    scene, host = langgraph.scene, langgraph.host
    host.script(
        Turn(words=("Dear Mr Quince, …",), usage=(9000, 100)), Turn(words=("We are sorry.",), hold=True)
    )
    agent = langgraph.submit(changed=lambda text: text.replace("python3.11", SITE))
    langgraph.end(agent, "parked")
    assert len(host.asked) == 1
    scene.operator.ask("Budget", agent=agent, name="tokens", value="40k")
    langgraph.held()
    scene.kill_program(agent)
    host.go.set()
    langgraph.end(agent)
    # The first node did not run again; the second asked again what was on record.
    assert scene.said(agent) == [
        {"write": {"draft": "Dear Mr Quince, …"}},
        {"polish": {"answer": "We are sorry."}},
        {"file": None},
    ]
    assert len(host.asked) == 2
    assert (scene.live(agent) / "out/letters.md").read_text() == "We are sorry.\n"
    assert [step["outcome"] for step in scene.operator.steps(agent) if step["action"] == "fs.append"] == [
        "ok"
    ]


def test_the_checkpointer_passes_the_tests_that_langgraph_has_for_them(langgraph: Recipe) -> None:
    scene = langgraph.scene
    more = f"sandbox: {{mounts: [{langgraph.place}], memory: 512Mi}}"
    manifest = manifest_of("conformance", ["python", "agent.py"], more=more).replace(
        "run: {", f"run: {{env: {{PYTHONPATH: {langgraph.place}/lib/{SITE}/site-packages}}, "
    )
    agent = scene.operator.submit(manifest, {"agent.py": CONFORMANCE.read_text()})
    langgraph.end(agent)
    kept, beside, *results = sorted(
        scene.said(agent), key=lambda line: ("kept", "beside", line[0]).index(line[0])
    )
    assert kept == ["kept", {"total": 5, "old": 4}, 2, True]
    # Nothing is saved while another graph is at work; the end of each superstep is, when one is alone.
    _, meanwhile, alone = beside
    assert meanwhile == 0 < alone
    said = {name: (passed, failures) for name, passed, _, failures in results}
    assert sum(count for _, _, count, _ in results) > 50
    required = {"put", "put_writes", "get_tuple", "list", "delete_thread"}
    assert {name: said[name] for name in required} == dict.fromkeys(required, (True, []))
    # Savers may leave these out, and LangGraph's own in memory does.
    assert {name for name, (passed, _) in said.items() if passed is None} == set(said) - required
