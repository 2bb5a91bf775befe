"""The operator's ceilings, and the kernel file read again: broken, empty, given up on purpose, and while agents call."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import Denied, Revoked, RingfenceError
from support.kernels import Refused, eventually
from support.scenes import Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  ceilings:
    deny: [{fs.*: "**/.env"}, {state.put: "ceiling/*"}]
  roles: {clerk: {allow: [{state.*: "clerk/**"}]}}
"""

ROLED = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: roled}
spec: {run: {command: [sleep, "1000"]}, permissions: {roles: [ROLE]}}
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database, config=CONFIG) as scene:
        yield scene


def test_a_ceiling_beats_manifest_and_grant(scene: Scene) -> None:
    held = scene.hold(allow=['"*": "**"'], files={".env": "TOKEN=1", "sub/.env": "TOKEN=2", "ok": "ok"})
    for path in (".env", "sub/.env"):
        denied = held.refused(Denied, lambda path=path: held.rf.fs.read_text(path))
        assert "**/.env" in denied.message
    held.refused(Denied, lambda: held.rf.state.put("ceiling/x", 1))
    held.operator.ask("Grant", agent=held.id, rule='fs.read: "/workspace/.env"')
    held.operator.ask("Grant", agent=held.id, rule='state.put: "ceiling/x"')
    held.refused(Denied, lambda: held.rf.fs.read_text(".env"))
    held.refused(Denied, lambda: held.rf.state.put("ceiling/x", 1))
    assert held.rf.fs.read_text("ok") == "ok"
    held.rf.state.put("elsewhere/x", 1)


def told_last(scene: Scene) -> dict[str, Any]:
    """What the audit says of the last reload."""
    rows = [row for row in scene.operator.stream("Audit") if row["action"] == "operator.reload"]
    return json.loads(rows[-1]["body"])


def _broken(good: str) -> list[str | bytes]:
    head = good[: good.index("  ceilings:")]
    return [
        "",
        "\n \n",
        "# kept for later\n# spec: {}\n",
        "---\n",
        "kind: [",
        good.replace("deny:", "denyy:"),
        "\x00",
        b"\xff\xfe",
        "x: y\n" * (1 << 17),
        good.replace("Kernel", "Agent"),
        # Cut off: what is left is YAML, and lacks what stood behind a key.
        head,
        head.replace("spec:", ""),
        head + "  ceilings:\n",
        head + "  ceilings:\n    deny:\n",
    ]


def _no_files(config: Path) -> Iterator[None]:
    """Puts what is no file in the kernel file's place, one after the other."""
    config.unlink()
    yield
    config.mkdir()
    yield
    config.rmdir()
    config.symlink_to(config.parent / "nowhere")
    yield
    config.unlink()
    os.mkfifo(config)
    yield
    config.unlink()


def test_a_broken_kernel_file_keeps_the_last_good_one(scene: Scene) -> None:
    """C24: never fewer denies than before, and said in the answer, in `status` and in the audit."""
    held = scene.hold(allow=['"*": "**"'], files={".env": "TOKEN=1", "notes.txt": "n"})
    config, good = scene.kernel.config, scene.kernel.config.read_text()
    held.rf.fs.read_text("notes.txt")
    tried = 0
    try:

        def refused_loudly() -> str:
            with pytest.raises(Refused) as refused:
                held.operator.ask("Reload")
            said = str(refused.value)
            assert refused.value.exit_code == 2
            assert "the last good kernel file stays in force" in said
            held.refused(Denied, lambda: held.rf.fs.read_text(".env"))
            held.rf.fs.read_text("notes.txt")
            error = held.operator.ask("Status")["config"]["error"]
            assert said.startswith(error)
            told = told_last(scene)
            assert (told["ok"], told["error"]) == (False, error)
            return said

        for nr, broken in enumerate(_broken(good)):
            config.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
            assert ("spec: {}" in refused_loudly()) is (nr < 4), broken[:40]
            tried += 1
        status = console("status", "--data", str(scene.kernel.data))
        assert status.returncode == 1
        assert "error" in status.stdout
        for _ in _no_files(config):
            refused_loudly()
            tried += 1
        # A good one with more takes effect at once, for agents that run, and the error is gone.
        config.write_text(good.replace('{fs.*: "**/.env"}', '{fs.*: "**/.env"}, {fs.*: "**/notes.txt"}'))
        held.operator.ask("Reload")
        held.refused(Denied, lambda: held.rf.fs.read_text("notes.txt"))
        held.refused(Denied, lambda: held.rf.fs.read_text(".env"))
        assert held.operator.ask("Status")["config"]["error"] is None
    finally:
        config.write_text(good)
        held.operator.ask("Reload")
    assert held.rf.fs.read_text("notes.txt") == "n"
    events = [
        json.loads(r["body"])["ok"] for r in held.operator.stream("Audit") if r["action"] == "operator.reload"
    ]
    assert events == [False] * tried + [True] * 2
    assert tried == 18


def test_ceilings_that_are_given_up_on_purpose_are_named(scene: Scene) -> None:
    held = scene.hold(allow=['"*": "**"'], files={".env": "TOKEN=1"})
    config, good = scene.kernel.config, scene.kernel.config.read_text()
    try:
        config.write_text("{apiVersion: ringfence/v1, kind: Kernel, spec: {}}\n")
        # Who has a role that is gone would have what it allows, without what it denies.
        roled = scene.operator.submit(ROLED.replace("ROLE", "clerk"), {})
        with pytest.raises(Refused, match="the role `clerk` is gone"):
            scene.operator.ask("Reload")
        scene.operator.ask("Kill", agent=roled)
        given_up = scene.operator.ask("Reload")["given_up"]
        assert given_up == ['deny fs.*: "**/.env"', 'deny state.put: "ceiling/*"']
        assert told_last(scene)["given_up"] == given_up
        assert held.rf.fs.read_text(".env") == "TOKEN=1"
        can = scene.operator.ask("PolicyCanI", agent=roled, action="state.put", resource="clerk/a")
        assert can["verdict"] == "deny"
    finally:
        config.write_text(good)
        assert scene.operator.ask("Reload")["given_up"] == []
    held.refused(Denied, lambda: held.rf.fs.read_text(".env"))


def test_no_reload_has_a_moment_without_rules(scene: Scene) -> None:
    """C25: while the file is read again and again, nothing allowed is denied and nothing denied is allowed."""
    held = scene.hold(
        allow=['fs.read: "/workspace/**"'],
        more="",
        files={".env": "TOKEN=1", "notes.txt": "n", "b/.env": "x"},
    )
    stop = threading.Event()
    seen: list[str] = []

    def reader(path: str) -> None:
        while not stop.is_set():
            try:
                seen.append(f"read {held.rf.fs.read_text(path)}")
            except Denied:
                seen.append("denied")

    workers = [held.rf.thread(reader, path) for path in ("notes.txt", "b/.env")]
    config, good = scene.kernel.config, scene.kernel.config.read_text()
    try:
        for number in range(30):
            config.write_text(good.replace("ceiling/*", f"ceiling/{number}/**"))
            scene.operator.ask("Reload")
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        config.write_text(good)
        scene.operator.ask("Reload")
    assert set(seen) == {"read n", "denied"}
    by_path = {(row["resource"], row["outcome"]) for row in held.steps()}
    assert by_path == {("/workspace/notes.txt", "ok"), ("/workspace/b/.env", "denied")}


def test_a_reload_ends_what_the_new_file_denies(scene: Scene) -> None:
    held = scene.hold(allow=['exec.run: "*"', 'fs.*: "/workspace/**"'])
    config, good = scene.kernel.config, scene.kernel.config.read_text()
    caught: list[RingfenceError] = []

    def run() -> None:
        try:
            held.rf.exec.run(["sh", "-c", "touch begun; sleep 600"])
        except RingfenceError as error:
            caught.append(error)

    worker = held.rf.thread(run)
    eventually(lambda: any((held.live.parent / "scratch").glob("*/upper/begun")), "the command did not start")
    try:
        config.write_text(good.replace("deny: [", 'deny: [{exec.run: "*"}, '))
        reloaded = held.operator.ask("Reload")
        assert [(c["agent"], c["action"], c["fate"]) for c in reloaded["affected"]] == [
            (held.id, "exec.run", "cancelled")
        ]
        worker.join()
        assert [type(error) for error in caught] == [Revoked]
        assert not (held.live / "begun").exists()
    finally:
        config.write_text(good)
        held.operator.ask("Reload")
    assert held.rf.exec.run(["echo", "again"]).stdout == "again\n"


def test_roles_of_the_kernel_file_give_their_rules(scene: Scene) -> None:
    agent = scene.operator.submit(ROLED.replace("ROLE", "clerk"), {})
    can = scene.operator.ask("PolicyCanI", agent=agent, action="state.put", resource="clerk/a")
    assert can["verdict"] == "allow"
    assert (
        scene.operator.ask("PolicyCanI", agent=agent, action="state.put", resource="other/a")["verdict"]
        == "deny"
    )
    scene.operator.ask("Kill", agent=agent)
    with pytest.raises(Refused) as refused:
        scene.operator.submit(ROLED.replace("ROLE", "king"), {})
    assert refused.value.exit_code == 2
    assert "king" in str(refused.value)
