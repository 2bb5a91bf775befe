"""openai-agents and Pydantic AI, unmodified: their functions run in the sandbox, the kernel's tools come to their own MCP clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.frameworks import Recipe, recipe
from support.model import Call, Turn

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def openai_agents(postgres_server: Any, template_database: str) -> Iterator[Recipe]:
    with recipe("openai-agents", postgres_server, template_database) as made:
        yield made


def calls(number: int, *named: tuple[str, dict[str, Any]], hold: bool = False) -> Turn:
    """A reply that asks for tools."""
    made = [Call(name=name, arguments=given, id=f"c{number}-{at}") for at, (name, given) in enumerate(named)]
    return Turn(calls=tuple(made), finish="tool_calls", hold=hold)


def done(scene: Any, agent: str, action: str) -> list[tuple[str, str]]:
    """What became of an agent's calls of an action."""
    steps = scene.operator.steps(agent)
    return [(step["resource"], step["outcome"]) for step in steps if step["action"] == action]


def killed_before_it_hears(recipe: Recipe, agent: str, point: str, *, kernel: bool) -> None:
    """Lets the model answer, and kills the agent, or the kernel, where a call has had its effect and nobody knows of it."""
    scene = recipe.scene
    scene.kernel.arm(point)
    recipe.host.go.set()
    recipe.reach(lambda: scene.kernel.hit(point), f"{point} is not reached")
    if kernel:
        scene.kernel.kill()
        scene.kernel.disarm(point)
        scene.kernel.start()
    else:
        scene.kill_program(agent)
        scene.kernel.disarm(point)


def test_openai_agents_hears_what_is_denied_and_is_killed_on_its_way(openai_agents: Recipe) -> None:
    scene, host = openai_agents.scene, openai_agents.host
    letter, reply = "letters/quince.txt", "out/reply.md"
    again = ("fs_append", {"path": "out/log.txt", "data_text": "."})  # meant as often as it is asked for
    host.script(
        calls(1, ("fs_read", {"path": letter})),
        calls(
            2,
            ("fs_write", {"path": letter, "data_text": "gone"}),
            ("fs_write", {"path": reply, "data_text": "Dear Mr Quince"}),
            again,
            again,
        ),
        calls(3, ("count_words", {"text": "Dear Mr Quince"}), again, hold=True),
        Turn(words=("It is ", "written.")),
    )
    agent = openai_agents.submit()
    openai_agents.held()
    scene.kill_program(agent)
    killed_before_it_hears(openai_agents, agent, "fs.append:after_outcome", kernel=False)
    openai_agents.end(agent)
    assert (scene.live(agent) / "out/log.txt").read_text() == "..."
    assert scene.output(agent) == "It is written.\n"
    # Nothing was asked twice, and each question holds what its tools had said before the kill and after it.
    assert [asked.path for asked in host.asked] == ["/v1/responses"] * 4
    results = {
        item["call_id"]: json.dumps(item["output"])
        for item in host.asked[-1].body["input"]
        if item.get("type") == "function_call_output"
    }
    assert "whistles in D flat" in results["c1-0"]
    assert "nothing allows fs.write" in results["c2-0"]
    assert "size_bytes" in results["c2-1"]
    assert results["c3-0"] == '"3"'
    written = done(scene, agent, "fs.write")
    assert written.count((f"/workspace/{reply}", "ok")) == 1
    assert set(written) == {(f"/workspace/{reply}", "ok"), (f"/workspace/{letter}", "denied")}
    assert done(scene, agent, "fs.read") == [(f"/workspace/{letter}", "ok")]
    assert "whistles" in (scene.live(agent) / letter).read_text()


def test_pydantic_ai_loses_a_right_and_is_killed_on_its_way(openai_agents: Recipe) -> None:
    clerk = openai_agents.other("pydantic-ai")
    scene, host = clerk.scene, clerk.host
    again = ("fs_append", {"path": "books/log.txt", "data_text": "."})
    host.script(
        calls(1, ("fs_read", {"path": "sales.csv"}), ("add", {"numbers": [3, 4]}), again),
        calls(2, ("fs_write", {"path": "books/stock.md", "data_text": "7 kettles"}), again),
        calls(3, ("fs_write", {"path": "notes/log.md", "data_text": "done"}), again, hold=True),
        calls(4, ("final_result", {"kettles": 7, "written": True})),
    )
    agent = clerk.submit()
    clerk.held()
    scene.operator.ask("Revoke", agent=agent, rule_or_grant='fs.write: "/workspace/notes/**"')
    scene.kill_program(agent)
    killed_before_it_hears(clerk, agent, "fs.append:before_outcome", kernel=True)
    clerk.end(agent)
    assert (scene.live(agent) / "books/log.txt").read_text() == "..."
    assert scene.output(agent) == "kettles=7 written=True\n"
    assert [asked.path for asked in host.asked] == ["/v1/chat/completions"] * 4
    results = {
        m["tool_call_id"]: m["content"] for m in host.asked[-1].body["messages"] if m["role"] == "tool"
    }
    assert "kettles,4" in results["c1-0"]
    assert results["c1-1"] == "7"
    assert "nothing allows fs.write" in results["c3-0"]
    # The first was made before the right was taken away, and not again; the second never, however often it was decided.
    first, *others = done(scene, agent, "fs.write")
    assert first == ("/workspace/books/stock.md", "ok")
    assert set(others) == {("/workspace/notes/log.md", "denied")}
    assert (scene.live(agent) / "books/stock.md").read_text() == "7 kettles"
