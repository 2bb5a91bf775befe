"""Kills at random instants: agents work in rounds, each effect of a round counted elsewhere, while anybody may die at any time."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.kernels import Refused, eventually
from support.matrix import Ground, Result
from support.victims import kill_all, take_over, wardens, zygotes

ROUNDS = 6
LIVE = 6
"""Agents at work at a time."""
STRIKES = {"agent": 12, "kernel": 5, "sandboxes": 2, "zygotes": 1, "database": 2, "takeover": 1}
"""Who dies, and how often beside the others."""

PROGRAM = """
import json, sys
from ringfence import agent

job = json.load(sys.stdin)
who = job["id"]
with agent.boot() as rf:
    at = (rf.checkpoint.restored or {"next": 0})["next"]
    for n in range(at, job["rounds"]):
        rf.fs.append_text("counted.txt", f"{n}\\n")
        rf.sql.execute("target", "insert into rounds (agent, n) values (%s, %s)", [who, n])
        with rf.state.transaction() as tx:
            tx.put(who, (tx.get(who) or []) + [n])
        rf.http.post(f"{job['base']}/keyed/{who}/{n}", json={})
        rf.http.post(f"{job['plain']}/plain/{who}/{n}", json={})
        rf.exec.run(["sh", "-c", f"echo {n} >> ran.txt"])
        rf.memory.append(str(n), space=who)
        if n % 3 == 2:
            rf.checkpoint.save({"next": n + 1})
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
      - memory.*: "**"
  restart: {{policy: on-failure, max: 1000}}
"""


class Storm:
    """Strikes until there were enough, with a few agents at work all the time."""

    def __init__(self, ground: Ground, seed: int, say: Callable[[str], None] = lambda _: None) -> None:
        self.ground = ground
        self.random = random.Random(seed)  # noqa: S311 - a storm that can be repeated
        self.seed = seed
        self.say = say
        self.live: dict[str, str] = {}
        self.struck = Counter[str]()
        self.result = Result()
        self._number = 0
        with ground.target() as connection:
            connection.execute(
                "create table if not exists rounds (id serial primary key, agent text not null, n int not null)"
            )

    def run(self, strikes: int) -> Result:
        """The result's runs are strikes."""
        for number in range(strikes):
            while len(self.live) < LIVE:
                self.submit()
            # The instant itself is what is random here; nothing waits for anything.
            time.sleep(self.random.expovariate(5.0))
            victim = self.random.choices(list(STRIKES), list(STRIKES.values()))[0]
            self.strike(victim)
            self.struck[victim] += 1
            self.look()
            self.say(f"strike {number + 1} of {strikes}")
        for ident in list(self.live):
            try:
                eventually(lambda ident=ident: self.look() or ident not in self.live, "", 120)
            except AssertionError:
                self.result.stuck.append(
                    f"{ident} is {self.ask('Show', agent=self.live.pop(ident))['state']} still"
                )
        if not self.ask("AuditVerify")["ok"]:
            self.result.stuck.append("the audit chain is broken")
        self.result.runs += strikes
        return self.result

    def ask(self, verb: str, **fields: Any) -> Any:
        """The operator is as patient as people are: a database that just died comes back."""
        return patient(lambda: self.ground.kernel.operator.ask(verb, **fields))

    def submit(self) -> None:
        self._number += 1
        ident = f"storm-{self.seed}-{self._number}"
        base, plain = self.ground.keyed.base, self.ground.plain.base
        job = json.dumps({"id": ident, "rounds": ROUNDS, "base": base, "plain": plain}).encode()
        manifest = MANIFEST.format(name=ident, base=base, plain=plain)
        files = {"agent.py": PROGRAM, "counted.txt": "", "ran.txt": ""}
        kernel = self.ground.kernel
        agent = patient(lambda: kernel.operator.submit(manifest, files, input_bytes=job))
        self.live[ident] = agent

    def strike(self, victim: str) -> None:
        ground = self.ground
        if victim == "agent":
            pid = self.ask("Show", agent=self.random.choice(list(self.live.values())))["pid"]
            kill_all([pid] if pid else [])
        elif victim == "kernel":
            ground.kernel.kill()
            ground.kernel.start()
        elif victim == "sandboxes":
            kill_all(wardens(ground.kernel))
        elif victim == "zygotes":
            kill_all(zygotes(ground.kernel))
        elif victim == "database":
            ground.server.kill()
        else:
            ground.kernel = take_over(ground.kernel)

    # -- counting -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Settle what is unknown, count what is done."""
        states = {row["id"]: row["state"] for row in self.ask("List", all=True)["agents"]}
        for ident, agent in list(self.live.items()):
            state = states[agent]
            if state == "unknown":
                self.settle(ident, agent)
            elif state == "done":
                self.count(ident, agent)
                del self.live[ident]
            elif state in ("failed", "killed", "parked"):
                shown = self.ask("Show", agent=agent)
                self.result.stuck.append(
                    f"{ident} is {state}: {shown.get('error') or shown.get('waiting_for')}"
                )
                del self.live[ident]

    def settle(self, ident: str, agent: str) -> None:
        """A person looks at the target, and says what is true there."""
        steps = patient(lambda: self.ground.kernel.operator.steps(agent))
        for step in steps:
            if step["outcome"] == "unknown":
                self.result.unknown.append(f"{ident} step {step['step']}")
                where = step["resource"].removeprefix(self.ground.plain.base)
                if not where.startswith("/plain/"):
                    self.result.stuck.append(f"{ident}: {step['action']} is unknown, which can be known")
                said = "done" if self.ground.plain.deliveries(where) else "not-done"
                with contextlib.suppress(Refused):  # settled already by an answer that was lost
                    self.ask("Resolve", agent=agent, step=step["step"], outcome=said)

    def count(self, ident: str, agent: str) -> None:
        live = Path(self.ask("Show", agent=agent)["workspace"])
        wanted = [str(n) for n in range(ROUNDS)]
        seen = {
            "append": (live / "counted.txt").read_text().split(),
            "exec": (live / "ran.txt").read_text().split(),
            "insert": self._rows(self.ground.target_dsn, "select n from rounds where agent = %s", ident),
            "memory": self._rows(self.ground.server.dsn, "select text from memories where space = %s", ident),
            "plain": self._sent(self.ground.plain, f"/plain/{ident}/"),
            "keyed": [which for which, _ in sorted(self._keys(ident))],
        }
        state = self._rows(self.ground.server.dsn, "select value from state where key = %s", ident)
        seen["state"] = [str(n) for n in json.loads(bytes(state[0]))] if state else []
        for kind, found in seen.items():
            counted = Counter(str(item) for item in found)
            self.result.repeated += [f"{ident} {kind} {n}" for n in wanted if counted[n] > 1]
            self.result.lost += [f"{ident} {kind} {n}" for n in wanted if counted[n] < 1]

    def _sent(self, target: Any, prefix: str) -> list[str]:
        return [d["path"].removeprefix(prefix) for d in target.deliveries() if d["path"].startswith(prefix)]

    def _keys(self, ident: str) -> set[tuple[str, str]]:
        """One for each key: a target that takes keys does the same once."""
        prefix = f"/keyed/{ident}/"
        return {
            (d["path"].removeprefix(prefix), d["headers"].get("idempotency-key") or f"none at {number}")
            for number, d in enumerate(self.ground.keyed.deliveries())
            if d["path"].startswith(prefix)
        }

    def _rows(self, dsn: str, statement: str, ident: str) -> list[Any]:
        import psycopg

        with psycopg.connect(dsn) as connection:
            return [value for (value,) in connection.execute(statement, [ident])]


def patient(ask: Callable[[], Any], within_s: float = 60.0) -> Any:
    """Ask again while the kernel says that its database is away."""
    until = time.monotonic() + within_s
    while True:
        try:
            return ask()
        except Refused as error:
            if error.exit_code != 6 or time.monotonic() > until:
                raise
            time.sleep(0.05)
