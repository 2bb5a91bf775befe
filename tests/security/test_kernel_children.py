"""What a hostile agent tries with children: more rights, more files, more resources, or a race with a revocation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import Denied, InvalidRequest, Revoked, RingfenceError
from support.kernels import eventually
from support.scenes import HOLD, Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  roles:
    all: {allow: [{fs.*: "/workspace/**"}, {spawn: "*"}]}
"""
HELD = ["sh", "-c", HOLD]
FILES = {"open/a": "a", "secret/key": "SECRET", ".env": "SECRET"}


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG) as scene:
        yield scene


def born(parent: Held, **more: Any) -> Held:
    return parent.scene.held(parent.rf.spawn("child", HELD, **more).id)


def contents(home: Path) -> str:
    return "".join(path.read_text() for path in home.rglob("*") if path.is_file() and not path.is_symlink())


def staged(scene: Scene) -> list[Path]:
    return list((scene.kernel.data / "agents").glob(".spawn-*"))


class Attempt:
    """A call in a thread of its own, held at a failpoint of the kernel."""

    def __init__(self, scene: Scene, point: str, call: Callable[[], Any]) -> None:
        self._scene, self._point = scene, point
        self.found: list[Any] = []
        scene.kernel.arm(point)
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()
        scene.kernel.await_hit(point)

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.found.append(call())
        except RingfenceError as error:
            self.found.append(error)

    def let_go(self) -> None:
        self._scene.kernel.disarm(self._point)

    def go(self) -> Any:
        self.let_go()
        self._thread.join(60)
        return self.found[0]


# -- rights -----------------------------------------------------------------------------------------------------------


def test_a_role_that_nobody_delegates_widens_nothing(scene: Scene) -> None:
    parent = scene.hold(files=FILES, allow=['spawn: "*"'])
    for given in ({"roles": ["all"]}, {"permissions": {"roles": ["all"]}}):
        child = born(parent, **given)
        child.refused(Denied, lambda child=child: child.rf.fs.write_text("x", "x"))


def test_delegation_can_not_be_made_up_on_the_way_down(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"'])
    parent.refused(InvalidRequest, lambda: parent.rf.spawn("child", HELD, delegates=["all"]))
    child = born(parent, permissions={"allow": ['spawn: "*"']})
    child.refused(InvalidRequest, lambda: child.rf.spawn("child", HELD, roles=["all"], delegates=["all"]))
    grandchild = born(child, roles=["all"])
    grandchild.refused(Denied, lambda: grandchild.rf.fs.write_text("x", "x"))


def test_an_unmodified_child_leaves_no_more_than_its_parent_may_write(scene: Scene) -> None:
    parent = scene.hold(allow=['spawn: "*"', 'fs.write: "/workspace/out/**"'])
    ends: list[tuple[str, list[str]]] = []
    for place in ("out", "elsewhere"):
        child = parent.rf.spawn(
            f"writes-{place}",
            ["sh", "-c", f"mkdir {place}; echo hi > {place}/a"],
            sandbox={"workspace": "direct"},
            permissions={"allow": ['fs.write: "/workspace/**"']},
            restart={"policy": "never"},
        )
        eventually(lambda agent=child.id: scene.show(agent)["state"] in {"done", "failed"}, "it does not end")
        live = scene.live(child.id)
        ends.append(
            (scene.show(child.id)["state"], [str(path.relative_to(live)) for path in live.rglob("a")])
        )
    assert ends == [("done", ["out/a"]), ("failed", [])]


@pytest.mark.parametrize(
    "given",
    [
        {"permissions": {"allow": ['fs.read: "/workspace/a"\n    deny: []\n  delegates: [all]']}},
        {"permissions": {"allow": [{'fs.read"\n': "/workspace/a"}]}},
        {"labels": {"a: b\nspec": "c"}},
        {"env": {"A": "b\x00"}},
        {"env": {"RINGFENCE_TOKEN": "x"}},
        {"permissions": {"allow": [], "spec": {}}},
        {"permissions": "all"},
        {"sandbox": {"workspace": "host"}},
        {"sandbox": {"backend": "none"}},
        {"budgets": {"total": {"calls": -1}}},
        {"restart": {"policy": "always"}},
    ],
)
def test_a_manifest_is_not_to_be_smuggled_through(scene: Scene, given: dict[str, Any]) -> None:
    parent = scene.hold(allow=['spawn: "*"'])
    parent.refused(InvalidRequest, lambda: parent.rf.spawn("child", HELD, **given))
    assert scene.show(parent.id)["children"] == []


# -- files ------------------------------------------------------------------------------------------------------------


def test_links_lead_a_copy_nowhere_else(scene: Scene) -> None:
    parent = scene.hold(
        files=FILES,
        allow=['spawn: "*"', 'fs.*: "/workspace/**"', 'exec.run: "*"'],
        deny=['fs.read: "/workspace/.env"', 'fs.read: "/workspace/secret/**"'],
    )
    links = "ln -s ../.env open/env; ln -s ../secret open/dir; ln -s /etc open/etc; ln -s secret way; ln -s /etc out"
    assert parent.rf.exec.run(["sh", "-c", links]).exit_code == 0
    child = born(parent, workspace="open", permissions={"allow": ['fs.*: "/workspace/**"']})
    assert "SECRET" not in contents(child.live.parent)
    for path in ("open/env", "open/dir/key", "open/etc/passwd"):
        with pytest.raises(RingfenceError):
            child.rf.fs.read_text(path)
    for path in ("way", "out", "open/etc", "open/env", "open/dir", "..", "/etc", "/program"):
        with pytest.raises(RingfenceError):
            parent.rf.spawn("child", HELD, workspace=path)
    assert [c["id"] for c in scene.show(parent.id)["children"]] == [child.id]
    assert staged(scene) == []


def test_what_is_revoked_while_files_are_copied_is_not_in_the_copy(scene: Scene) -> None:
    parent = scene.hold(
        files=FILES, allow=['spawn: "*"', 'fs.read: "/workspace/open/**"', 'fs.read: "/workspace/secret/**"']
    )
    attempt = Attempt(
        scene, "spawn:after_files", lambda: parent.rf.spawn("child", HELD, workspace="/workspace")
    )
    (home,) = staged(scene)
    assert "SECRET" in contents(home)
    parent.operator.ask("Revoke", agent=parent.id, rule_or_grant='fs.read: "/workspace/secret/**"')
    child = scene.held(attempt.go().id)
    assert contents(child.live) == "a"
    assert "SECRET" not in contents(child.live.parent)


def test_a_revoked_spawn_leaves_nobody_and_nothing(scene: Scene) -> None:
    parent = scene.hold(
        files=FILES,
        allow=['spawn: "*"', 'fs.read: "/workspace/**"', "now"],
        more="budgets: {total: {calls: 100}}",
    )
    attempt = Attempt(
        scene,
        "spawn:after_files",
        lambda: parent.rf.spawn("child", HELD, workspace="open", budgets={"total": {"calls": 50}}),
    )
    report = parent.operator.ask("Revoke", agent=parent.id, rule_or_grant="spawn")
    assert [(call["action"], call["fate"]) for call in report["affected"]] == [("spawn", "cancelled")]
    assert isinstance(attempt.go(), Revoked)
    assert scene.show(parent.id)["children"] == []
    eventually(lambda: staged(scene) == [], "files of nobody are left")
    left = {b["name"]: b["left"] for b in scene.show(parent.id)["budgets"]}
    assert left["calls"] > 90


def test_a_parent_that_is_killed_while_it_spawns_leaves_nobody_running(scene: Scene) -> None:
    parent = scene.hold(files=FILES, allow=['spawn: "*"'])
    attempt = Attempt(scene, "spawn:after_outcome", lambda: parent.rf.spawn("child", HELD))
    done: list[Any] = []
    killing = threading.Thread(target=lambda: done.append(parent.operator.ask("Kill", agent=parent.id)))
    killing.start()
    eventually(lambda: scene.show(parent.id)["process"] == "none", "the parent lives")
    attempt.let_go()
    killing.join(60)
    # The library would wait for a door that opens no more.
    parent.disconnect()
    attempt.go()
    (child,) = scene.show(parent.id)["children"]
    assert child["state"] == "killed"
    assert [c["id"] for c in done[0]["descendants"]] == [child["id"]]


# -- resources --------------------------------------------------------------------------------------------------------


def test_a_child_gets_no_larger_sandbox_than_its_parent(scene: Scene) -> None:
    parent = scene.hold(
        files={"eat.py": "b = bytearray(300 << 20)\nb[::4096] = b'x' * len(b[::4096])\nprint('ate')"},
        allow=['spawn: "*"', 'fs.read: "/workspace/**"'],
        more="sandbox: {memory: 96Mi}\nrestart: {policy: never}",
    )
    child = parent.rf.spawn(
        "eater",
        ["python", "eat.py"],
        workspace="eat.py",
        sandbox={"memory": "1Gi"},
        restart={"policy": "never"},
    )
    scene.await_end(child.id, "failed")
    assert "ate" not in scene.output(child.id)
