"""`rm` on a real kernel: only what has ended, nothing half, and the evidence stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import NoSuchResource
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

ALL = ['fs.*: "/workspace/**"', 'memory.*: "**"', 'artifacts.*: "**"', 'state.*: "**"', 'messages.*: "**"']


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def busy(scene: Scene) -> Held:
    held = scene.hold(name="rm", allow=ALL, ask=['fs.delete: "/workspace/asked"'], files={"asked": "x"})
    held.rf.fs.write_text("a", "1")
    held.rf.memory.append("a secret of its own")
    held.rf.artifacts.put("report", b"x" * 9000)
    held.rf.checkpoint.save({"at": 1})
    held.operator.ask("Send", agent=held.id, text="never read")
    return held


def traces(scene: Scene, key: int) -> dict[str, int]:
    """Rows about an agent, by table."""
    found: dict[str, int] = {}
    for table, column in (
        ("memories", "agent"),
        ("artifacts", "agent"),
        ("checkpoints", "agent"),
        ("schedules", "agent"),
    ):
        found[table] = scene.sql(f"select count(*) from {table} where {column} = %s", key)[0][0]
    found["messages"] = scene.sql("select count(*) from messages where recipient = %s and body <> ''", key)[
        0
    ][0]
    found["waiting"] = scene.sql(
        "select count(*) from messages where recipient = %s and taken_step is null and voided_at is null", key
    )[0][0]
    found["grants"] = scene.sql("select count(*) from grants where agent = %s and revoked_at is null", key)[
        0
    ][0]
    found["approvals"] = scene.sql(
        "select count(*) from approvals where agent = %s and state = 'pending'", key
    )[0][0]
    return found


def places(scene: Scene, agent: str) -> list[str]:
    return [kind for kind in ("agents", "points") if (scene.kernel.data / kind / agent).exists()]


def ask_in_vain(scene: Scene, agent: str) -> None:
    with pytest.raises(Refused):
        scene.operator.ask("Remove", agent=agent)


def test_what_has_ended_is_forgotten_and_its_evidence_stays(scene: Scene) -> None:
    held = busy(scene)
    key = scene.key_of(held.id)
    name = scene.show(held.id)["name"]
    with pytest.raises(Refused) as caught:
        held.operator.ask("Remove", agent=held.id)
    assert caught.value.exit_code == 5
    assert f"ringfence kill {held.id}" in str(caught.value)
    held.end()
    assert set(traces(scene, key).values()) != {0}
    done = scene.operator.ask("Remove", agent=name)
    assert done["id"] == held.id
    assert done["freed_bytes"] > 0
    assert (
        done["forgotten"]["messages"] == done["forgotten"]["memories"] == done["forgotten"]["artifacts"] == 1
    )
    assert set(traces(scene, key).values()) == {0}
    assert places(scene, held.id) == []
    assert held.id not in {a["id"] for a in scene.operator.ask("List", all=True)["agents"]}
    for method in ("Show", "Start", "Pause", "Points", "PolicyShow"):
        with pytest.raises(Refused) as caught:
            scene.operator.ask(method, agent=held.id)
        assert caught.value.exit_code == 4
    # What it did is on record: its chain ends with its removal.
    records = scene.operator.stream("Audit", agent=held.id)
    assert records[-1]["action"] == "agent.removed"
    assert [s["action"] for s in scene.operator.steps(held.id)][:2] == ["fs.write", "memory.append"]
    assert scene.operator.ask("AuditVerify")["ok"]
    # The name is free again.
    other = scene.operator.submit(
        f"apiVersion: ringfence/v1\nkind: Agent\nmetadata: {{name: {name}}}\nspec: {{run: {{command: ['true']}}}}\n",
        {},
    )
    assert scene.show(name)["id"] == other
    sender = scene.hold(allow=ALL)
    sender.refused(NoSuchResource, lambda: sender.rf.messages.send(held.id, "are you there?"))


def test_a_removal_that_a_crash_cut_short_is_finished_by_the_next(scene: Scene) -> None:
    held = busy(scene)
    held.end()
    key = scene.key_of(held.id)
    scene.kernel.arm("rm:before_files")
    lost = threading.Thread(target=ask_in_vain, args=(scene, held.id))
    lost.start()
    scene.kernel.await_hit("rm:before_files")
    scene.kernel.kill()
    lost.join()
    scene.kernel.disarm("rm:before_files")
    assert set(traces(scene, key).values()) == {0}  # forgotten as a whole
    assert places(scene, held.id) == ["agents", "points"]
    scene.kernel.start()
    assert scene.operator.ask("Remove", agent=held.id)["freed_bytes"] > 0
    assert places(scene, held.id) == []
    assert scene.operator.ask("Remove", agent=held.id)["freed_bytes"] == 0  # once more changes nothing
    eventually(lambda: scene.operator.ask("AuditVerify")["ok"], "the chains are whole")


def test_a_call_that_waits_for_a_person_ends_with_its_agent(scene: Scene) -> None:
    program = """
import os
from ringfence import agent
with agent.boot() as rf:
    rf.thread(lambda: rf.fs.delete("asked"))
    while rf.fs.stat("asked").size_bytes != 2:
        pass
    os._exit(3)
"""
    ask = ['fs.delete: "/workspace/asked"']
    more = "restart: {policy: never}"
    agent = scene.submit(program, allow=ALL, ask=ask, files={"asked": "x"}, more=more)

    def waiting() -> list[dict[str, Any]]:
        return [a for a in scene.operator.ask("Approvals")["approvals"] if a["agent"] == agent]

    eventually(lambda: bool(waiting()), "no approval came")
    (scene.live(agent) / "asked").write_text("xx")
    eventually(lambda: scene.show(agent)["state"] == "failed", "the agent did not fail")
    (approval,) = waiting()
    scene.operator.ask("Remove", agent=agent)
    assert waiting() == []
    state = scene.sql("select state from approvals where key = %s", int(approval["id"][1:]))
    assert state == [("voided",)]
    with pytest.raises(Refused) as caught:
        scene.operator.ask("Approve", id=approval["id"])
    assert caught.value.exit_code in (4, 5)
    assert places(scene, agent) == []
    assert scene.operator.ask("AuditVerify")["ok"]


def test_nothing_is_removed_that_is_not_there(scene: Scene) -> None:
    with pytest.raises(Refused) as caught:
        scene.operator.ask("Remove", agent="nobody")
    assert caught.value.exit_code == 4
