"""The database dies, goes away and comes back under a kernel with agents at work; kernels come and go too."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ringfence.agent import JournalUnavailable, RingfenceError, SnapshotFailed
from support.databases import kill_postgres, server
from support.kernels import KernelProcess, Refused, eventually
from support.scenes import Scene, scene_on, short_directory

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

FILES = ['fs.*: "/workspace/**"', 'state.*: "**"']

WORKER = """
import sys
from ringfence import agent
name = sys.stdin.read()
with agent.boot() as rf:
    at = (rf.checkpoint.restored or {"n": -1})["n"] + 1
    for number in range(at, 60):
        rf.fs.append_text("count.txt", "x")
        rf.state.put(f"work/{name}", number + 1)
        if number % 20 == 19:
            rf.checkpoint.save({"n": number})
"""


def check_work(scene: Scene, agents: dict[str, str]) -> None:
    for name, agent in agents.items():
        scene.await_end(agent)
        assert (scene.live(agent) / "count.txt").read_text() == "x" * 60, agent
        assert scene.sql("select value from state where key = %s", f"work/{name}") == [(b"60",)]


def test_a_killed_database_loses_nothing_that_was_answered() -> None:
    with scene_on(None) as scene:
        names = [f"w{number}" for number in range(3)]
        agents = {
            n: scene.submit(WORKER, allow=FILES, files={"count.txt": ""}, input_bytes=n.encode())
            for n in names
        }
        held = scene.hold(allow=FILES)
        answered: list[tuple[int, int]] = []
        refused: list[str] = []
        stop = threading.Event()

        def loop() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                try:
                    answered.append((number, held.rf.state.put("held/n", number)))
                except RingfenceError as error:
                    refused.append(error.reason)

        worker = held.rf.thread(loop)
        for _ in range(3):
            seen = len(answered)
            eventually(lambda seen=seen: len(answered) > seen + 20, "the held agent does not go on")
            kill_postgres(scene.kernel.data)
        seen = len(answered)
        eventually(lambda: len(answered) > seen + 5, "the held agent does not go on after the last kill")
        stop.set()
        worker.join()
        # A call waits or fails as unavailable: nothing else is ever said.
        assert set(refused) <= {"JournalUnavailable"}
        check_work(scene, agents)
        # Every version that was answered is there, with the value that was put.
        rows = scene.sql("select version, value from state_history where key = 'held/n'")
        history = {version: int(bytes(value)) for version, value in rows}
        assert {version: number for number, version in answered}.items() <= history.items()
        assert scene.operator.ask("AuditVerify")["ok"]
        assert scene.operator.ask("Status")["database"]["state"] == "ok"


def test_an_outage_ends_no_agent_and_forgets_no_end() -> None:
    with server() as database, scene_on(database.dsn) as scene:
        worker = scene.submit(WORKER, allow=FILES, files={"count.txt": ""}, input_bytes=b"out")
        ending = scene.submit(
            "import time\nprint('up', flush=True)\ntime.sleep(10000)",
            more="restart: {policy: on-failure, max: 1}",
        )
        eventually(lambda: "up" in scene.output(ending), "the program did not start")
        held = scene.hold(allow=FILES)
        held.rf.fs.write_text("a.txt", "before")
        pid = scene.show(ending)["pid"]
        # One call has had its effect and not yet its outcome when the database goes, for longer than a lease.
        mover = scene.hold(allow=FILES, files={"from": "moved"})
        scene.kernel.arm("fs.move:before_outcome")
        moving = mover.rf.thread(lambda: mover.rf.fs.move("from", "to"))
        scene.kernel.await_hit("fs.move:before_outcome")
        database.stop()
        scene.kernel.disarm("fs.move:before_outcome")
        # While the database is away: a call fails as unavailable or waits, nothing happens, and people are told.
        with ThreadPoolExecutor() as pool:
            status = pool.submit(scene.operator.ask, "Status")
            listing = pool.submit(scene.operator.ask, "List", all=True)
            held.refused(JournalUnavailable, lambda: held.rf.fs.write_text("a.txt", "during"))
            assert status.result()["database"]["state"] == "away"
            with pytest.raises(Refused) as refused:
                listing.result()
        assert refused.value.exit_code == 6
        assert (held.live / "a.txt").read_text() == "before"
        # A program ends meanwhile: its end must not be lost.
        os.kill(pid, signal.SIGKILL)
        database.start()
        eventually(lambda: answers(scene), "the kernel does not come back")
        held.rf.fs.write_text("a.txt", "after")
        assert (held.live / "a.txt").read_text() == "after"
        eventually(lambda: scene.show(ending)["restarts"] == 1, "the killed program was not started again")
        assert moving.result(60) == "/workspace/to"
        assert (mover.live / "to").read_text() == "moved"
        assert [(s["action"], s["outcome"]) for s in mover.steps()] == [("fs.move", "ok")]
        check_work(scene, {"out": worker})
        scene.operator.ask("Kill", agent=ending)
        assert scene.operator.ask("AuditVerify")["ok"]


def answers(scene: Scene) -> bool:
    try:
        return scene.operator.ask("Status", timeout=5)["database"]["state"] == "ok"
    except Refused:
        return False


def test_agents_go_on_over_an_ordered_stop_and_over_a_killed_database_in_recovery() -> None:
    with short_directory() as directory:
        kernel = KernelProcess(directory / "d")
        kernel.start()
        scene = Scene(kernel)
        names = [f"r{number}" for number in range(6)]
        agents = {
            n: scene.submit(WORKER, allow=FILES, files={"count.txt": ""}, input_bytes=n.encode())
            for n in names
        }
        eventually(
            lambda: min(len(scene.operator.steps(a)) for a in agents.values()) > 3, "they did not begin"
        )
        assert kernel.stop() == 0
        kernel.start()
        eventually(
            lambda: sum(len(scene.operator.steps(a)) for a in agents.values()) > 60, "they do not go on"
        )
        kernel.kill()
        kernel.start()
        # In the middle of taking over and starting again.
        kill_postgres(kernel.data)
        eventually(lambda: answers(scene), "the kernel does not come back")
        check_work(scene, agents)
        assert scene.operator.ask("AuditVerify")["ok"]
        assert kernel.stop() == 0


def test_a_kernel_stops_without_its_database_and_loses_nothing_that_was_answered() -> None:
    with server() as database, scene_on(database.dsn) as scene:
        worker = scene.submit(WORKER, allow=FILES, files={"count.txt": ""}, input_bytes=b"gone")
        eventually(lambda: len(scene.operator.steps(worker)) > 3, "it did not begin")
        database.stop()
        # It is away from before the stop until after it: whatever waited for it would wait for ever.
        assert scene.kernel.stop() == 0
        assert "stops without its database" in scene.kernel.log.read_text()
        database.start()
        scene.kernel.start()
        check_work(scene, {"gone": worker})
        assert scene.operator.ask("AuditVerify")["ok"]


# -- no place for a rollback point --------------------------------------------------------------------------------------


def test_no_point_no_effect(tmp_path: Path) -> None:
    """C46: where no verified rollback point can be taken, nothing is destroyed."""
    with server() as database, scene_on(database.dsn) as scene:
        held = scene.hold(
            allow=['fs.*: "/workspace/**"', 'exec.run: "*"'], files={"tree/a": "a" * 300_000, "b": "b"}
        )
        store = scene.kernel.data / "points" / held.id
        if store.exists():
            store.rename(tmp_path / "points")
        store.parent.mkdir(exist_ok=True)
        store.write_text("no directory")
        for call in (
            lambda: held.rf.fs.delete("tree", recursive=True),
            lambda: held.rf.fs.write_text("b", "changed"),
            lambda: held.rf.fs.move("b", "c"),
            lambda: held.rf.exec.run(["rm", "-r", "tree"]),
        ):
            error = held.refused(SnapshotFailed, call)
            assert "\n" not in error.message
        assert (held.live / "tree" / "a").read_text() == "a" * 300_000
        assert (held.live / "b").read_text() == "b"
        assert {(s["verdict"], s["outcome"]) for s in held.steps()} == {("allow", "refused")}
        store.unlink()
        assert held.rf.fs.delete("tree", recursive=True) == 2
        assert held.operator.ask("Points", agent=held.id, verify=True)["points"][0]["verified"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk_refuses_and_recovers() -> None:
    import subprocess

    with server() as database, scene_on(database.dsn) as scene:
        held = scene.hold(allow=['fs.*: "/workspace/**"'], files={"big": os.urandom(400_000), "small": "s"})
        store = scene.kernel.data / "points" / held.id
        store.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(store)]
        subprocess.run(mount, check=True)
        try:
            error = held.refused(SnapshotFailed, lambda: held.rf.fs.delete("big"))
            assert "is full; free space on its disk" in error.message
            assert (held.live / "big").exists()
            # What fits goes on.
            held.rf.fs.write_text("small", "t")
            assert held.rf.fs.read_text("small") == "t"
        finally:
            subprocess.run(["umount", "--lazy", str(store)], check=True)
        assert held.rf.fs.delete("big") == 1
