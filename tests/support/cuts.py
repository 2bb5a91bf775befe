"""A scripted agent that is cut before and after each of its calls, and the hash of all it leaves behind.

The script pays an order over a real database, files and a target that takes keys. Whoever is cut stands between two calls,
where the program sees from a mounted directory whether it may go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.databases import server
from support.kernels import eventually
from support.matrix import Ground, Result
from support.scenes import short_directory
from support.victims import kill_all, take_over, wardens

CALLS = 12
PLACES = tuple(f"{side} {number}" for number in range(CALLS) for side in ("before", "after"))
VICTIMS = ("agent", "kernel", "sandboxes", "database", "takeover")

PROGRAM = """
import json, os, sys, time
from ringfence import agent

job = json.load(sys.stdin)
run, amount = job["run"], job["amount"]

def held():
    # By its directory: a name that was looked up in vain may be remembered as missing.
    return os.path.basename(job["flag"]) not in os.listdir(os.path.dirname(job["flag"]))

def cut(place):
    if job["cut"] == place and held():
        print("stands", flush=True)
        while held():
            time.sleep(0.01)

with agent.boot() as rf:
    def execute(statement, *values):
        return rf.sql.execute("target", statement, list(values))

    def balance():
        rows = rf.sql.query("target", "select amount from accounts where run = %s and name = 'anna'", [run])
        rf.fs.write_text("order.json", json.dumps({"amount": amount, "of": rows[0]["amount"]}))

    def total():
        with rf.state.transaction() as tx:
            tx.put("orders/" + run, (tx.get("orders/" + run) or 0) + amount)

    calls = [
        lambda: execute("insert into accounts (run, name, amount) values (%s, 'anna', 100), (%s, 'bert', 0)", run, run),
        balance,
        lambda: rf.http.post(job["base"] + "/pay/" + run, json={"charge": amount}),
        lambda: execute("update accounts set amount = amount - %s where run = %s and name = 'anna'", amount, run),
        lambda: execute("update accounts set amount = amount + %s where run = %s and name = 'bert'", amount, run),
        lambda: rf.fs.append_text("ledger.txt", f"anna {amount}\\n"),
        lambda: rf.exec.run(["sh", "-c", "sort ledger.txt > sorted.txt; wc -l < ledger.txt >> counts.txt"]),
        total,
        lambda: rf.http.post(job["base"] + "/receipt/" + run, json={"paid": amount}),
        lambda: execute("delete from accounts where run = %s and amount = 0", run),
        lambda: rf.fs.move("order.json", "done.json"),
        lambda: rf.fs.delete("draft.txt"),
    ]
    at = (rf.checkpoint.restored or {"next": 0})["next"]
    for number in range(at, len(calls)):
        cut(f"before {number}")
        calls[number]()
        cut(f"after {number}")
        if number == 5:
            rf.checkpoint.save({"next": number + 1})
"""

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {{name: {name}}}
spec:
  run: {{command: [python, agent.py]}}
  sandbox: {{mounts: ["{flags}"]}}
  permissions:
    allow:
      - fs.*: "/workspace/**"
      - exec.run: "*"
      - state.*: "**"
      - http.*: "{base}/**"
      - sql.*: {{database: target}}
  restart: {{policy: {policy}}}
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One order.

    Attributes:
        name: of the run, and in all that it writes.
        place: where it is cut; empty: nowhere.
        amount: what is paid.
        resumes: whether it goes on from its journal and checkpoint; else a person starts the program anew.
    """

    name: str
    place: str = ""
    amount: int = 30
    resumes: bool = True


class Cuts:
    """Runs on one ground."""

    def __init__(self, ground: Ground, flags: Path) -> None:
        self.ground = ground
        self.flags = flags
        self.agents: dict[str, str] = {}
        with ground.target() as connection:
            connection.execute(
                "create table accounts (id serial primary key, run text not null, name text not null, amount int not null)"
            )

    def cut(self, victim: str, runs: list[Run]) -> None:
        """Bring every run to its place, kill, and let all of them come to their end."""
        for run in runs:
            self.submit(run)
        for run in runs:
            eventually(lambda run=run: self.stands(run), f"{run.name} did not come to {run.place}")
        self.kill(victim, runs)
        for run in runs:
            if not run.resumes:
                # What was begun is given up; the program is started as if it never had been.
                self.ground.kernel.operator.ask("Kill", agent=self.agents[run.name])
        for run in runs:
            self.flag(run).touch()
            if not run.resumes:
                self.submit(run)

    def submit(self, run: Run) -> None:
        policy = "on-failure" if run.resumes else "never"
        base = self.ground.keyed.base
        manifest = MANIFEST.format(name=run.name, base=base, flags=self.flags, policy=policy)
        told = {
            "run": run.name,
            "cut": run.place,
            "flag": str(self.flag(run)),
            "base": base,
            "amount": run.amount,
        }
        files = {"agent.py": PROGRAM, "ledger.txt": "", "counts.txt": "", "draft.txt": "draft"}
        self.agents[run.name] = self.ground.kernel.operator.submit(
            manifest, files, input_bytes=json.dumps(told).encode()
        )

    def flag(self, run: Run) -> Path:
        return self.flags / run.name

    def stands(self, run: Run) -> bool:
        parts = self.ground.kernel.operator.stream("Logs", agent=self.agents[run.name], stderr=False)
        return b"stands" in b"".join(parts)

    def pid(self, run: Run) -> int | None:
        return self.ground.kernel.operator.ask("Show", agent=self.agents[run.name])["pid"]

    def kill(self, victim: str, runs: list[Run]) -> None:
        kernel = self.ground.kernel
        pids = {run: pid for run in runs if (pid := self.pid(run))}
        if victim == "kernel":
            kernel.kill()
            kernel.start()
        elif victim == "takeover":
            self.ground.kernel = take_over(kernel)
        elif victim == "database":
            self.ground.server.kill()
        else:
            assert kill_all(pids.values() if victim == "agent" else wardens(kernel)) > 0
        for run, pid in pids.items():
            if victim != "database":
                eventually(lambda run=run, pid=pid: self.pid(run) != pid, f"{run.name} does not die")

    # -- what it leaves -----------------------------------------------------------------------------------------------

    def digest(self, run: Run) -> str:
        """Waits for the end of a run, and hashes all that it left: rows, files, state, and what was delivered."""
        ended = self.ground.kernel.operator.wait(self.agents[run.name])
        left = {
            "state": ended["state"],
            "rows": self.rows(run),
            "files": self.files(run),
            "orders": self.orders(run),
            "delivered": sorted(self.delivered(run)),
        }
        return hashlib.sha256(json.dumps(left, sort_keys=True).encode()).hexdigest()

    def rows(self, run: Run) -> list[tuple[Any, ...]]:
        with self.ground.target() as connection:
            statement = "select name, amount from accounts where run = %s order by name, amount, id"
            return connection.execute(statement, [run.name]).fetchall()

    def files(self, run: Run) -> dict[str, str]:
        live = Path(self.ground.kernel.operator.ask("Show", agent=self.agents[run.name])["workspace"])
        return {str(p.relative_to(live)): p.read_text() for p in sorted(live.rglob("*")) if p.is_file()}

    def orders(self, run: Run) -> Any:
        import psycopg

        with psycopg.connect(self.ground.server.dsn) as connection:
            found = connection.execute(
                "select value from state where key = %s", [f"orders/{run.name}"]
            ).fetchone()
        return json.loads(bytes(found[0])) if found else None

    def delivered(self, run: Run) -> list[tuple[str, str]]:
        """What a target that takes keys did: once for each key."""
        by_key = {
            d["headers"].get("idempotency-key"): (d["path"].replace(run.name, ""), d["body"])
            for d in self.ground.keyed.deliveries()
            if d["path"].endswith(f"/{run.name}")
        }
        return list(by_key.values())

    def judge(self, runs: list[Run]) -> Result:
        """Hold every run against an uncut one of the same amount."""
        uncut = {
            amount: Run(name=f"uncut-{amount}", amount=amount) for amount in {run.amount for run in runs}
        }
        for run in uncut.values():
            if run.name not in self.agents:
                self.submit(run)
        wanted = {amount: self.digest(run) for amount, run in uncut.items()}
        result = Result(runs=len(runs))
        for run in runs:
            if self.digest(run) != wanted[run.amount]:
                twice = len(self.delivered(run)) > 2 or len(self.rows(run)) > 2
                (result.repeated if twice else result.lost).append(f"{run.name}, cut {run.place}")
        return result


@contextlib.contextmanager
def cuts() -> Iterator[Cuts]:
    flags = Path(tempfile.mkdtemp(prefix="rf-flags-", dir="/tmp"))
    flags.chmod(0o755)
    try:
        with server() as database, short_directory() as directory:
            ground = Ground(directory, database, mounts=[str(flags)])
            try:
                yield Cuts(ground, flags)
            finally:
                ground.close()
    finally:
        shutil.rmtree(flags)


def orders(tag: str, places: tuple[str, ...], **more: Any) -> list[Run]:
    """One run for each place."""
    return [Run(name=f"{tag}-{place.replace(' ', '-')}", place=place, **more) for place in places]


def ablation(*, full: bool) -> tuple[list[Run], list[Run]]:
    """The fixed matrix: three orders, ten places, two ways of dying; and the same with resuming switched off.

    Returns:
        Runs that resume and runs that don't; the second half of each is for a killed kernel.
    """
    places = PLACES[::2][:10] if full else PLACES[0:12:5]
    amounts = (10, 30, 70) if full else (30,)
    made = list[list[Run]]()
    for resumes in (True, False):
        made.append(
            [
                run
                for victim in ("agent", "kernel")
                for amount in amounts
                for run in orders(
                    f"{victim[0]}{amount}-{'on' if resumes else 'off'}",
                    places,
                    amount=amount,
                    resumes=resumes,
                )
            ]
        )
    return made[0], made[1]
