"""An approval is for one call of one agent, or for the same call of this agent: whoever comes from it is asked all the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import Denied
from support.kernels import eventually
from support.scenes import HOLD, Held, Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

WRITE = 'fs.write: "/workspace/data/**"'
RIGHTS = {"allow": ['spawn: "*"', 'fs.write: "/workspace/log"'], "ask": [WRITE]}
HOUR_MS = 3_600_000
FILES = {"data/once": "0", "data/lasting": "0"}


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def waiting(scene: Scene, agent: str) -> list[str]:
    return [a["id"] for a in scene.operator.ask("Approvals", agent=agent)["approvals"]]


def writes(held: Held, path: str) -> Callable[[], Any]:
    return lambda: held.rf.fs.write_text(path, "1")


def approved(held: Held, path: str, **more: Any) -> None:
    making = held.rf.thread(writes(held, path))
    eventually(lambda: len(waiting(held.scene, held.id)) == 1, "nobody is asked")
    held.operator.ask("Approve", id=waiting(held.scene, held.id)[0], **more)
    making.result()


def is_asked(held: Held, path: str) -> None:
    """The call waits for a person, and is refused by one."""
    making = held.rf.thread(writes(held, path))
    eventually(lambda: len(waiting(held.scene, held.id)) == 1, f"nobody is asked about {path}")
    held.operator.ask("Deny", id=waiting(held.scene, held.id)[0], reason="not you")
    with pytest.raises(Denied, match="not you"):
        making.result()


@pytest.fixture(scope="module")
def first(scene: Scene) -> Held:
    """An agent that was approved one call once and another for an hour."""
    held = scene.hold(files=FILES, **RIGHTS)
    held.rf.fs.write_text("log", "it begins")
    approved(held, "data/once")
    approved(held, "data/lasting", for_ms=HOUR_MS)
    writes(held, "data/lasting")()  # asks nobody
    return held


def past_of(held: Held) -> None:
    """What a copy of the first agent has to do again, to be where the first one was."""
    held.rf.fs.write_text("log", "it begins")
    for path in ("data/once", "data/lasting"):
        held.rf.thread(writes(held, path)).result()
    writes(held, "data/lasting")()


def test_once_is_once(first: Held) -> None:
    is_asked(first, "data/once")


def test_a_child_is_asked(first: Held) -> None:
    rights = {"ask": [WRITE]}
    child = first.scene.held(first.rf.spawn("child", ["sh", "-c", HOLD], permissions=rights).id)
    for path in ("data/once", "data/lasting"):
        is_asked(child, path)


def test_the_same_manifest_submitted_again_is_asked(first: Held) -> None:
    record = first.scene.sql("select manifest from agents where id = %s", first.id)[0][0]
    again = first.scene.held(first.operator.submit(record, FILES))
    for path in ("data/once", "data/lasting"):
        is_asked(again, path)


def test_a_fork_is_asked_and_answers_its_past_from_the_record(first: Held) -> None:
    scene = first.scene
    step = next(s["step"] for s in reversed(first.steps()) if s["resource"] == "/workspace/data/lasting")
    fork = scene.operator.ask("Fork", agent=first.id, at=str(step), name=scene.name("fork"), start=True)["id"]
    held = scene.held(fork)
    past_of(held)
    for path in ("data/once", "data/lasting"):
        is_asked(held, path)
    early = scene.operator.ask("Fork", agent=first.id, at="1", name=scene.name("fork"), start=True)["id"]
    held = scene.held(early)
    held.rf.fs.write_text("log", "it begins")
    for path in ("data/once", "data/lasting"):
        is_asked(held, path)


def test_an_import_is_asked(first: Held, tmp_path: Path) -> None:
    scene = first.scene
    data = ("--data", str(scene.kernel.data), "--json")
    source = scene.hold(files=FILES, **RIGHTS)
    approved(source, "data/lasting", for_ms=HOUR_MS)
    source.end()
    file = str(tmp_path / "agent.rf")
    assert console("export", source.id, "--to", file, *data).returncode == 0
    taken = console("import", file, *data)
    assert taken.returncode == 0, taken.stderr
    copy = json.loads(taken.stdout)["id"]
    assert copy != source.id
    scene.operator.ask("Start", agent=copy)
    held = scene.held(copy)
    held.rf.thread(writes(held, "data/lasting")).result()  # in its old place: from the record
    is_asked(held, "data/lasting")


def test_a_rollback_to_before_it_takes_an_approval_of_once_along(scene: Scene) -> None:
    held = scene.hold(files=FILES, **RIGHTS)
    held.rf.fs.write_text("log", "it begins")
    approved(held, "data/once")
    held.operator.ask("Rollback", agent=held.id, to="1", start=True)
    held.again()
    held.rf.fs.write_text("log", "it begins")
    assert (held.live / "data/once").read_text() == "0"
    is_asked(held, "data/once")


def test_a_child_needs_who_its_parent_needs(scene: Scene) -> None:
    more = "approvals: {people: 2, not_submitter: true}"
    parent = scene.hold(more=more, **RIGHTS)
    child = scene.held(parent.rf.spawn("child", ["sh", "-c", HOLD], permissions={"ask": [WRITE]}).id)
    making = child.rf.thread(writes(child, "data/x"))
    eventually(lambda: len(waiting(scene, child.id)) == 1, "nobody is asked")
    (id_,) = waiting(scene, child.id)
    shown = console("approvals", "approve", id_, "--data", str(scene.kernel.data))
    assert (shown.returncode, "submitted the agent" in shown.stderr) == (3, True)
    asked = scene.operator.ask("ApprovalShow", id=id_)
    assert (asked["people"], asked["state"]) == (2, "pending")
    scene.operator.ask("Deny", id=id_, reason="enough")
    with pytest.raises(Denied):
        making.result()
