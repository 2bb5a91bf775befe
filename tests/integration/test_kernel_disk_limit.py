"""`sandbox.disk` bounds the workspace of an agent, from its submission on, over restarts, and its children's too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import CallFailed
from support.kernels import Refused
from support.scenes import HOLD, Scene, manifest_of, scene_on

ALLOW = ('fs.*: "/workspace/**"', 'spawn: "*"', 'exec.run: "*"')
DISK = "sandbox: {disk: 1Mi}"
FULL = 1 << 20


@pytest.fixture(scope="module")
def house() -> Iterator[Scene]:
    with scene_on(None) as scene:
        yield scene


@pytest.fixture
def scene(house: Scene) -> Iterator[Scene]:
    yield house
    house.release()


def test_the_workspace_has_its_limit_from_start_to_end(scene: Scene) -> None:
    held = scene.hold(allow=ALLOW, more=DISK, files={"seed": b"x" * 1000})
    held.rf.fs.write_bytes("a", bytes(FULL - 2000))
    point = held.steps()[-1]["step"]
    said = held.refused(CallFailed, lambda: held.rf.fs.append_text("a", "y" * 1001))
    assert "`sandbox.disk`" in str(said)
    assert f"holds {FULL - 1000} bytes" in str(said)
    assert held.last()["outcome"] == "refused" or held.last()["outcome"] == "error"
    disk = scene.show(held.id)["sandbox"]["disk"]
    assert disk == {
        "used_bytes": FULL - 1000,
        "limit_bytes": FULL,
        "entries": 2,
        "entries_limit": 1024,
    }
    held.refused(CallFailed, lambda: held.rf.exec.run(["sh", "-c", "cat seed seed > b"]))
    held.rf.fs.delete("seed")
    held.rf.fs.append_text("a", "y" * 1001)
    # A rollback brings back what there is no room for now, and what comes then is counted anew.
    scene.operator.ask("Rollback", agent=held.id, to=str(point))
    assert (held.live / "seed").exists()
    assert scene.show(held.id)["sandbox"]["disk"]["used_bytes"] is None


def test_a_workspace_that_is_too_large_is_not_taken_in(scene: Scene) -> None:
    for files, text in (
        ({"a": bytes(FULL + 1)}, f"it has {FULL + 1} bytes"),
        ({f"d/{number}": b"" for number in range(1030)}, "in 1031 files"),
    ):
        with pytest.raises(Refused, match="raise it, or leave large data out") as refused:
            scene.operator.submit(manifest_of("large", ["true"], more=DISK), files)
        assert text in str(refused.value)
        assert "`sandbox.disk`" in str(refused.value)
    assert not [row for row in scene.operator.ask("List", all=True)["agents"] if row["name"] == "large"]


def test_a_childs_copy_has_its_limit_too(scene: Scene) -> None:
    files: dict[str, Any] = {"part/a": bytes(2 * FULL), "small/a": b"x"}
    held = scene.hold(allow=ALLOW, more="sandbox: {disk: 4Mi}", files=files)
    with pytest.raises(Exception, match="child's workspace may hold"):
        held.rf.spawn("child", ["sh", "-c", HOLD], workspace="part", sandbox={"disk": "1Mi"})
    held.rf.spawn("child", ["true"], workspace="small", sandbox={"disk": "1Mi"})
