"""A kernel that dies within a boundary of a direct program: nothing is half in, nothing is lost, and all of it can be taken back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import Scene, manifest_of, scene_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from test_kernel_direct import ALL, asked_of, tree

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

SCRIPT = """
set -e
if [ ! -e one ]; then
    echo 1 > one; rm gone; mkdir -p new/deep; mv from/a new/deep/a; chmod 600 kept
    rf-call state.put '{"key": "k", "value": 1}' > /dev/null
fi
if [ ! -e two ]; then
    rm -r new; echo more >> kept; echo 2 > two
    rf-call state.put '{"key": "k", "value": 2}' > /dev/null
fi
echo 3 > three
"""
FILES = {"kept": "kept\n", "gone": "gone", "from/a": "a", "from/b": "b"}
CUTS = [
    ("before_apply", "replay"),
    ("after_apply", "own"),
]


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def submit(scene: Scene, resume: str, **rules: Any) -> str:
    more = f"sandbox: {{workspace: direct}}\nrestart: {{resume: {resume}}}"
    text = manifest_of(scene.name("cut"), ["sh", "-c", 'eval "$(cat)"'], more=more, **rules)
    return scene.operator.submit(text, FILES, input_bytes=SCRIPT.encode())


@pytest.fixture(scope="module")
def uncut(scene: Scene) -> dict[str, Any]:
    """What the script leaves when nothing is in its way."""
    agent = submit(scene, "replay", allow=[*ALL, 'state.*: "**"'])
    scene.await_end(agent)
    return tree(scene.live(agent))


@pytest.mark.parametrize(("point", "resume"), CUTS)
def test_killed_within_a_boundary(scene: Scene, uncut: dict[str, Any], point: str, resume: str) -> None:
    kernel = scene.kernel
    kernel.arm(f"workspace.commit:{point}")
    agent = submit(scene, resume, allow=[*ALL, 'state.*: "**"'])
    live = scene.live(agent)
    kernel.await_hit(f"workspace.commit:{point}")
    before = tree(live)
    kernel.kill()
    kernel.disarm(f"workspace.commit:{point}")
    assert tree(live) == before
    kernel.start()
    scene.await_end(agent)
    assert tree(live) == uncut
    eventually(lambda: not (live.parent / "direct").exists(), "the overlay is still there")
    steps = scene.operator.steps(agent)
    commits = [s["outcome"] for s in steps if s["action"] == "workspace.commit" and s["rollback_point"]]
    assert commits == ["ok"] * 3
    puts = [s["outcome"] for s in steps if s["action"] == "state.put"]
    # One that resumes by itself finds the file that came before the call, as after any crash, and takes it for done.
    assert puts == ["ok"] * (1 if resume == "own" and "apply" in point else 2)
    scene.operator.ask("Rollback", agent=agent, to="0")
    assert {name: content for name, (_, content) in tree(live).items() if content is not None} == {
        name: text.encode() for name, text in FILES.items()
    }
    assert scene.operator.ask("AuditVerify")["ok"]


def test_killed_while_a_person_is_asked(scene: Scene, uncut: dict[str, Any]) -> None:
    rules: dict[str, Any] = {"allow": [*ALL, 'state.*: "**"'], "ask": ['fs.delete: "/workspace/gone"']}
    agents = [submit(scene, resume, **rules) for resume in ("own", "replay")]
    for agent in agents:
        asked_of(scene, agent)
    scene.kernel.kill()
    scene.kernel.start()
    for agent in agents:
        asked = asked_of(scene, agent)
        eventually(lambda agent=agent: scene.show(agent)["state"] == "parked", "it is not parked")
        assert scene.show(agent)["process"] == "none"
        assert not (scene.live(agent) / "one").exists()
        scene.operator.ask("Approve", id=asked["id"])
        eventually(lambda agent=agent: scene.show(agent)["state"] == "done", f"{agent} does not go on")
        assert tree(scene.live(agent)) == uncut


STRAYS = """
rf-call state.put "{\\"key\\": \\"way\\", \\"value\\": \\"$(cat /proc/sys/kernel/random/uuid)\\"}" > /dev/null
echo 1 > made
rf-call state.put '{"key": "k", "value": 1}' > /dev/null
echo ready
sleep 1000
"""


def test_one_that_takes_another_way_asks_before_it_undoes_what_it_did(scene: Scene) -> None:
    more = "sandbox: {workspace: direct}"
    text = manifest_of(
        scene.name("strays"), ["sh", "-c", 'eval "$(cat)"'], more=more, allow=[*ALL, 'state.*: "**"']
    )
    agent = scene.operator.submit(text, FILES, input_bytes=STRAYS.encode())
    eventually(lambda: "ready" in scene.output(agent), "it did not come that far")
    scene.kernel.kill()
    scene.kernel.start()
    asked = asked_of(scene, agent)
    assert asked["action"] == "workspace.commit"
    shown = scene.operator.ask("ApprovalShow", id=asked["id"])
    assert [(c["kind"], c["path"]) for c in shown["detail"]["changes"]] == [("remove", "/workspace/made")]
    why = scene.operator.ask("PolicyExplain", agent=agent, step=asked["step"])
    assert "has not asked for step" in why["reason"]
    scene.operator.ask("Deny", id=asked["id"], reason="keep it")
    eventually(lambda: scene.show(agent)["state"] == "failed", "it was not ended")
    assert (scene.live(agent) / "made").read_text() == "1\n"


SAVES = """
import os
from ringfence import agent
with agent.boot() as rf:
    print(rf.checkpoint.restored, sorted(os.listdir("."))[-1])
    if rf.checkpoint.restored is None:
        open("saved", "w").write("1")
        rf.checkpoint.save({"at": 1})
        rf.sleep(100000)
"""


@pytest.mark.parametrize("resume", ["own", "replay"])
def test_a_checkpoint_is_for_those_that_resume_by_themselves(scene: Scene, resume: str) -> None:
    more = f"sandbox: {{workspace: direct}}\nrestart: {{resume: {resume}, max: 3}}\napprovals: {{linger: 1h}}"
    agent = scene.submit(SAVES, name="saves", allow=ALL, more=more)
    if resume == "replay":
        ended = scene.operator.wait(agent)
        assert ended["state"] == "failed"
        assert "a checkpoint doesn't hold the files" in ended["error"]
        return
    eventually(lambda: scene.show(agent)["state"] == "sleeping", "it does not sleep")
    scene.kill_program(agent)
    scene.await_end(agent)
    assert scene.output(agent).splitlines() == ["None agent.py", "{'at': 1} saved"]
