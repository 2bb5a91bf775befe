"""Agents of a real kernel whose sandboxes are on another machine: their life, and what breaks between the two."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ringfence.kernel.environment import interpreter_directories
from support import elsewhere
from support.cable import Cable, cable_to
from support.elsewhere import Elsewhere
from support.kernels import eventually
from support.scenes import Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

LEASE_S = 4
CONFIG = """apiVersion: ringfence/v1
kind: Kernel
spec:
  sandbox: {{backend: remote, remote: {{address: "{address}", certs: {certs}}}}}
"""
ALLOW = ['fs.*: "/workspace/**"', 'exec.run: "*"', 'messages.receive: "*"']
RESTART = "restart: {policy: on-failure, max: 5}"
WAITER = """
from ringfence import agent
with agent.boot() as rf:
    rf.fs.append_text("lines", "before\\n")
    print("waits", flush=True)
    rf.messages.receive()
    rf.exec.run(["sh", "-c", "echo after >> lines"])
    print("ends", flush=True)
"""


@dataclass
class Far:
    scene: Scene
    machine: Elsewhere
    cable: Cable

    @property
    def there(self) -> Path:
        """The host's own data, in its own file system."""
        return Path("/proc", str(self.machine.pid), "root", "tmp/server/data")

    def running(self) -> list[Path]:
        return list(self.there.glob("sandboxes/*.json"))

    def waiter(self) -> str:
        agent = self.scene.submit(WAITER, allow=ALLOW, more=RESTART)
        eventually(lambda: "waits" in self.scene.output(agent), f"{self.scene.show(agent)['error']}")
        return agent

    def finish(self, agent: str) -> None:
        """Let a waiter end; each of its effects is there once."""
        self.scene.operator.ask("Send", agent=agent, text="go on")
        self.scene.await_end(agent)
        assert (self.scene.live(agent) / "lines").read_text() == "before\nafter\n"


def contents(top: Path) -> Iterator[bytes]:
    """Of every file beneath a directory in which others are at work."""
    for here, _, names in os.walk(top):
        for name in names:
            path = Path(here, name)
            with contextlib.suppress(OSError):
                if path.is_file():
                    yield path.read_bytes()


@pytest.fixture(scope="module")
def far(postgres_server: Any, template_database: str, tmp_path_factory: Any) -> Iterator[Far]:
    place = tmp_path_factory.mktemp("elsewhere")
    lease = f"{LEASE_S}s"
    with (
        elsewhere.running(place, lease=lease, provide=interpreter_directories()) as machine,
        cable_to(machine.address) as cable,
    ):
        config = CONFIG.format(address=cable.address, certs=machine.certs)
        with scene_of_its_own(postgres_server, template_database, config=config) as scene:
            yield Far(scene, machine, cable)


def test_a_whole_agent(far: Far) -> None:
    program = """
import json, os, pathlib
from ringfence import agent
with agent.boot() as rf:
    print(json.dumps([pathlib.Path("note").read_text(), os.listdir("/run/ringfence"), rf.fs.read_text("note")]))
    for number in range(30):
        rf.fs.append_text("log", f"{number}\\n")
    found = rf.exec.run(["sh", "-c", "cat log | wc -l; cat .env; rm -r old; mkdir new; ln log new/same; echo x >> note; exit 3"])
    print(json.dumps([found.exit_code, found.stdout, found.stderr, sorted(found.changed)]))
    print(json.dumps(rf.exec.run(["cat", "note"]).stdout))
"""
    files = {"note": "noted", "old/a": "a", "old/b": "b", ".env": "secret"}
    agent = far.scene.run(program, files=files, allow=ALLOW, deny=['fs.*: "/workspace/.env"'])
    seen, ran, again = far.scene.said(agent)
    assert seen == ["noted", ["syscall.sock"], "noted"]
    code, stdout, stderr, changed = ran
    assert (code, stdout) == (3, "30\n")
    assert "Permission denied" in stderr
    paths = ["new", "new/same", "note", "old", "old/a", "old/b"]
    assert changed == [f"/workspace/{path}" for path in paths]
    assert again == "notedx\n"
    live = far.scene.live(agent)
    assert (live / "new/same").read_text() == "".join(f"{n}\n" for n in range(30))
    assert not (live / "old").exists()
    assert not any(b"secret" in content for content in contents(far.there))
    steps = far.scene.operator.steps(agent)
    before = next(step["step"] for step in steps if step["action"] == "exec.run") - 1
    far.scene.operator.ask("Rollback", agent=agent, to=str(before))
    assert sorted(path.name for path in (live / "old").iterdir()) == ["a", "b"]
    assert (live / "note").read_text() == "noted"
    assert not (live / "new").exists()


def test_show_and_doctor_say_where_it_runs(far: Far, tmp_path: Path) -> None:
    agent = far.waiter()
    shown = far.scene.show(agent)
    assert shown["pid"] is None
    assert shown["sandbox"]["backend"] == "remote"
    assert shown["sandbox"]["identity"]["host"] == "sandbox-host"
    names = {wall["name"] for wall in shown["sandbox"]["walls"] if wall["ok"]}
    assert {"mutual tls", "seccomp"} <= names
    far.finish(agent)
    done = console(
        "doctor", "--json", "--config", str(far.scene.kernel.config), "--data", str(tmp_path / "d")
    )
    checks = {check["name"]: check["ok"] for check in json.loads(done.stdout)["checks"]}
    assert checks["remote mutual tls"]
    assert checks["remote seccomp"]


def test_calls_go_on_over_a_cut_cable(far: Far) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    for number in range(60):
        rf.fs.append_text("lines", f"{number}\\n")
        if number % 20 == 10:
            print(number, flush=True)
            rf.exec.run(["sh", "-c", "echo begun >> commands; sleep 1; echo ended >> commands"])
"""
    carried = far.cable.carried
    agent = far.scene.submit(program, allow=ALLOW)
    for number in (10, 30, 50):
        eventually(lambda number=number: f"{number}\n" in far.scene.output(agent), "it does not go on")
        far.cable.cut()
    far.scene.await_end(agent)
    assert far.cable.carried >= carried + 3
    live = far.scene.live(agent)
    assert (live / "lines").read_text() == "".join(f"{n}\n" for n in range(60))
    assert (live / "commands").read_text() == "begun\nended\n" * 3
    assert far.scene.show(agent)["restarts"] == 0


def test_a_cable_that_is_out_for_longer_than_the_lease(far: Far) -> None:
    agent = far.waiter()
    assert far.running() != []
    far.cable.pull()
    try:
        eventually(lambda: far.running() == [], "the host keeps sandboxes beyond the lease")
        eventually(lambda: far.scene.show(agent)["restarts"] > 0, "the kernel does not notice")
    finally:
        far.cable.plug()
    far.finish(agent)


def test_kill_9_of_the_sandbox_host(far: Far) -> None:
    agent = far.waiter()
    never = far.scene.submit(WAITER, allow=ALLOW, more="restart: {policy: never}")
    eventually(lambda: "waits" in far.scene.output(never), "it does not run")
    far.machine.kill()
    far.machine.start()
    ended = far.scene.operator.wait(never)
    assert ended["state"] in {"failed", "killed"}
    assert "killed" in ended["error"]
    eventually(lambda: far.scene.show(agent)["restarts"] > 0, "the kernel does not notice")
    far.finish(agent)
    assert far.running() == []


def test_kill_9_of_the_kernel(far: Far) -> None:
    agent = far.waiter()
    (record,) = far.running()
    far.scene.kernel.kill()
    far.scene.kernel.start()
    eventually(lambda: far.running() != [] and record not in far.running(), "it does not run again")
    assert len(far.running()) == 1
    far.finish(agent)
    assert far.running() == []


def test_an_ordered_stop_leaves_nothing_there(far: Far) -> None:
    agent = far.waiter()
    assert far.scene.kernel.stop() == 0
    assert far.running() == []
    far.scene.kernel.start()
    far.finish(agent)
    assert list(far.there.glob("kernels/*/*/run/*")) == []
