"""Programs behind doors are known again by what they ask: what may vary, what differs is shown, and what is never made twice."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.model import Turn
from support.scenes import Scene, scene_of_its_own
from support.vendors import VendorHost

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

PROGRAMS = Path(__file__).parent / "doors"
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources: {{openai: {{type: llm, base: "{base}", models: ["gpt-*"]}}}}
"""
ALLOW = ['llm.complete: {models: ["gpt-*"]}', 'messages.receive: "*"']
DOORS = "sandbox: {doors: [models]}"
IGNORE = "restart: {ignore: [{pattern: '[0-9]{19}|/tmp/[a-z0-9_]+'}, {at: /extra/user}]}"


@pytest.fixture(scope="module")
def host() -> Iterator[VendorHost]:
    host = VendorHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, host: VendorHost) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG.format(base=host.base)) as scene:
        yield scene


@pytest.fixture(autouse=True)
def fresh(host: VendorHost) -> None:
    host.script()


def asked(host: VendorHost) -> list[str]:
    """The last word of each request, in the order in which the host had them."""
    return [one.body["messages"][-1]["content"].split()[-1] for one in host.asked]


def models(scene: Scene, agent: str) -> list[dict[str, Any]]:
    return [step for step in scene.operator.steps(agent) if step["action"] == "llm.complete"]


def git(tree: Path, *words: str) -> str:
    argv = ["git", "-c", "safe.directory=*", *words]
    return subprocess.run(argv, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()


def waiting(scene: Scene, agent: str) -> list[dict[str, Any]]:
    return scene.operator.ask("Approvals", agent=agent)["approvals"]


def test_what_the_manifest_ignores_varies_and_the_record_answers(scene: Scene, host: VendorHost) -> None:
    host.script(*(Turn(words=(word,)) for word in ("one", "two", "three", "four")))
    program = (PROGRAMS / "varied.py").read_text()
    agent = scene.submit(program, allow=ALLOW, more=f"{DOORS}\n{IGNORE}")
    eventually(lambda: len(scene.said(agent)) == 2, "the program said nothing")
    scene.kill_program(agent)
    eventually(lambda: len(scene.said(agent)) == 4, "the program was not started again")
    # The kernel dies while a request is under way, which is the only one that is sent again: as it was recorded.
    host.script(Turn(words=("lost",), hold=True), Turn(words=("three",)))
    scene.operator.ask("Send", agent=agent, text="go")
    eventually(lambda: len(host.asked) == 1, "nothing was asked")
    scene.kernel.kill()
    host.go.set()
    scene.kernel.start()
    scene.await_end(agent)
    assert scene.said(agent) == [["first", "one"], ["second", "two"]] * 3 + [["go", "three"]]
    # Each was sent whole.
    assert host.asked[0].body == host.asked[1].body
    assert host.asked[0].body["user"]
    assert [(step["lane_step"], step["attempts"]) for step in models(scene, agent)] == [
        (0, 1),
        (1, 1),
        (0, 2),
    ]


def test_what_differs_is_shown_and_what_destroys_after_it_is_asked(scene: Scene, host: VendorHost) -> None:
    host.script(Turn(words=("stay",)), Turn(words=("go",)))
    program = (PROGRAMS / "wayward.py").read_text()
    allow = [*ALLOW, 'fs.*: "/workspace/**"']
    agent = scene.submit(program, files={"a.txt": "a\n"}, allow=allow, more=DOORS)
    eventually(lambda: bool(scene.said(agent)), "the program said nothing")
    assert scene.show(agent)["strays"] == []
    scene.kill_program(agent)
    eventually(lambda: bool(waiting(scene, agent)), "nothing was asked")
    (approval,) = waiting(scene, agent)
    assert approval["action"] == "fs.delete"
    assert "took another way" in str(scene.operator.ask("ApprovalShow", id=approval["id"])["why"])
    assert len(host.asked) == 2
    first, *_ = scene.show(agent)["strays"]
    (differs,) = first.pop("differences")
    assert first == {
        "step": 2,
        "action": "llm.complete",
        "recorded_step": 1,
        "recorded_action": "llm.complete",
        "more": 0,
        "left": 1,
    }
    assert differs["at"] == "/messages/0/content"
    was, now = (asked.body["messages"][0]["content"].split()[6].rstrip(",") for asked in host.asked)
    assert was in differs["recorded"]
    assert now in differs["made"]
    assert "in this tree" not in differs["made"]
    assert (scene.live(agent) / "a.txt").exists()
    scene.operator.ask("Approve", id=approval["id"])
    # It is parked for a moment yet: the kernel makes the call after the command has its answer.
    eventually(lambda: scene.show(agent)["state"] == "done", "the approved call was not made")
    assert scene.said(agent)[-1] == ["removed", False]
    assert not (scene.live(agent) / "a.txt").exists()


REPOSITORY = """
set -e
export GIT_CONFIG_GLOBAL=/dev/null
git init -q -b main . && git add a.txt && git -c user.name=a -c user.email=a@b commit -qm first
"""
CODER = """
sandbox: {workspace: direct, doors: [models, mcp]}
restart: {policy: never, ignore: [{pattern: '[0-9]{19}|[0-9a-f]{7,40}'}, {at: /extra/user}]}
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_history_is_not_rewritten_by_doing_it_again(scene: Scene, host: VendorHost, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("broken\n")
    subprocess.run(["sh", "-c", REPOSITORY], cwd=tmp_path, check=True)
    files = {str(f.relative_to(tmp_path)): f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    # Never twice the same, however fast it is made again.
    commit = "git -c user.name=a -c user.email=$(date +%N)@b commit -qam fix; git rev-parse HEAD"
    look, lost = Turn(hold=True), Turn(hold=True)
    host.script(
        Turn(words=("echo mended > a.txt",)), Turn(words=(commit,)), look, lost, Turn(words=("done",))
    )
    allow = [*ALLOW, 'fs.*: "/workspace/**"', 'state.*: "coder/*"']
    agent = scene.submit((PROGRAMS / "coder.py").read_text(), files=files, allow=allow, more=CODER)
    eventually(lambda: len(host.asked) == 3, "the model was not asked")
    live = scene.live(agent)
    first = git(live, "rev-parse", "HEAD")
    look.words = (f"git cat-file -t {first}; git rev-parse HEAD; echo more >> a.txt",)
    # The agent dies while a model thinks: the kernel takes the answer, and nothing is sent again.
    scene.kill_program(agent)
    host.go.set()
    eventually(lambda: scene.show(agent)["state"] == "failed", "it did not end")
    assert models(scene, agent)[-1]["outcome"] == "ok"
    host.go.clear()
    scene.operator.ask("Start", agent=agent)
    eventually(lambda: len(host.asked) == 4, "it does not go on")
    said = scene.said(agent)
    assert said[1][2].strip() == first
    # The tool had another result now, and the program goes on with what was recorded.
    assert said[3][2].strip() != first
    assert said[4][1:] == [0, f"commit\n{first}\n", ""]
    # The kernel dies while a model thinks: that request alone is sent again.
    scene.kernel.kill()
    host.go.set()
    scene.kernel.start()
    scene.await_end(agent)
    assert len(host.asked) == 5
    assert [step["attempts"] for step in models(scene, agent)] == [1, 1, 1, 2]
    assert [said[1] for said in scene.said(agent)[-3:]] == [0, 0, 0]
    assert git(live, "log", "--format=%H %s").splitlines()[0] == f"{first} fix"
    assert git(live, "rev-list", "--count", "HEAD") == "2"
    assert (live / "a.txt").read_text() == "mended\nmore\n"
    puts = [step["resource"] for step in scene.operator.steps(agent) if step["action"] == "state.put"]
    assert puts == ["coder/1", "coder/3", "coder/5"]
    assert scene.show(agent)["strays"] == []
    # A copy of it goes through the same past, and comes to the same end without a model.
    last = str(scene.operator.steps(agent)[-1]["step"])
    copy = scene.operator.ask("Fork", agent=agent, at=last, name=scene.name("fork"), start=True)["id"]
    scene.await_end(copy)
    assert len(host.asked) == 5
    assert git(scene.live(copy), "rev-parse", "HEAD") == first
