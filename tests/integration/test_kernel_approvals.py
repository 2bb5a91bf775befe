"""Approvals on a real kernel: real commands and files, the command line, and a kernel that is killed while calls wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Conflict, Denied
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, console, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

RUN = 'exec.run: "*"'
READ = 'fs.read: "/workspace/**"'


@pytest.fixture
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def inbox(scene: Scene, count: int = 1) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = scene.operator.ask("Approvals")["approvals"]
        return len(found) == count

    eventually(there, f"{count} approvals are not there")
    return list(found)


def test_a_commands_changes_are_staged_until_a_person_has_looked(scene: Scene) -> None:
    held = scene.hold(
        allow=[RUN, READ],
        ask=['fs.*: "/workspace/data/**"'],
        files={"data/a.csv": "one\n", "data/b.csv": "two\n", "note.txt": "x"},
    )
    making = held.rf.thread(lambda: held.rf.exec.run(["sh", "-c", "echo three > data/a.csv; rm data/b.csv"]))
    (waits,) = inbox(scene)
    shown = scene.operator.ask("ApprovalShow", id=waits["id"])
    assert {(c["kind"], c["path"]) for c in shown["detail"]["changes"]} == {
        ("modify", "/workspace/data/a.csv"),
        ("remove", "/workspace/data/b.csv"),
    }
    assert shown["detail"]["touches"] == 2  # the command itself, which is judged too, is none of them
    assert "-one\n+three\n" in shown["detail"]["diff"]
    # Nothing is applied, the lock is free, and other calls of the workspace go on.
    assert (held.live / "data/a.csv").read_text() == "one\n"
    assert held.rf.fs.read_text("note.txt") == "x"
    scene.operator.ask("Approve", id=waits["id"])
    assert making.result().exit_code == 0
    assert (held.live / "data/a.csv").read_text() == "three\n"
    assert not (held.live / "data/b.csv").exists()
    # What was approved can be rolled back like anything else.
    scene.operator.ask("Rollback", agent=held.id, to=str(waits["step"] - 1))
    assert (held.live / "data/a.csv").read_text() == "one\n"
    assert (held.live / "data/b.csv").read_text() == "two\n"


def test_staged_changes_whose_base_moved_are_a_conflict(scene: Scene) -> None:
    held = scene.hold(
        allow=[RUN, READ, 'fs.write: "/workspace/other.txt"'],
        ask=['fs.write: "/workspace/data/**"'],
        files={"data/a.csv": "one\n"},
    )
    making = held.rf.thread(lambda: held.rf.exec.run(["sh", "-c", "echo three > data/a.csv"]))
    (waits,) = inbox(scene)
    (held.live / "data/a.csv").write_text("someone else's\n")
    scene.operator.ask("Approve", id=waits["id"])
    with pytest.raises(Conflict, match="workspace changed"):
        making.result()
    assert (held.live / "data/a.csv").read_text() == "someone else's\n"


def test_denied_changes_leave_nothing(scene: Scene) -> None:
    held = scene.hold(allow=[RUN, READ], ask=['fs.*: "/workspace/data/**"'], files={"data/a.csv": "one\n"})
    making = held.rf.thread(lambda: held.rf.exec.run(["sh", "-c", "rm -r data"]))
    (waits,) = inbox(scene)
    scene.operator.ask("Deny", id=waits["id"], reason="keep them")
    with pytest.raises(Denied, match="keep them"):
        making.result()
    assert (held.live / "data/a.csv").read_text() == "one\n"
    assert not list((held.live.parent / "scratch").iterdir())


def test_the_command_line_lists_shows_and_decides(scene: Scene, tmp_path: Any) -> None:
    held: Held = scene.hold(ask=['fs.write: "/workspace/**"'], files={"report.md": "old\n"})
    data = str(scene.kernel.data)
    making = held.rf.thread(lambda: held.rf.fs.write_text("report.md", "new\n"))
    (waits,) = inbox(scene)
    listed = console("approvals", "--data", data, "--json")
    assert listed.returncode == 0, listed.stderr
    (found,) = json.loads(listed.stdout)
    keys = {"id", "agent", "step", "action", "resource", "arguments", "age_ms", "expires_at"}
    assert keys <= set(found)
    table = console("approvals", "--data", data)
    assert waits["id"] in table.stdout
    shown = console("approvals", "show", waits["id"], "--data", data)
    assert "-old" in shown.stdout
    assert "+new" in shown.stdout
    assert "fs.write" in shown.stdout
    refused = console("approvals", "deny", waits["id"], "--data", data)
    assert (refused.returncode, "--reason" in refused.stderr) == (2, True)
    broken = tmp_path / "broken.json"
    broken.write_text("[]")
    wrong = console("approvals", "approve", waits["id"], "--edit", str(broken), "--data", data)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    approved = console("approvals", "approve", waits["id"], "--data", data)
    assert approved.returncode == 0, approved.stderr
    making.result()
    assert (held.live / "report.md").read_text() == "new\n"
    again = console("approvals", "approve", waits["id"], "--data", data)
    assert (again.returncode, "already approved by" in again.stderr) == (5, True)
    missing = console("approvals", "show", "a77777", "--data", data)
    assert missing.returncode == 4


PROGRAM = """
from ringfence import agent
with agent.boot() as rf:
    done = rf.exec.run(["sh", "-c", "echo run >> count.txt; echo three > data/a.csv"])
    rf.fs.delete("data/b.csv")
    print(rf.ask("Publish it?").answer, flush=True)
"""


def test_parked_calls_outlive_a_killed_kernel_and_run_once(scene: Scene) -> None:
    agent = scene.submit(
        PROGRAM,
        allow=[RUN, READ, 'fs.write: "/workspace/count.txt"'],
        ask=['fs.*: "/workspace/data/**"'],
        files={"data/a.csv": "one\n", "data/b.csv": "two\n"},
        more="approvals: {expire: 1h}",
    )
    (staged,) = inbox(scene)
    assert scene.show(agent)["state"] == "parked"
    scene.kernel.kill()
    scene.kernel.start()
    assert [w["id"] for w in inbox(scene)] == [staged["id"]]
    assert (scene.live(agent) / "data/a.csv").read_text() == "one\n"
    scene.operator.ask("Approve", id=staged["id"])
    eventually(
        lambda: (scene.live(agent) / "data/a.csv").read_text() == "three\n", "the changes were not applied"
    )
    # The command itself ran once: what was staged under the first kernel is what the second one applied.
    assert (scene.live(agent) / "count.txt").read_text() == "run\n"
    (delete,) = inbox(scene)
    assert (delete["action"], delete["resource"]) == ("fs.delete", "/workspace/data/b.csv")
    scene.kernel.kill()
    scene.kernel.start()
    inbox(scene)
    scene.operator.ask("Approve", id=delete["id"])
    (question,) = inbox(scene)
    assert question["action"] == "ask"
    assert not (scene.live(agent) / "data/b.csv").exists()
    scene.kernel.kill()
    scene.kernel.start()
    inbox(scene)
    scene.operator.ask("Approve", id=question["id"], reason="yes, today")
    scene.await_end(agent)
    assert "yes, today" in scene.output(agent)
    steps = [s for s in scene.operator.steps(agent) if s["verdict"] == "ask"]
    assert [(s["action"], s["outcome"]) for s in steps] == [("exec.run", "ok"), ("fs.delete", "ok")]
    with pytest.raises(Refused, match="already approved by") as second:
        scene.operator.ask("Approve", id=delete["id"])
    assert second.value.exit_code == 5
