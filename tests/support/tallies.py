"""How often the effect of each job of the kill matrix took place, as observers outside the kernel's path see it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.jobs import ARTIFACTS, kind_of
from support.kernels import eventually

if TYPE_CHECKING:
    from support.matrix import Ground


class Tally:
    """Counts for one job of one agent. 0: the effect is missing or wrong, 1: it is there, more: it was repeated."""

    def __init__(self, ground: Ground, name: str, ident: str, agent: str) -> None:
        self.ground = ground
        self.ident = ident
        self.agent = agent
        self.kind = kind_of(name)
        self.live = Path(ground.kernel.operator.ask("Show", agent=agent)["workspace"])

    def times(self) -> int:
        """How often it happened. A mere read has no effect: it counts as once."""
        return int(getattr(self, f"_{self.kind}", lambda: 1)())

    # -- files --------------------------------------------------------------------------------------------------------

    def _append(self) -> int:
        written = (self.live / "counted.txt").read_text()
        return len(written) if set(written) <= {"x"} else 0

    def _exec(self) -> int:
        return 0 if (self.live / "doomed.txt").exists() else self._append()

    def _write(self) -> int:
        return (self.live / "written.txt").read_text() == "new"

    def _move(self) -> int:
        gone = not (self.live / "from.txt").exists()
        return gone and (self.live / "to.txt").exists() and (self.live / "to.txt").read_text() == "moved"

    def _delete(self) -> int:
        return not (self.live / "tree").exists()

    # -- what left ----------------------------------------------------------------------------------------------------

    def _keyed(self) -> int:
        """A target that takes keys does once what comes with one key; without a key it does it each time."""
        keys = [
            d["headers"].get("idempotency-key") for d in self.ground.keyed.deliveries(f"/keyed/{self.ident}")
        ]
        return len({key for key in keys if key is not None}) + keys.count(None)

    def _unknown(self) -> int:
        return len(self.ground.plain.deliveries(f"/plain/{self.ident}"))

    def _insert(self) -> int:
        return self._target("select count(*) from counted where agent = %s")

    def _remove(self) -> int:
        return self._target("select count(*) from stock where agent = %s") == 0

    def _target(self, statement: str) -> int:
        with self.ground.target() as connection:
            return connection.execute(statement, [self.ident]).fetchone()[0]

    def _model(self) -> int:
        """However often the host was asked: the reply is there once, and its 18 tokens are paid once."""
        rows = self.ground.kernel.operator.ask("List", all=True)["agents"]
        paid = next(row["tokens"] for row in rows if row["id"] == self.agent)
        said = (self.live / "said.txt").read_text()
        return paid // 18 if said == "Good day." and paid % 18 == 0 else said.count("Good day.")

    # -- what the kernel keeps ----------------------------------------------------------------------------------------

    def _state(self) -> int:
        found = self._asked("select value from state where key = %s", self.ident)
        return json.loads(bytes(found[0][0])) if found else 0

    def _put(self) -> int:
        versions = self._asked("select count(*) from state_history where key = %s", self.ident)[0][0]
        return versions if self._state() == 1 else 0

    def _send(self) -> int:
        bodies = self._rows("select body from messages where sender = %s")
        return len(bodies) if set(bodies) <= {(self.ident,)} else 0

    def _receive(self) -> int:
        taken = self._rows(
            "select m.body, m.taken_step is not null, count(t.step) from messages m "
            "left join message_takes t on t.message = m.key join agents a on a.key = m.recipient "
            "where a.id = %s group by m.key order by m.key"
        )
        if [(body, done) for body, done, _ in taken] != [("first", True), ("second", False)]:
            return 2 if all(done for _, done, _ in taken) else 0
        first = hashlib.sha256(b"first").hexdigest()
        return taken[0][2] if self._rows(ARTIFACTS) == [("received", 1, first)] else 0

    def _memory(self) -> int:
        kept = "select m.text, m.space from memories m join agents a on a.key = m.agent where a.id = %s"
        found = self._rows(kept)
        return len(found) if set(found) <= {("counted", self.ident)} else 0

    def _artifact(self) -> int:
        ref = hashlib.sha256(self.ident.encode()).hexdigest()
        found = self._rows(ARTIFACTS)
        there = (self.ground.kernel.data / "artifacts" / ref[:2] / ref[2:]).exists()
        return (
            len(found) if there and {(name, digest) for name, _, digest in found} == {("counted", ref)} else 0
        )

    def _take(self) -> int:
        return self._claim(1, 600)

    def _renew(self) -> int:
        return self._claim(601, 3600)

    def _release(self) -> int:
        return self._claim(0, 0)

    def _claim(self, least_s: float, most_s: float) -> int:
        """How often it was taken, if its last call left it with so much time; a free one has none."""
        found = self._asked(
            "select fence, coalesce(extract(epoch from until - clock_timestamp())::float8, 0) from claims where key = %s",
            self.ident,
        )
        return found[0][0] if found and least_s <= found[0][1] <= most_s else 0

    def _spawn(self) -> int:
        born = self._rows(
            "select c.id, c.key from kin k join agents c on c.key = k.child join agents p on p.key = k.parent "
            "where p.id = %s"
        )
        named = self._asked("select id, key from agents where name = %s", f"child-of-{self.ident[:40]}")
        if len(born) != 1 or named != born:
            return max(len(born), len(named))
        ((child, key),) = born
        agents = self.ground.kernel.data / "agents"
        done = self.ground.kernel.operator.wait(child)["state"] == "done"
        whole = (agents / child / "live" / "read.txt").read_text() == "read"
        branches = self._asked("select count(*) from branches where agent = %s", key)[0][0]
        eventually(lambda: not list(agents.glob(".spawn-*")), "files of a child of nobody are left")
        return branches if done and whole else 0

    def _timer(self) -> int:
        """However often it was begun again: one time to wake was recorded, and it was kept."""
        slept = [s for s in self.ground.kernel.operator.steps(self.agent) if s["action"] == "sleep"]
        told = self._rows(
            "select j.phase, j.started_us + j.duration_us, j.body from journal j join agents a on a.key = j.chain "
            "where a.id = %s and j.action = 'sleep' and j.phase > 0 order by j.phase"
        )
        once = [phase for phase, _, _ in told] == [1, 2] and [s["outcome"] for s in slept] == ["ok"]
        kept = once and told[0][1] >= json.loads(bytes(told[1][2]))["wake_at_us"]
        return self._append() if kept else 0

    def _rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Asks the kernel's database about the agent of the job."""
        return self._asked(statement, self.agent)

    def _asked(self, statement: str, value: Any) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self.ground.server.dsn) as connection:
            return connection.execute(statement, [value]).fetchall()
