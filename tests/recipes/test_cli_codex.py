"""Codex, as npm has it, inside: it mends a repository at the word of a scripted model over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.model import Call, Turn
from support.repairs import (
    MAY_WAIT,
    PATIENCE_S,
    WAITS,
    attempts,
    comes_to,
    commits,
    held,
    kernel_of,
    kill_parent,
    killed_before_its_report,
    manifest,
    repository,
    tree,
)
from support.scenes import Scene
from support.vendors import SEARCH, Talker, results

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(600)]

REPORT = "exec.run:after_outcome"
"""Where a command has run, and its program does not know of it."""
EXAMPLE = "codex"
PATCH = """*** Begin Patch
*** Update File: sums.py
@@
-    return a - b
+    return a + b
*** End Patch"""


def run(command: str) -> Turn:
    return Turn(words=("I run it.",), calls=(Call(name="exec_command", arguments={"cmd": command}),))


TRY = run("python3 test_sums.py; cat sums.py")
MEND = Turn(words=("I mend it.",), calls=(Call(name="apply_patch", arguments=PATCH),))
COMMIT = run("python3 test_sums.py && git commit -qam 'Add, not subtract' && git log --oneline" + WAITS)

HOOK = run("echo true > .git/hooks/post-commit; rf-call workspace.commit '{}' || rm .git/hooks/post-commit")
FIND = Turn(
    words=("I look.",),
    calls=(Call(name=SEARCH, arguments={"query": "read write files, run commands", "limit": 20}),),
)


def tool(name: str, **arguments: Any) -> Turn:
    call = Call(name=name, arguments=arguments, namespace="mcp__ringfence")
    return Turn(words=("I use it.",), calls=(call,))


RUN_TEST = tool("exec_run", argv=["python3", "test_sums.py"])
READ = tool("fs_read", path="/workspace/sums.py")
WRITE = tool(
    "fs_write", path="/workspace/sums.py", data_text="def add(a: int, b: int) -> int:\n    return a + b\n"
)
PUSH = tool("exec_run", argv=["git", "push", "origin", "main"])
RECORD = tool("exec_run", argv=["git", "commit", "-qam", "Add, not subtract"])
DONE = Turn(words=("It is mended.",))


@pytest.fixture(scope="module")
def host() -> Iterator[Talker]:
    host = Talker()
    yield host
    host.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, host: Talker) -> Iterator[Scene]:
    with kernel_of(EXAMPLE, host, postgres_server, template_database) as scene:
        yield scene


def test_it_mends_a_repository_whoever_is_killed(scene: Scene, host: Talker, tmp_path: Path) -> None:
    host.script(TRY, MEND, COMMIT, replace(DONE, hold=True))
    agent = scene.operator.submit(manifest(EXAMPLE, "mends", rule=MAY_WAIT), repository(EXAMPLE, tmp_path))
    before = tree(scene.live(agent))
    # The agent alone dies, while its commit is made and its shell has not ended; and its sandbox's parent, while its model thinks.
    killed_before_its_report(scene, agent)
    held(host)
    assert commits(scene.live(agent)) == ["Add, not subtract", "Begin"]
    assert host.twice() == []
    kill_parent(scene, agent)
    scene.kernel.kill()
    host.go.set()
    scene.kernel.start()
    comes_to(scene, agent, "done")
    assert scene.output(agent).splitlines()[-1] == "It is mended."
    assert commits(scene.live(agent)) == ["Add, not subtract", "Begin"]
    # Only the call that was cut before its reply was recorded is sent again, and `steps` says so.
    assert host.twice() == [3]
    assert attempts(scene, agent) == [1, 1, 1, 2]
    scene.operator.ask("Rollback", agent=agent, to="0")
    assert tree(scene.live(agent)) == before


def test_rules_a_budget_and_a_revocation_stop_it(scene: Scene, host: Talker, tmp_path: Path) -> None:
    dear = (20_000, 60_000)  # three of these, and a fourth is more than the manifest's two dollars
    host.script(*(replace(turn, usage=dear) for turn in (HOOK, TRY, MEND)), replace(TRY, hold=True), DONE)
    text = manifest(EXAMPLE, "stopped", ends="  restart:\n =>   restart:\n    policy: never\n")
    agent = scene.operator.submit(text, repository(EXAMPLE, tmp_path))
    comes_to(scene, agent, "parked")
    assert [len(results(body)) for body in host.talks()] == [0, 1, 2]
    # The program asked for its changes to be taken in, read what it may not, undid that and went on.
    assert "denied by rule" in results(host.talks()[1])[0]
    live = scene.live(agent)
    assert not (live / ".git/hooks/post-commit").exists()
    assert "a + b" in (live / "sums.py").read_text()
    scene.operator.ask("Budget", agent=agent, name="usd", value="10")
    held(host)
    scene.operator.ask("Revoke", agent=agent, rule_or_grant='llm.complete: {models: ["gpt-*"]}')
    host.go.set()
    comes_to(scene, agent, "failed")
    assert "nothing allows llm.complete" in scene.output(agent) + scene.output(agent, stderr=True)
    assert [len(results(body)) for body in host.talks()] == [0, 1, 2, 3], scene.show(agent)


def test_tools_of_the_kernel_in_place_of_its_own(scene: Scene, host: Talker, tmp_path: Path) -> None:
    host.script(
        FIND, RUN_TEST, READ, WRITE, PUSH, replace(RECORD, hold=True), replace(WRITE, hold=True), DONE
    )
    text = manifest(EXAMPLE, "tools", file="with-tools.yaml")
    agent = scene.operator.submit(text, repository(EXAMPLE, tmp_path))
    before = tree(scene.live(agent))
    held(host)
    # The agent alone dies, while its commit is made and not reported, and once more while its model thinks.
    scene.kernel.arm(REPORT)
    host.release()
    eventually(lambda: scene.kernel.hit(REPORT), "nothing is reported", within_s=PATIENCE_S)
    scene.kill_program(agent)
    scene.kernel.disarm(REPORT)
    held(host)
    assert host.twice() == []
    scene.kill_program(agent)
    scene.kernel.kill()
    scene.kernel.start()
    eventually(lambda: len(host.talks()) == 8, "it did not come back", within_s=PATIENCE_S)
    scene.operator.ask("Revoke", agent=agent, rule_or_grant='fs.write: "/workspace/**"')
    host.go.set()
    comes_to(scene, agent, "done")
    assert host.twice() == [6]
    assert attempts(scene, agent) == [1, 1, 1, 1, 1, 1, 2, 1]
    assert not {"exec_command", "shell"} & {tool.get("name") for tool in host.talks()[0]["tools"]}
    told = results(host.talks()[-1])
    assert "denied by rule" in told[4]
    assert "Denied" in told[6]
    assert commits(scene.live(agent)) == ["Add, not subtract", "Begin"]
    ran = [step["resource"] for step in scene.operator.steps(agent) if step["action"] == "exec.run"]
    assert ran.count("git commit -qam 'Add, not subtract'") == ran.count("python3 test_sums.py") == 1
    scene.operator.ask("Rollback", agent=agent, to="0")
    assert tree(scene.live(agent)) == before
