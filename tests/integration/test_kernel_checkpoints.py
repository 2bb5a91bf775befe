"""Checkpoints on a real kernel: what is written follows what changed, and what is read is all of it, wherever the agent goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

SAVES = 30
PROGRAM = """
import hashlib, json
from ringfence import agent

with agent.boot() as rf:
    restored = rf.checkpoint.restored
    talk = restored["talk"] if restored else []
    print(json.dumps({"restored": talk}), flush=True)
    while len(talk) < %d:
        talk.append(hashlib.shake_256(b"%%d" %% len(talk)).hexdigest(450))
        rf.checkpoint.save({"talk": talk})
    rf.sleep(1000)
"""


def said(count: int) -> list[str]:
    return [hashlib.shake_256(b"%d" % n).hexdigest(450) for n in range(count)]


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


@pytest.fixture(scope="module")
def agent(scene: Scene) -> str:
    agent = scene.submit(PROGRAM % SAVES, more="restart: {policy: on-failure, max: 5}")
    asleep(scene, agent)
    return agent


def restored(scene: Scene, agent: str) -> list[str]:
    """What the newest process of an agent was given."""
    return scene.said(agent)[-1]["restored"]


def asleep(scene: Scene, agent: str) -> None:
    """Wait until it has saved all, and nothing of it is under way but its sleep."""

    def rests() -> bool:
        saved = [
            (s["lane_step"], s["outcome"])
            for s in scene.operator.steps(agent)
            if s["action"] == "checkpoint.save"
        ]
        return bool(saved) and saved[-1] == (SAVES - 1, "ok")

    eventually(rests, "it did not save all")


def test_each_save_costs_what_it_added(scene: Scene, agent: str) -> None:
    rows = scene.sql(
        "select octet_length(state), packing, base from checkpoints where agent = %s order by step",
        scene.key_of(agent),
    )
    sizes = [size for size, _, _ in rows]
    assert len(sizes) == SAVES
    assert sum(1 for _, _, base in rows if base is None) <= 6  # whole again each time it has doubled
    whole = sum(len(text) for text in said(SAVES))
    assert sum(sizes) < 3 * whole
    assert min(sizes[-5:]) < 2 * 900
    # The journal names the state by its hash, and does not hold it once more.
    bodies = scene.sql(
        "select max(octet_length(body)) from journal where chain = %s and action = 'checkpoint.save'",
        scene.key_of(agent),
    )
    assert bodies[0][0] < 900
    assert scene.operator.ask("AuditVerify")["ok"]


def test_a_killed_program_gets_all_of_it(scene: Scene, agent: str) -> None:
    scene.kill_program(agent)
    eventually(lambda: len(scene.said(agent)) == 2, "it was not started again")
    assert restored(scene, agent) == said(SAVES)
    asleep(scene, agent)


def test_a_rollback_goes_on_from_the_checkpoint_of_that_time(scene: Scene, agent: str) -> None:
    scene.operator.ask("Rollback", agent=agent, to="12", start=True)
    eventually(lambda: len(scene.said(agent)) == 3, "it was not started again")
    assert restored(scene, agent) == said(12)
    asleep(scene, agent)
    # What it saved from there on rests on what stands on its branch, not on what was rolled back.
    crossed = scene.sql(
        "select count(*) from checkpoints c join checkpoints b on b.agent = c.agent and b.step = c.base "
        "where c.agent = %s and c.branch <> b.branch and b.step > 12",
        scene.key_of(agent),
    )
    assert crossed == [(0,)]
    scene.kill_program(agent)
    eventually(lambda: len(scene.said(agent)) == 4, "it was not started again")
    assert restored(scene, agent) == said(SAVES)
    asleep(scene, agent)


def test_a_fork_and_a_copy_elsewhere_have_all_of_it(
    scene: Scene, agent: str, postgres_server: Any, template_database: str, tmp_path: Path
) -> None:
    fork = scene.operator.ask("Fork", agent=agent, at="10", start=True)["id"]
    eventually(lambda: len(scene.said(fork)) == 1, "the fork was not started")
    assert restored(scene, fork) == said(10)
    asleep(scene, fork)
    file = tmp_path / "agent.rf"
    exported = console("export", fork, "--to", str(file), "--data", str(scene.kernel.data))
    assert exported.returncode == 0, exported.stderr
    with scene_of_its_own(postgres_server, template_database) as other:
        done = console("import", str(file), "--json", "--data", str(other.kernel.data))
        assert done.returncode == 0, done.stderr
        copy = json.loads(done.stdout)["id"]
        other.operator.ask("Start", agent=copy)
        eventually(lambda: len(other.said(copy)) == 1, "the copy was not started")
        assert restored(other, copy) == said(SAVES)
        asleep(other, copy)
