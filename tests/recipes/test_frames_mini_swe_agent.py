"""mini-swe-agent, unmodified: its shell works on the judged overlay, its model is the gateway's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.frameworks import Recipe, recipe
from support.model import Call, Turn

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]

MEND = "sed -i 's/- 32/+ 32/' convert.py && echo mended >> notes.txt && python check.py"


@pytest.fixture(scope="module")
def mini(postgres_server: Any, template_database: str) -> Iterator[Recipe]:
    with recipe("mini-swe-agent", postgres_server, template_database) as made:
        yield made


def bash(command: str, number: int, *, hold: bool = False) -> Turn:
    call = Call(name="bash", arguments={"command": command}, id=f"c{number}")
    return Turn(calls=(call,), finish="tool_calls", hold=hold)


def test_it_mends_a_program_and_is_killed_on_its_way(mini: Recipe) -> None:
    scene, host = mini.scene, mini.host
    host.script(
        bash("python check.py", 1),
        bash(MEND, 2),
        bash("echo mended >> notes.txt && cat notes.txt", 3, hold=True),  # again, and meant so
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", 4),
    )
    agent = mini.submit()
    mini.held()
    live = scene.live(agent)
    before = (mini.directory / "convert.py").read_text()
    # What its shell did is taken in before the model is asked again.
    mended = before.replace("- 32", "+ 32")
    assert (live / "convert.py").read_text() == mended
    scene.kill_program(agent)
    host.go.set()
    mini.end(agent)
    # Nothing was asked twice: what had been answered came from the record, the one under way found its reply.
    said = [asked.body["messages"][-1]["content"] for asked in host.asked]
    assert len(said) == 4
    assert "100 C are 212 F, not 148" in said[1]
    assert "all well" in said[2]
    assert said[3].count("mended") == 2
    # Its commands ran again on the workspace as submitted, and changed nothing twice.
    assert (live / "notes.txt").read_text() == "mended\n" * 2
    steps = scene.operator.steps(agent)
    assert [(step["action"], step["resource"]) for step in steps] == [
        *[("llm.complete", "small-1")] * 2,
        ("workspace.commit", "before llm.complete"),
        ("llm.complete", "small-1"),
        ("workspace.commit", "before llm.complete"),
        ("llm.complete", "small-1"),
    ]
    assert {step["attempts"] for step in steps} == {1}
    scene.operator.ask("Rollback", agent=agent, to="0")
    assert (live / "convert.py").read_text() == before
    assert not (live / "notes.txt").exists()
