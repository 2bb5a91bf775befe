"""Two nodes, one database, one bucket: what a killed node's agent left is taken over by a node with another data directory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import SnapshotFailed
from support.bucket import Bucket, a_bucket
from support.kernels import KernelProcess, Refused, eventually
from support.scenes import Scene, console, scene_on, short_directory

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

ALL = ['fs.*: "/workspace/**"', 'exec.run: "**"', 'artifacts.*: "*"', 'state.*: "**"']

PROGRAM = """
from ringfence import agent

with agent.boot() as rf:
    rf.fs.write_text("kept/one.txt", "one")
    rf.fs.delete("old.txt")
    rf.fs.write_bytes("big", b"b" * 300_000)
    rf.exec.run(["sh", "-c", "mkdir made; echo two > made/two.txt; ln -s two.txt made/link; rm gone.txt"], check=True)
    rf.fs.append_text("kept/one.txt", " more")
    ref = rf.artifacts.put("report", b"r" * 50_000).ref
    with rf.state.transaction() as tx:
        tx.put("ready", True)
    while not rf.state.get("go"):
        rf.sleep(0.2)
    rf.fs.delete("big")
    print(rf.fs.read_text("kept/one.txt"), rf.fs.read_text("made/two.txt").strip(), len(rf.artifacts.get(ref)), flush=True)
"""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with a_bucket(tmp_path_factory.mktemp("bucket")) as made:
        yield made


@pytest.fixture
def dsn(postgres_server: Any, template_database: str) -> Iterator[str]:
    name = postgres_server.create(template_database)
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


def run_out(scene: Scene, kernel: KernelProcess) -> None:
    """Nobody waits for the lease of a kernel that is dead."""
    pid = None if kernel.process is None else kernel.process.pid
    scene.sql("update kernels set lease_until = clock_timestamp() where pid = %s", pid)


def wrote(scene: Scene, key: str) -> bool:
    return bool(scene.sql("select key from state where key = %s and version > 0", key))


def goes_on(scene: Scene, agent: str) -> bool:
    try:
        return scene.show(agent)["state"] in ("running", "sleeping", "paused")
    except Refused:
        return False


def picture(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        what = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (oct(facts.st_mode), facts.st_uid, what)
    return found


def test_a_node_takes_over_what_another_one_left(dsn: str, bucket: Bucket) -> None:
    with scene_on(dsn, env=bucket.env) as ours, scene_on(dsn, env=bucket.env) as theirs:
        assert ours.operator.ask("Status")["store"] == "s3://shelf/rf"
        agent = ours.submit(PROGRAM, name="mover", allow=ALL, files={"old.txt": "old", "gone.txt": "gone"})
        eventually(lambda: wrote(ours, "ready"), "it does not work")
        before = picture(ours.live(agent))
        steps = [step for step in ours.operator.steps(agent) if step["action"] not in ("state.get", "sleep")]
        with pytest.raises(Refused, match="another kernel"):
            theirs.show(agent)
        ours.kernel.kill()
        run_out(theirs, ours.kernel)
        eventually(
            lambda: goes_on(theirs, agent),
            "nobody takes it over",
        )
        assert picture(theirs.live(agent)) == before
        holder = theirs.hold(name="opener", allow=ALL)
        holder.rf.state.put("go", True)
        theirs.await_end(agent)
        assert theirs.output(agent).split() == ["one", "more", "two", "50000"]
        again = [
            step for step in theirs.operator.steps(agent) if step["action"] not in ("state.get", "sleep")
        ]
        assert again[: len(steps)] == steps, "what had been done was not done again"
        # Points that the dead node took are rolled back here.
        points = theirs.operator.ask("Points", agent=agent, verify=True)["points"]
        assert {point["verified"] for point in points} == {True}
        theirs.operator.ask("Rollback", agent=agent, to="0")
        now = picture(theirs.live(agent))
        assert {path: what for path, (_, _, what) in now.items()} == {
            "agent.py": PROGRAM.encode(),
            "old.txt": b"old",
            "gone.txt": b"gone",
        }
        verified = console("audit", "verify", "--data", str(theirs.kernel.data))
        assert verified.returncode == 0, verified.stdout
        # The node that died comes back: its files of the agent are out of date, and it leaves them alone.
        ours.kernel.start(**bucket.env)
        with pytest.raises(Refused, match="another kernel"):
            ours.show(agent)
        # As in a rolling upgrade: a node that is stopped in order gives its agents up at once, all of them.
        assert theirs.kernel.stop() == 0
        eventually(lambda: goes_on(ours, agent) and goes_on(ours, holder.id), "they do not come back")
        assert {path: what for path, (_, _, what) in picture(ours.live(agent)).items()} == {
            path: what for path, (_, _, what) in now.items()
        }
        theirs.kernel.start(**bucket.env)


def test_a_node_without_the_store_leaves_it_alone(dsn: str, bucket: Bucket) -> None:
    with scene_on(dsn, env=bucket.env) as ours, scene_on(dsn) as theirs:
        held = ours.hold(name="stays", allow=ALL)
        held.rf.fs.write_text("a", "1")
        ours.kernel.kill()
        run_out(theirs, ours.kernel)
        theirs.hold(name="busy", allow=ALL)
        with pytest.raises(Refused, match="another kernel"):
            theirs.show(held.id)
        ours.kernel.start(**bucket.env)
        again = held.again()
        again.rf.fs.write_text("a", "1")
        again.rf.fs.append_text("a", "2")
        assert (ours.live(held.id) / "a").read_text() == "12"


def test_without_the_store_nothing_is_destroyed_and_nobody_is_lost(dsn: str, bucket: Bucket) -> None:
    with scene_on(dsn, env=bucket.env) as ours:
        held = ours.hold(name="careful", allow=ALL, files={"dear": "dear"})
        held.rf.fs.write_text("a", "1")
        bucket.stop()
        try:
            refused = held.refused(SnapshotFailed, lambda: held.rf.fs.delete("dear"))
            assert "shared store" in str(refused)
            assert (ours.live(held.id) / "dear").read_text() == "dear"
            with pytest.raises(Refused, match="shared store"):
                ours.hold(name="late", allow=ALL)
        finally:
            bucket.start()
        held.rf.fs.delete("dear")
        assert not (ours.live(held.id) / "dear").exists()


def test_what_the_store_lacks_is_not_taken_over(
    dsn: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene_on(dsn, env=bucket.env) as ours, scene_on(dsn, env=bucket.env) as theirs:
        held = ours.hold(name="behind", allow=ALL)
        held.rf.fs.write_text("a", "1")
        held.rf.fs.write_text("a", "2")
        step = held.last()["step"]
        held.disconnect()
        depot = bucket.depot(monkeypatch)
        depot.remove(depot.names(f"agents/{held.id}/log")[-1:])
        ours.kernel.kill()
        run_out(theirs, ours.kernel)
        eventually(
            lambda: bool(theirs.sql("select id from agents where id = %s and state = 'failed'", held.id)),
            "it is not refused",
        )
        (why,) = theirs.sql("select error from agents where id = %s", held.id)[0]
        assert f"the shared store lacks what step {step} of `{held.id}` left in the workspace" in why
        assert not theirs.live(held.id).exists()
        # Where its files are, it goes on, and the store has all of it again.
        ours.kernel.start(**bucket.env)
        assert ours.operator.ask("Start", agent=held.id)["state"] == "running"
        assert (ours.live(held.id) / "a").read_text() == "2"


def test_an_owner_that_slept_past_its_lease_starts_nothing_and_commits_nothing(
    dsn: str, bucket: Bucket
) -> None:
    with short_directory() as directory, scene_on(dsn, env=bucket.env) as theirs:
        kernel = KernelProcess(directory / "d", dsn=dsn)
        kernel.start(**bucket.env)
        ours = Scene(kernel)
        try:
            held = ours.hold(name="sleepy", allow=ALL)
            held.rf.fs.write_text("a", "1")
            held.disconnect()
            stream = held.stream()
            assert kernel.process is not None
            kernel.process.send_signal(signal.SIGSTOP)
            # What it asks now is read by an owner that has slept past its lease.
            stream.post("fs.write", b'{"path":"a","data":"bGF0ZQ=="}', step=1)
            run_out(theirs, kernel)
            eventually(
                lambda: goes_on(theirs, held.id) and bool(theirs.token_of(held.id)), "nobody takes it over"
            )
            rows = len(theirs.operator.steps(held.id))
            kernel.process.send_signal(signal.SIGCONT)
            assert kernel.process.wait(timeout=60) == 1
            assert (ours.live(held.id) / "a").read_text() == "1", "it started nothing"
            assert (theirs.live(held.id) / "a").read_text() == "1"
            assert len(theirs.operator.steps(held.id)) == rows
            stream.close()
        finally:
            if kernel.process is not None and kernel.process.poll() is None:
                kernel.process.kill()
                kernel.process.wait()


def test_agents_of_all_nodes_go_back_together(dsn: str, bucket: Bucket) -> None:
    """The node that is asked brings them; the one whose agent it was lives on, and has it no longer."""
    with scene_on(dsn, env=bucket.env) as ours, scene_on(dsn, env=bucket.env) as theirs:
        held = [scene.hold(name="both", allow=ALL, files={"f": "old"}) for scene in (ours, theirs)]
        moment = datetime.now(UTC).isoformat()
        for one in held:
            one.rf.fs.write_text("f", "new")
            one.rf.state.put("who", one.id)
            one.disconnect()
        shown = ours.operator.ask("RollbackAll", to=moment, preview=True)
        assert {one["agent"] for one in shown["agents"]} == {one.id for one in held}
        assert theirs.show(held[1].id)["state"] == "running"
        assert not list(ours.kernel.data.glob(".look-*"))
        done = ours.operator.ask("RollbackAll", to=moment)
        assert [one["conflicts"] for one in done["agents"]] == [[], []]
        assert [one["changes"] for one in done["agents"]] == [one["changes"] for one in shown["agents"]]
        assert [(ours.live(one.id) / "f").read_text() for one in held] == ["old", "old"]
        assert ours.show(held[1].id)["waiting_for"] == "an operator, after a rollback"
        with pytest.raises(Refused, match="another kernel"):
            theirs.show(held[1].id)
        assert theirs.operator.ask("Status")["store"] == "s3://shelf/rf"
        verified = console("audit", "verify", "--data", str(ours.kernel.data))
        assert verified.returncode == 0, verified.stdout
