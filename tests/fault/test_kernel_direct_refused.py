"""A direct program that was refused something and goes through its past again: its files are those of then, around the refusal too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import Scene, manifest_of, scene_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from test_kernel_direct import ALL, tree

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

# What a second run makes is never what the first had made, as with a commit.
MAKE = "made() { cat /proc/sys/kernel/random/uuid > $1; }\n"
PUT = """rf-call state.put '{"key": "%s", "value": 1}' > /dev/null"""
REFUSED_IN_THE_MIDDLE = f"""
{MAKE}
made one
{PUT % "free"}
made two
{PUT % "kept"} && echo allowed || echo refused
made three
{PUT % "free2"}
cat one two three; echo ready
rf-call messages.receive '{{}}' > /dev/null
made four
"""
REFUSED_AT_LAST = f"""
{MAKE}
made one
{PUT % "kept"} && echo allowed || echo refused
cat one; echo ready
rf-call messages.receive '{{}}' > /dev/null
made two
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def submit(scene: Scene, script: str) -> str:
    more = "sandbox: {workspace: direct}\nrestart: {policy: on-failure}"
    rules = [*ALL, 'state.put: "free"', 'state.put: "free2"', 'messages.receive: "*"']
    text = manifest_of(scene.name("refused"), ["sh", "-c", 'eval "$(cat)"'], more=more, allow=rules)
    return scene.operator.submit(text, {}, input_bytes=script.encode())


def killed(scene: Scene, agent: str, how: str) -> None:
    """The program, or its kernel with it, dies; it has come to the same place again when this returns."""
    if how == "kernel":
        scene.kernel.kill()
        scene.kernel.start()
    else:
        scene.kill_program(agent)
    eventually(lambda: scene.output(agent).count("ready") == 2, "it did not come there again")


@pytest.mark.parametrize("how", ["program", "kernel"])
def test_a_refusal_in_the_middle_keeps_its_place(scene: Scene, how: str) -> None:
    agent = submit(scene, REFUSED_IN_THE_MIDDLE)
    eventually(lambda: "ready" in scene.output(agent), "it did not come that far")
    before, steps = tree(scene.live(agent)), scene.operator.steps(agent)
    # It would be allowed now; what the program did after it rests on its refusal.
    scene.operator.ask("Grant", agent=agent, rule='state.put: "kept"')
    killed(scene, agent, how)
    assert tree(scene.live(agent)) == before
    first, second, _ = scene.output(agent).split("ready\n")
    assert (second, first.splitlines()[0]) == (first, "refused")
    # Nothing was made once more, and nothing is recorded twice.
    assert [s["step"] for s in scene.operator.steps(agent)] == [s["step"] for s in steps]
    scene.operator.ask("Send", agent=agent, text="go on")
    scene.await_end(agent)
    after = tree(scene.live(agent))
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"four"}


def test_a_refusal_at_last_is_decided_once_more_on_the_files_of_then(scene: Scene) -> None:
    agent = submit(scene, REFUSED_AT_LAST)
    eventually(lambda: "ready" in scene.output(agent), "it did not come that far")
    before = tree(scene.live(agent))
    assert set(before) == {"one"}
    scene.operator.ask("Grant", agent=agent, rule='state.put: "kept"')
    killed(scene, agent, "program")
    said = scene.output(agent)
    assert (said.count("refused"), said.count("allowed")) == (1, 1)
    assert tree(scene.live(agent)) == before
    assert said.splitlines()[-2] == before["one"][1].decode().strip()
    scene.operator.ask("Send", agent=agent, text="go on")
    scene.await_end(agent)
    assert tree(scene.live(agent))["one"] == before["one"]
