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
from support.kernels import KernelProcess, eventually
from support.target import Target

pytestmark = [
    pytest.mark.fault,
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

PROGRAM = """
import json, sys
from ringfence import agent

job = json.load(sys.stdin)
with agent.boot() as rf:
    rf.now()
    name = job["name"]
    if name == "append":
        rf.fs.append_text("counted.txt", "x")
    elif name == "write":
        rf.fs.write_text("written.txt", "new")
    elif name == "move":
        rf.fs.move("from.txt", "to.txt")
    elif name == "delete":
        rf.fs.delete("tree", recursive=True)
    elif name == "exec":
        rf.exec.run(["sh", "-c", "printf x >> counted.txt; rm doomed.txt"])
    elif name == "insert":
        rf.sql.execute("target", "insert into counted (agent) values (%s)", [job["id"]])
    elif name == "remove":
        rf.sql.execute("target", "delete from stock where agent = %s", [job["id"]])
    elif name == "state":
        with rf.state.transaction() as tx:
            tx.put(job["id"], (tx.get(job["id"]) or 0) + 1)
    elif name == "put":
        rf.state.put(job["id"], 1)
    elif name == "keyed":
        rf.http.post(job["base"] + "/keyed/" + job["id"], json={"pay": 1})
    elif name == "unknown":
        rf.http.post(job["plain"] + "/plain/" + job["id"], json={"pay": 1})
    elif name == "get":
        rf.http.get(job["base"] + "/get/" + job["id"])
    elif name == "select":
        rf.sql.query("target", "select count(*) as n from stock")
    elif name == "read":
        rf.fs.read_text("read.txt")
    elif name == "send":
        rf.messages.send(job["peer"], job["id"])
    elif name == "receive":
        rf.artifacts.put("received", rf.messages.receive().text)
    elif name == "memory":
        rf.memory.append("counted", space=job["id"])
    elif name == "artifact":
        rf.artifacts.put("counted", job["id"])
    elif name == "timer":
        rf.sleep(0.5)
        rf.fs.append_text("counted.txt", "x")
    rf.checkpoint.save({"done": True})
"""

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {{name: {name}}}
spec:
  run: {{command: [python, agent.py]}}
  permissions:
    allow:
      - fs.*: "/workspace/**"
      - exec.run: "*"
      - state.*: "**"
      - http.*: "{base}/**"
      - http.*: "{plain}/**"
      - sql.*: {{database: target}}
      - messages.*: "*"
      - memory.*: "**"
      - artifacts.*: "*"
  restart: {{policy: on-failure, max: 3}}
"""

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    keyed: {{type: http, base: "{base}", idempotency_header: Idempotency-Key}}
    plain: {{type: http, base: "{plain}"}}
    target: {{type: postgres, embedded: true}}
"""

ACTIONS = {
    "append": "fs.append",
    "write": "fs.write",
    "move": "fs.move",
    "delete": "fs.delete",
    "exec": "exec.run",
    "insert": "sql.write",
    "remove": "sql.write",
    "state": "state.transaction",
    "put": "state.put",
    "keyed": "http.post",
    "unknown": "http.post",
    "get": "http.get",
    "select": "sql.read",
    "read": "fs.read",
    "send": "messages.send",
    "receive": "messages.receive",
    "memory": "memory.append",
    "artifact": "artifacts.put",
    "timer": "sleep",
}

WORKSPACE = {
    "agent.py": PROGRAM,
    "counted.txt": "",
    "doomed.txt": "doomed",
    "from.txt": "moved",
    "read.txt": "read",
    "written.txt": "old",
    "tree/a": "a",
    "tree/deep/b": "b",
    "tree/empty": None,
}

# What each row passes through; a row without intent has no such commit, a mere read no effect to count.
POINTS = (
    "before_intent",
    "after_intent",
    "before_effect",
    "after_effect",
    "before_apply",
    "after_apply",
    "before_outcome",
    "after_outcome",
)
ATOMIC = {"state", "put", "send", "receive", "memory", "artifact"}
NO_INTENT = {"read"}
READS = {"get", "select"}


ARTIFACTS = (
    "select f.name, f.version, f.ref from artifacts f join agents a on a.key = f.agent where a.id = %s"
)


def passes(name: str, point: str) -> bool:
    """Whether the row of this job reaches a failpoint."""
    if point in ("before_apply", "after_apply"):
        return name == "exec"
    if name in ATOMIC:
        return point in ("before_intent", "after_outcome")
    if name in NO_INTENT:
        return point in ("before_outcome", "after_outcome")
    if name == "exec":
        return point not in ("before_effect", "after_effect")
    if name in ("select", "timer"):
        return point not in ("before_effect", "after_effect")
    return True


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
                if name == "remove":
                    connection.execute(
                        "insert into stock (agent) select %s from generate_series(1, 3)", [self.ids[name]]
                    )
        for action in {ACTIONS[name] for name in self.names}:
            self.kernel.arm(f"{action}:{self.point}")
        for name in self.names:
            manifest = MANIFEST.format(name=self.ids[name], base=base, plain=plain)
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
        for action in {ACTIONS[name] for name in self.names}:
            self.kernel.await_hit(f"{action}:{self.point}")
        for name in self.names:
            eventually(lambda name=name: self.standing(name), f"{name} did not come to {self.point}")

    def standing(self, name: str) -> bool:
        hits = self.kernel.failpoints / f"{ACTIONS[name]}:{self.point}.hit"
        return str(self.agents[name]) in hits.read_text().split()

    def disarm(self) -> None:
        for action in {ACTIONS[name] for name in self.names}:
            self.kernel.disarm(f"{action}:{self.point}")

    # -- what must hold -----------------------------------------------------------------------------------------------

    def live(self, name: str) -> Path:
        return Path(self.kernel.operator.ask("Show", agent=self.agents[name])["workspace"])

    def check_finished(self, *, unknown: bool) -> None:
        for name in self.names:
            ended = self.kernel.operator.wait(self.agents[name])
            if name == "unknown" and unknown:
                assert ended["state"] == "unknown", (name, self.point, ended)
                self.settle(name)
                ended = self.kernel.operator.wait(self.agents[name])
            assert ended["state"] == "done", (
                name,
                self.point,
                ended,
                self.kernel.operator.steps(self.agents[name]),
            )
            self.count(name)
            if name == "timer":
                self.count_slept(name)

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
            keys = {
                d["headers"].get("idempotency-key") for d in self.keyed.deliveries(f"/keyed/{self.ids[name]}")
            }
            assert len(keys) == 1, where
            assert None not in keys, where
        if name == "unknown":
            assert len(self.plain.deliveries(f"/plain/{self.ids[name]}")) == 1, where
        if name in ("state", "put"):
            assert self.state_of(self.ids[name]) == 1, where
        self.count_kept(name)
        if name in ("insert", "remove"):
            with target_of(self.kernel.data) as connection:
                table, expected = ("counted", 1) if name == "insert" else ("stock", 0)
                row = connection.execute(
                    f"select count(*) from {table} where agent = %s", [self.ids[name]]
                ).fetchone()
                assert row == (expected,), where

    def count_kept(self, name: str) -> None:
        where = (name, self.point)
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

    def asked(self, statement: str, value: str) -> list[tuple[Any, ...]]:
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
        os.kill(pid, signal.SIGKILL)
    matrix.disarm()
    # The kernel lives: it finishes the calls of the dead and answers their successors from the journal.
    matrix.check_finished(unknown=False)
