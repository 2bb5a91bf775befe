"""The kill matrix: SIGKILL from outside at every named failpoint of the path, for every recovery class.

One agent per action waits at the same failpoint; then the kernel, or every agent, is killed at once. Effects are counted
by separate processes: an HTTP counter, the target database, the files on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import ACTIONS, ARTIFACTS, ASKED, CONFIG, MANIFEST, POINTS, WORKSPACE, kind_of, passes
from support.kernels import KernelProcess, eventually
from support.target import Target

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, Target]]:
    directory = tmp_path_factory.mktemp("counters")
    both = Target(directory / "keyed"), Target(directory / "plain")
    yield both
    for counter in both:
        counter.close()


@pytest.fixture(scope="module")
def kernel(
    tmp_path_factory: pytest.TempPathFactory, counters: tuple[Target, Target]
) -> Iterator[KernelProcess]:
    keyed, plain = counters
    data = tmp_path_factory.mktemp("k") / "data"
    process = KernelProcess(data, config=CONFIG.format(base=keyed.base, plain=plain.base))
    process.start()
    with target_of(data) as connection:
        connection.execute("create table counted (id serial primary key, agent text not null)")
        connection.execute("create table stock (id serial primary key, agent text not null)")
    yield process
    process.stop()


def target_of(data: Path) -> Any:
    """A connection of our own to the target, beside the kernel's."""
    import psycopg
    from ringfence.kernel.postgres import EmbeddedPostgres

    return psycopg.connect(EmbeddedPostgres(data).dsn("target", "target"), autocommit=True)


OVER = ("done", "failed", "killed", "unknown")


class Matrix:
    """All jobs of one cell column: submitted, stopped at one failpoint, killed, finished, counted."""

    def __init__(self, kernel: KernelProcess, counters: tuple[Target, Target], point: str, tag: str) -> None:
        self.kernel = kernel
        self.keyed, self.plain = counters
        self.point = point
        self.names = [name for name in ACTIONS if passes(name, point)]
        self.ids = {name: f"{name}-{point}-{tag}".replace("_", "-") for name in self.names}
        self.agents: dict[str, str] = {}
        self._peer = ""

    def submit(self) -> None:
        base, plain = self.keyed.base, self.plain.base
        with target_of(self.kernel.data) as connection:
            for name in self.names:
                if kind_of(name) == "remove":
                    connection.execute(
                        "insert into stock (agent) select %s from generate_series(1, 3)", [self.ids[name]]
                    )
        for action in {ACTIONS[name] for name in self.names}:
            self.kernel.arm(f"{action}:{self.point}")
        for name in self.names:
            manifest = MANIFEST.format(name=self.ids[name], base=base, plain=plain)
            if name in ASKED:
                manifest = manifest.replace("  restart:", f"    ask: [{{{ASKED[name]}}}]\n  restart:")
            job = {
                "name": name,
                "id": self.ids[name],
                "base": base,
                "plain": plain,
                "peer": self.peer() if name == "send" else "",
            }
            self.agents[name] = self.kernel.operator.submit(
                manifest, WORKSPACE, input_bytes=json.dumps(job).encode()
            )
            if name == "receive":
                for text in ("first", "second"):
                    self.kernel.operator.ask("Send", agent=self.agents[name], text=text)

    def peer(self) -> str:
        """An agent that only has a mailbox."""
        if not self._peer:
            text = MANIFEST.replace("[python, agent.py]", "[sleep, '100000']")
            manifest = text.format(
                name=f"peer-{len(self.names)}", base=self.keyed.base, plain=self.plain.base
            )
            self._peer = self.kernel.operator.submit(manifest, {})
        return self._peer

    def await_hits(self) -> None:
        """Every agent stands at its failpoint: its second call is under way and goes no further."""
        for name in self.names:
            eventually(lambda name=name: self.standing(name), f"{name} did not come to {self.point}")

    def standing(self, name: str) -> bool:
        self.approve()
        hits = self.kernel.failpoints / f"{ACTIONS[name]}:{self.point}.hit"
        return hits.exists() and str(self.agents[name]) in hits.read_text().split()

    def approve(self) -> None:
        """A person approves whatever waits."""
        for waits in self.kernel.operator.ask("Approvals")["approvals"]:
            self.kernel.operator.ask("Approve", id=waits["id"])

    def gone(self, name: str) -> bool:
        return self.kernel.operator.ask("Show", agent=self.agents[name])["process"] == "none"

    def disarm(self) -> None:
        for action in {ACTIONS[name] for name in self.names}:
            self.kernel.disarm(f"{action}:{self.point}")

    # -- what must hold -----------------------------------------------------------------------------------------------

    def live(self, name: str) -> Path:
        return Path(self.kernel.operator.ask("Show", agent=self.agents[name])["workspace"])

    def check_finished(self, *, unknown: bool) -> None:
        for name in self.names:
            ended = self.ended(name)
            if kind_of(name) == "unknown" and unknown:
                assert ended["state"] == "unknown", (name, self.point, ended)
                self.settle(name)
                ended = self.ended(name)
            assert ended["state"] == "done", (
                name,
                self.point,
                ended,
                self.kernel.operator.steps(self.agents[name]),
            )
            self.count(name)
            if name == "timer":
                self.count_slept(name)

    def ended(self, name: str) -> dict[str, Any]:
        """How the agent ends. A call that was killed before it was made asks again."""

        def over() -> bool:
            self.approve()
            return self.kernel.operator.ask("Show", agent=self.agents[name])["state"] in OVER

        eventually(over, f"{name} does not end after {self.point}")
        return self.kernel.operator.wait(self.agents[name])

    def settle(self, name: str) -> None:
        """The operator looks at the target and says what is true there."""
        sent = bool(self.plain.deliveries(f"/plain/{self.ids[name]}"))
        step = next(
            s["step"] for s in self.kernel.operator.steps(self.agents[name]) if s["outcome"] == "unknown"
        )
        self.kernel.operator.ask(
            "Resolve", agent=self.agents[name], step=step, outcome="done" if sent else "not-done"
        )

    def count(self, name: str) -> None:
        where = (name, self.point)
        live = self.live(name)
        ident, name = self.ids[name], kind_of(name)
        if name in ("append", "exec", "timer"):
            assert (live / "counted.txt").read_text() == "x", where
        if name == "exec":
            assert not (live / "doomed.txt").exists(), where
        if name == "write":
            assert (live / "written.txt").read_text() == "new", where
        if name == "move":
            assert (live / "to.txt").read_text() == "moved", where
            assert not (live / "from.txt").exists(), where
        if name == "delete":
            assert not (live / "tree").exists(), where
        if name == "keyed":
            keys = {d["headers"].get("idempotency-key") for d in self.keyed.deliveries(f"/keyed/{ident}")}
            assert len(keys) == 1, where
            assert None not in keys, where
        if name == "unknown":
            assert len(self.plain.deliveries(f"/plain/{ident}")) == 1, where
        if name in ("state", "put"):
            assert self.state_of(ident) == 1, where
        self.count_kept(name)
        if name in ("insert", "remove"):
            with target_of(self.kernel.data) as connection:
                table, expected = ("counted", 1) if name == "insert" else ("stock", 0)
                row = connection.execute(f"select count(*) from {table} where agent = %s", [ident]).fetchone()
                assert row == (expected,), where

    def count_kept(self, name: str) -> None:
        where = (name, self.point)
        if name == "spawn":
            self.count_children(name)
        if name == "send":
            assert self.rows("select body from messages where sender = %s", name) == [(self.ids[name],)], (
                where
            )
        if name == "receive":
            taken = self.rows(
                "select m.body, m.taken_step is not null, count(t.step) from messages m "
                "left join message_takes t on t.message = m.key join agents a on a.key = m.recipient "
                "where a.id = %s group by m.key order by m.key",
                name,
            )
            assert taken == [("first", True, 1), ("second", False, 0)], where
            first = hashlib.sha256(b"first").hexdigest()
            assert self.rows(ARTIFACTS, name) == [("received", 1, first)], where
        if name == "memory":
            kept = "select m.text, m.space from memories m join agents a on a.key = m.agent where a.id = %s"
            assert self.rows(kept, name) == [("counted", self.ids[name])], where
        if name == "artifact":
            ref = hashlib.sha256(self.ids[name].encode()).hexdigest()
            assert self.rows(ARTIFACTS, name) == [("counted", 1, ref)], where
            assert (self.kernel.data / "artifacts" / ref[:2] / ref[2:]).exists(), where

    def count_children(self, name: str) -> None:
        where = (name, self.point)
        born = self.rows(
            "select c.id, c.key from kin k join agents c on c.key = k.child join agents p on p.key = k.parent where p.id = %s",
            name,
        )
        assert len(born) == 1, where
        assert (
            len(self.asked("select key from agents where name = %s", f"child-of-{self.ids[name][:40]}")) == 1
        ), where
        ((child, key),) = born
        assert self.kernel.operator.wait(child)["state"] == "done", where
        assert (self.kernel.data / "agents" / child / "live" / "read.txt").read_text() == "read", where
        branches = self.asked("select count(*) from branches where agent = %s", key)
        assert branches == [(1,)], where
        eventually(
            lambda: not list((self.kernel.data / "agents").glob(".spawn-*")),
            f"{where}: files of nobody are left",
        )

    def count_slept(self, name: str) -> None:
        where = (name, self.point)
        slept = [s for s in self.kernel.operator.steps(self.agents[name]) if s["action"] == "sleep"]
        assert [s["outcome"] for s in slept] == ["ok"], where
        told = self.rows(
            "select j.phase, j.started_us + j.duration_us, j.body from journal j join agents a on a.key = j.chain "
            "where a.id = %s and j.action = 'sleep' and j.phase > 0 order by j.phase",
            name,
        )
        # However often it was begun again: one time to wake was recorded, and it was kept.
        assert [phase for phase, _, _ in told] == [1, 2], where
        assert told[0][1] >= json.loads(bytes(told[1][2]))["wake_at_us"], where

    def state_of(self, key: str) -> Any:
        ((value,),) = self.asked("select value from state where key = %s", key)
        return json.loads(bytes(value))

    def rows(self, statement: str, name: str) -> list[tuple[Any, ...]]:
        """Asks the kernel's database about the agent of a job."""
        return self.asked(statement, self.agents[name])

    def asked(self, statement: str, value: Any) -> list[tuple[Any, ...]]:
        import psycopg
        from ringfence.kernel.postgres import EmbeddedPostgres

        with psycopg.connect(EmbeddedPostgres(self.kernel.data).dsn()) as connection:
            return connection.execute(statement, [value]).fetchall()


@pytest.mark.parametrize("point", POINTS)
def test_kernel_is_killed(kernel: KernelProcess, counters: tuple[Target, Target], point: str) -> None:
    matrix = Matrix(kernel, counters, point, "kernel")
    matrix.submit()
    matrix.await_hits()
    kernel.kill()
    matrix.disarm()
    kernel.start()
    matrix.check_finished(
        unknown=point in ("after_intent", "before_effect", "after_effect", "before_outcome")
    )


@pytest.mark.parametrize("point", POINTS)
def test_every_agent_is_killed(kernel: KernelProcess, counters: tuple[Target, Target], point: str) -> None:
    matrix = Matrix(kernel, counters, point, "agent")
    matrix.submit()
    matrix.await_hits()
    for name in matrix.names:
        pid = kernel.operator.ask("Show", agent=matrix.agents[name])["pid"]
        if pid:  # one that waited long for a person was put to sleep
            os.kill(pid, signal.SIGKILL)
    # On a busy machine a process may live on for a while, get its reply, and be killed behind its checkpoint.
    for name in matrix.names:
        eventually(lambda name=name: matrix.gone(name), f"{name} does not die")
    matrix.disarm()
    # The kernel lives: it finishes the calls of the dead and answers their successors from the journal.
    matrix.check_finished(unknown=False)
