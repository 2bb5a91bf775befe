"""Two kernels on one database: revocation across them, leases, takeover, and an owner that slept past its lease."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Denied, Revoked, RingfenceError
from support.kernels import KernelProcess, Operator, Refused, eventually
from support.scenes import Held, Scene, scene_on, short_directory

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def database(postgres_server: Any, template_database: str) -> Iterator[str]:
    name = postgres_server.create(template_database)
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


@pytest.fixture(scope="module")
def owner(database: str) -> Iterator[Scene]:
    with scene_on(database) as scene:
        yield scene


@pytest.fixture(scope="module")
def other(database: str, owner: Scene) -> Iterator[Scene]:
    with scene_on(database) as scene:
        yield scene


def test_another_kernel_sees_the_agent_and_sends_people_to_its_owner(owner: Scene, other: Scene) -> None:
    held = owner.hold()
    rows = other.operator.ask("List", all=True)["agents"]
    assert [row["state"] for row in rows if row["id"] == held.id] == ["running"]
    for verb in ("Show", "Pause", "Kill", "Points"):
        with pytest.raises(Refused) as refused:
            other.operator.ask(verb, agent=held.id)
        assert refused.value.exit_code == 5, verb
        assert "another kernel" in str(refused.value)
    assert owner.show(held.id)["process"] == "live"


def test_a_grant_of_another_kernel_counts_at_once(owner: Scene, other: Scene) -> None:
    held = owner.hold()
    held.refused(Denied, lambda: held.rf.state.put("two/grant", 1))
    granted = other.operator.ask("Grant", agent=held.id, rule='state.put: "two/grant"')
    held.rf.state.put("two/grant", 1)
    assert held.last()["rule"] == granted["id"]


def test_no_call_after_a_revoke_of_another_kernel_is_allowed(owner: Scene, other: Scene) -> None:
    """C23 over two kernels: the journal's own order decides, and the very next call is denied."""
    held = owner.hold(allow=['state.get: "**"'])
    revocations: list[tuple[int, int]] = []
    for number in range(25):
        granting, revoking = (owner, other) if number % 2 else (other, owner)
        granted = granting.operator.ask("Grant", agent=held.id, rule='state.put: "two/**"')
        stop, began = threading.Event(), threading.Event()

        def loop(stop: threading.Event = stop, began: threading.Event = began) -> None:
            while not stop.is_set():
                try:
                    held.rf.state.put("two/key", 1)
                    began.set()
                except (Denied, Revoked):
                    return

        workers = [held.rf.thread(loop) for _ in range(2)]
        assert began.wait(30)
        revoked = (other if revoking is owner else revoking).operator.ask(
            "Revoke", agent=held.id, rule_or_grant=granted["id"]
        )
        revocations.append((revoked["epoch"], position(owner, held)))
        held.refused(Denied, lambda: held.rf.state.put("two/after", 1))
        stop.set()
        for worker in workers:
            worker.join()
    assert owner.sql("select 1 from state where key = 'two/after'") == []
    rows = owner.sql(
        "select pos, verdict, body from journal where chain = %s and phase = 1 and action = 'state.put' order by pos",
        owner.key_of(held.id),
    )
    allowed = [(pos, json.loads(bytes(body))["epoch"]) for pos, verdict, body in rows if verdict == "allow"]
    assert len(allowed) > 25
    for epoch, pos in revocations:
        late = [row for row in allowed if row[0] > pos and row[1] < epoch]
        assert late == []


def test_no_call_after_a_deny_of_another_kernel_is_allowed(owner: Scene, other: Scene) -> None:
    """C25: a deny that one kernel is told is in force on the other when it answers, under load, and at once."""
    held = owner.hold(allow=['"*": "**"'])
    denies: list[tuple[str, int, int]] = []
    for number in range(6):
        stop, began = threading.Event(), threading.Event()

        def loop(stop: threading.Event = stop, began: threading.Event = began) -> None:
            while not stop.is_set():
                with contextlib.suppress(Denied, Revoked):
                    held.rf.state.put("barred/key", 1)
                    began.set()

        workers = [held.rf.thread(loop) for _ in range(2)]
        assert began.wait(30)
        denied = other.operator.ask("Grant", agent=held.id, rule='state.put: "barred/**"', deny=True)
        denies.append((denied["id"], denied["epoch"], position(owner, held)))
        error = held.refused(Denied, lambda: held.rf.state.put("barred/after", 1))
        assert f"rule {denied['id']}" in error.message
        held.rf.state.put("free/key", number)
        stop.set()
        for worker in workers:
            worker.join()
        # Nothing but its id takes it away, on either kernel.
        for kernel in (owner, other):
            with pytest.raises(Refused):
                kernel.operator.ask("Revoke", agent=held.id, rule_or_grant='state.put: "barred/**"')
            can = owner.operator.ask("PolicyCanI", agent=held.id, action="state.put", resource="barred/x")
            assert (can["verdict"], can["rule"]) == ("deny", denied["id"])
        (owner if number % 2 else other).operator.ask("Revoke", agent=held.id, rule_or_grant=denied["id"])
        held.rf.state.put("barred/key", 1)
    rows = owner.sql(
        "select pos, body, resource from journal where chain = %s and phase = 1 and action = 'state.put' and verdict = 'allow'",
        owner.key_of(held.id),
    )
    for _, epoch, pos in denies:
        late = [
            p
            for p, body, name in rows
            if p > pos and "barred" in name and json.loads(bytes(body))["epoch"] < epoch
        ]
        assert late == []
    assert owner.sql("select 1 from state where key = 'barred/after'") == []


def position(scene: Scene, held: Held) -> int:
    """The newest position of the agent's chain."""
    return scene.sql("select max(pos) from journal where chain = %s", scene.key_of(held.id))[0][0]


def test_what_was_under_way_is_told_across_kernels(owner: Scene, other: Scene) -> None:
    held = owner.hold(allow=['exec.run: "*"', 'fs.*: "/workspace/**"'])
    caught: list[RingfenceError] = []

    def run() -> None:
        try:
            held.rf.exec.run(["sh", "-c", "touch begun; sleep 600"])
        except RingfenceError as error:
            caught.append(error)

    worker = held.rf.thread(run)
    eventually(lambda: any((held.live.parent / "scratch").glob("*/upper/begun")), "the command did not start")
    revoked = other.operator.ask("Revoke", agent=held.id, all=True)
    assert [(c["action"], c["fate"]) for c in revoked["affected"]] == [("exec.run", "cancelled")]
    worker.join()
    assert [type(error) for error in caught] == [Revoked]
    assert not (held.live / "begun").exists()


def test_files_stay_with_their_kernel(owner: Scene, other: Scene, database: str) -> None:
    """A kernel that dies leaves its agents to whoever has their files, and to nobody else."""
    with short_directory() as directory:
        third = KernelProcess(directory / "d", dsn=database)
        third.start()
        assert third.process is not None
        scene = Scene(third)
        held = scene.hold(allow=['fs.*: "/workspace/**"'])
        held.rf.fs.append_text("count.txt", "x")
        third.kill()
        scene.sql("update kernels set lease_until = clock_timestamp() where pid = %s", third.process.pid)
        # A kernel looks for agents before it answers; this one finds none whose files it has.
        with scene_on(database) as fresh:
            assert fresh.operator.ask("Status")["agents"]["running"] >= 1
        assert scene.sql("select state from agents where id = %s", held.id) == [("running",)]
        with pytest.raises(Refused) as refused:
            other.operator.ask("Start", agent=held.id)
        assert refused.value.exit_code == 5
        # Moved to another directory, its files come with it, and its agent goes on there.
        moved = KernelProcess(directory / "moved", dsn=database)
        (directory / "d").rename(moved.data)
        shutil.rmtree(moved.data / "run", ignore_errors=True)
        moved.start()
        try:
            scene.kernel = moved
            eventually(lambda: scene.show(held.id)["process"] == "live", "it was not started again")
            held.again()
            held.socket = scene.socket_of(held.id)
            held.rf.fs.append_text("count.txt", "x")
            assert (scene.live(held.id) / "count.txt").read_text() == "x"
            scene.release()
        finally:
            moved.stop()


def test_a_revoke_waits_for_no_sleeping_owner_longer_than_its_lease(database: str, other: Scene) -> None:
    """The owner is stopped past its lease; the revoke returns, and the owner, awake again, allows nothing under the right."""
    with scene_on(database) as scene:
        held = scene.hold(allow=['state.put: "sleepy/**"'])
        done: list[str] = []
        began = threading.Event()

        def loop() -> None:
            while True:
                try:
                    held.rf.state.put("sleepy/key", 1)
                    began.set()
                except RingfenceError as error:
                    done.append(error.reason)
                    if error.reason in ("Denied", "Revoked"):
                        return

        worker = held.rf.thread(loop)
        assert began.wait(30)
        process = scene.kernel.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            revoked = other.operator.ask("Revoke", agent=held.id, all=True)
            after = position(scene, held)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        worker.join()
        assert done[-1] in ("Denied", "Revoked")
        rows = scene.sql(
            "select pos, body from journal where chain = %s and phase = 1 and verdict = 'allow' and pos > %s",
            scene.key_of(held.id),
            after,
        )
        assert [pos for pos, body in rows if json.loads(bytes(body))["epoch"] < revoked["epoch"]] == []
        # Nobody took its agents over: it goes on.
        assert scene.operator.ask("Status")["database"]["state"] == "ok"


def spawn_cut_short(rf: Any) -> None:
    with pytest.raises(RingfenceError):
        rf.spawn("cut-short", ["true"], workspace="count.txt")


def test_a_kernel_that_was_taken_over_from_commits_nothing_and_ends(database: str) -> None:
    """C37: a second kernel on the same files, past the lock, while the first sleeps."""
    with short_directory() as directory:
        first = KernelProcess(directory / "d", dsn=database)
        first.start()
        scene = Scene(first)
        held = scene.hold(allow=['fs.*: "/workspace/**"', 'state.*: "**"', 'spawn: "*"'])
        held.rf.fs.append_text("count.txt", "x")
        assert first.process is not None
        # One call stands where it is about to make the files of a child.
        first.arm("spawn:before_files")
        spawning = held.rf.thread(lambda rf=held.rf: spawn_cut_short(rf))
        first.await_hit("spawn:before_files")
        os.kill(first.process.pid, signal.SIGSTOP)
        first.disarm("spawn:before_files")
        first.operator.close()
        # Someone removes the lock: that must not be the only thing that keeps two kernels apart.
        (first.data / "kernel.lock").unlink()
        second = KernelProcess(first.data, dsn=database)
        second.start()
        try:
            scene.kernel = second
            eventually(lambda: scene.show(held.id)["process"] == "live", "it was not taken over")
            held.again()
            held.rf.fs.append_text("count.txt", "x")
            held.rf.state.put("taken/by", "second")
            os.kill(first.process.pid, signal.SIGCONT)
            assert first.process.wait(timeout=60) == 1
            spawning.join()
            # It laid out the files before it knew that it was fenced: nobody else makes a child of that name.
            agents = second.data / "agents"
            eventually(lambda: not list(agents.glob(".spawn-*")), "files of a child of nobody are left")
            assert scene.sql("select 1 from agents where name = 'cut-short'") == []
            assert "taken over" in first.log.read_text()
            # Its end took nothing from its successor.
            held.rf.fs.append_text("count.txt", "y")
            assert (scene.live(held.id) / "count.txt").read_text() == "xy"
            told = json.loads((second.data / "kernel.json").read_text())
            assert told["pid"] == scene.operator.ask("Status")["pid"] != first.process.pid
            second.operator.close()
            second.operator = Operator(told["listen"])
            assert scene.show(held.id)["process"] == "live"
            fences = scene.sql("select fence from kernels where pid = %s", first.process.pid)
            assert fences[0][0] < 0
            assert scene.operator.ask("AuditVerify")["ok"]
        finally:
            held.end()
            second.stop()
            if first.process.poll() is None:
                first.process.kill()
                first.process.wait()
