"""Points are pruned from the oldest on; what stays goes back exactly, what is gone is refused by name, and the audit has it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from ringfence.kernel.operations import points
from ringfence.kernel.problems import Problem
from ringfence.kernel.retention import Retention
from ringfence.policy.keeping import PointsKept
from ringfence.sandbox.snapshots import SnapshotStore
from support.heart import Heart, heart_on
from support.kernels import Refused
from support.scenes import Held, Scene, console, scene_of_its_own, short_directory

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

FILES = ['fs.*: "/workspace/**"']
BIG = 20_000
"""Bytes that a manifest does not hold itself."""


@pytest.fixture(scope="module")
def scene(postgres_server: object, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def writer(scene: Scene) -> Held:
    """Five writes, of which the first and the fourth replace the same content."""
    held = scene.hold(allow=FILES, files={"a": "0" * BIG, "b": "0" * BIG})
    for name, text in (("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("b", "5")):
        held.rf.fs.write_text(name, text * BIG)
    return held


def blobs(scene: Scene, agent: str) -> int:
    return len(list((scene.kernel.data / "points" / agent / "blobs").glob("??/*")))


@pytest.mark.sandbox
def test_what_stays_is_whole_and_what_is_gone_is_refused(scene: Scene) -> None:
    held = writer(scene)
    ask = held.operator.ask
    assert [p["id"] for p in ask("Points", agent=held.id)["points"]] == ["p1", "p2", "p3", "p4", "p5"]
    assert blobs(scene, held.id) == 4  # 0, 1, 2, 4
    done = ask("PrunePoints", agent=held.id, keep=2)
    assert (done["pruned"], done["kept"], done["before_step"]) == (["p1", "p2", "p3"], 2, 4)
    assert done["freed_bytes"] > 2 * BIG
    assert blobs(scene, held.id) == 2  # what the fourth needs stays, though the first had it too
    points = ask("Points", agent=held.id, verify=True)["points"]
    assert [(p["id"], p["verified"]) for p in points] == [("p4", True), ("p5", True)]
    for to in ("0", "2", "p3"):
        with pytest.raises(Refused, match=r"p3 was pruned; nothing goes back beyond step 3") as refused:
            ask("Rollback", agent=held.id, to=to)
        assert refused.value.exit_code in (4, 5)
    with pytest.raises(Refused, match="was pruned"):
        ask("Diff", agent=held.id)
    held.disconnect()
    ask("Rollback", agent=held.id, to="p4")
    assert (held.live / "b").read_text() == "0" * BIG
    assert (held.live / "a").read_text() == "3" * BIG
    # Once more does nothing, and less can't be had back.
    assert ask("PrunePoints", agent=held.id, keep=50)["pruned"] == []
    kinds = {r["action"] for r in held.operator.stream("Audit") if "prune" in r.get("action", "")}
    assert kinds == {"agent.points_pruned", "operator.points_prune"}
    assert ask("AuditVerify")["ok"]


@pytest.mark.sandbox
def test_points_go_by_age(scene: Scene) -> None:
    held = writer(scene)
    store = scene.kernel.data / "points" / held.id
    for step in (1, 2):
        old = time.time() - 3600
        os.utime(store / f"p{step}.json", (old, old))
    assert held.operator.ask("PrunePoints", agent=held.id, older_than_ms=7_200_000)["pruned"] == []
    assert held.operator.ask("PrunePoints", agent=held.id, older_than_ms=1_800_000)["pruned"] == ["p1", "p2"]


@pytest.mark.sandbox
def test_a_damaged_point_stops_the_pruning_of_others(scene: Scene) -> None:
    held = writer(scene)
    store = scene.kernel.data / "points" / held.id
    (store / "p5.json").write_bytes(b"{}")
    with pytest.raises(Refused, match=r"`p5` is damaged.*nothing was pruned"):
        held.operator.ask("PrunePoints", agent=held.id, keep=2)
    assert (store / "p1.json").exists()
    assert len(held.operator.ask("Points", agent=held.id)["points"]) == 5


@pytest.mark.sandbox
def test_points_go_by_size_and_content_that_several_have_counts_once(scene: Scene) -> None:
    held = writer(scene)
    ask = held.operator.ask
    # Of the newest two each has a manifest and a content of its own; the first of the last three has the same as the fourth.
    assert ask("PrunePoints", agent=held.id, size_bytes=1 << 30)["pruned"] == []
    assert ask("PrunePoints", agent=held.id, size_bytes=2 * BIG + 4000)["pruned"] == ["p1", "p2", "p3"]
    assert ask("PrunePoints", agent=held.id, size_bytes=100)["pruned"] == ["p4", "p5"]


@pytest.mark.sandbox
def test_what_undoes_the_last_rollback_is_never_pruned(scene: Scene) -> None:
    held = writer(scene)
    held.disconnect()
    back = held.operator.ask("Rollback", agent=held.id, to="2")["point"]
    assert held.operator.ask("PrunePoints", agent=held.id, keep=0)["pruned"] == ["p1", "p2", "p3", "p4", "p5"]
    held.operator.ask("Rollback", agent=held.id, to=back)
    assert (held.live / "b").read_text() == "5" * BIG


@pytest.mark.sandbox
def test_keys_that_nothing_leads_back_to_are_listed_no_more(scene: Scene) -> None:
    held = scene.hold(allow=[*FILES, 'state.*: "**"'])
    held.rf.state.put("k", 1)
    held.rf.fs.write_text("a", "1")
    held.rf.state.put("k", 2)
    held.rf.fs.write_text("b", "1")
    ask = held.operator.ask
    assert ask("PrunePoints", agent=held.id, keep=1)["pruned"] == ["p2"]
    assert [(p["id"], p["kind"]) for p in ask("Points", agent=held.id)["points"]] == [
        ("p3", "state"),
        ("p4", "workspace"),
    ]
    assert ask("Rollback", agent=held.id, to="p3", preview=True)["to_step"] == 2
    assert ask("PrunePoints", agent=held.id, keep=0)["pruned"] == ["p4"]
    for verify in (False, True):
        assert ask("Points", agent=held.id, verify=verify)["points"] == []
    with pytest.raises(Refused, match="p4 was pruned"):
        ask("Rollback", agent=held.id, to="p3", preview=True)


@pytest.mark.sandbox
def test_what_is_damaged_is_named_with_what_is_lost(scene: Scene) -> None:
    held = writer(scene)
    store = scene.kernel.data / "points" / held.id
    (store / "p4.json").unlink()
    (blob,) = (p for p in (store / "blobs").glob("??/*") if p.read_bytes() == b"2" * BIG)
    blob.chmod(0o600)
    blob.write_bytes(b"x" * BIG)
    done = console("points", "verify", held.id, "--json", "--data", str(scene.kernel.data))
    assert done.returncode == 1
    damage = {p["id"]: p["damage"] for p in json.loads(done.stdout)}
    assert {point for point, found in damage.items() if found} == {"p3", "p4"}
    assert [(d["path"], d["where"], d["lost"]) for d in damage["p3"]] == [
        ("/workspace/a", "here", "/workspace/a as it stood from step 2 on until step 3")
    ]
    assert [(d["path"], d["lost"]) for d in damage["p4"]] == [("", "every way back to before step 4")]
    shown = console("points", "verify", held.id, "--data", str(scene.kernel.data))
    assert f"{held.id}/p3, step 3: /workspace/a: its content is missing or damaged (here)" in shown.stdout
    assert "lost: every way back to before step 4" in shown.stdout


@pytest.mark.sandbox
def test_points_of_a_branch_that_was_left_are_read_back_too(scene: Scene) -> None:
    held = writer(scene)
    held.disconnect()
    back = held.operator.ask("Rollback", agent=held.id, to="0")["point"]
    data = ("--data", str(scene.kernel.data))
    listed = json.loads(console("points", held.id, "--json", *data).stdout)
    assert [p["id"] for p in listed] == [back]
    whole = console("points", "verify", held.id, "--json", *data)
    assert whole.returncode == 0, whole.stderr
    assert [p["id"] for p in json.loads(whole.stdout)] == ["p1", "p2", "p3", "p4", "p5", back]
    store = scene.kernel.data / "points" / held.id
    (blob,) = (p for p in (store / "blobs").glob("??/*") if p.read_bytes() == b"2" * BIG)
    blob.chmod(0o600)
    blob.write_bytes(b"x" * BIG)
    shown = console("points", "verify", held.id, *data)
    assert shown.returncode == 1
    assert f"{held.id}/p3, step 3: /workspace/a: its content is missing or damaged (here)" in shown.stdout
    assert "p3" in shown.stderr


# -- of agents that ended -----------------------------------------------------------------------------------------------


@pytest.fixture
async def heart(dsn: str) -> AsyncIterator[Heart]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


async def test_only_agents_that_ended_lose_points_by_themselves(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.kernel.retention.POINTS_KEPT", 1)
    ended, running = [await heart.agent(allow=FILES) for _ in range(2)]
    stores: list[Path] = []
    for thread in (ended, running):
        for step in range(3):
            await heart.call(thread, step, "fs.write", path=f"/workspace/{step}.txt", data="bmV3")
        stores.append(heart.kernel.layout.points(thread.id))
        assert len(list(stores[-1].glob("*.json"))) == 3
    await heart.processes.set_state(ended, "done")
    await heart.processes.set_state(running, "paused")
    looking = asyncio.create_task(heart.kernel.retention.run(heart.kernel.thread))
    async with asyncio.timeout(30):
        while len(list(stores[0].glob("*.json"))) != 1:
            await asyncio.sleep(0.001)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert len(list(stores[1].glob("*.json"))) == 3
    cut = await heart.kernel.rollback.plans.cut_for(ended, "1")
    with pytest.raises(Problem, match="was pruned"):
        await heart.kernel.rollback.plans.plan(ended, cut, None)
    assert len((await points.points(heart.kernel, ended.id, verify=True))["points"]) == 1


async def test_a_policy_takes_points_of_the_living_and_never_those_since_their_checkpoint(
    heart: Heart,
) -> None:
    threads = [await heart.agent(allow=[*FILES, "checkpoint.save: '*'"]) for _ in range(2)]
    for thread in threads:
        for step in range(4):
            await heart.call(thread, step, "fs.write", path=f"/workspace/{step}.txt", data="bmV3")
    saved = await heart.call(threads[0], 4, "checkpoint.save", state={}, schema_version=1, next_child=0)
    assert saved.failure is None, saved
    await heart.call(threads[0], 5, "fs.write", path="/workspace/5.txt", data="bmV3")
    retention = Retention(
        heart.core,
        lambda agent: SnapshotStore(heart.kernel.layout.points(agent)),
        lambda _: PointsKept(count=0),
    )
    looking = asyncio.create_task(retention.run(heart.kernel.thread))
    stores = [heart.kernel.layout.points(thread.id) for thread in threads]
    async with asyncio.timeout(30):
        while len(list(stores[0].glob("*.json"))) != 1:
            await asyncio.sleep(0.001)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert [path.stem for path in stores[0].glob("*.json")] == ["p6"]
    assert len(list(stores[1].glob("*.json"))) == 4  # it would begin again from its first line
