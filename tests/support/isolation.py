"""Agents of two kernels on one database that read and append to the same lists in transactions, while anybody may die."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from support.databases import Server, server
from support.instants import patient
from support.kernels import KernelProcess, Refused, eventually
from support.scenes import Scene, manifest_of, short_directory
from support.serial import Txn, anomalies
from support.victims import kill_all, wardens

KEYS = tuple(f"lists/{letter}" for letter in "abcd")
STRIKES = {"agent": 6, "kernel": 3, "sandboxes": 1, "database": 1}

PROGRAM = """
import json, random, sys
from ringfence import agent
from ringfence.agent import Conflict

job = json.load(sys.stdin)

def tell(number, tried, ok, ops):
    print(json.dumps({"n": number, "tried": tried, "ok": ok, "ops": ops}), flush=True)

def once(rf, number, tried, dice):
    ops = []
    keys = dice.choices(job["keys"], k=dice.randint(2, 3))
    writes = [dice.random() < 0.5 for _ in keys] if dice.random() < 0.7 else [False] * len(keys)
    try:
        if job["isolated"]:
            with rf.state.transaction() as tx:
                work(tx.get, tx.put, ops, number, tried, keys, writes)
        else:
            work(rf.state.get, rf.state.put, ops, number, tried, keys, writes)
    except Conflict:
        tell(number, tried, False, ops)
        return False
    tell(number, tried, True, ops)
    return True

def work(get, put, ops, number, tried, keys, writes):
    for place, (key, write) in enumerate(zip(keys, writes)):
        seen = get(key) or []
        ops.append(["r", key, seen])
        if write:
            value = f"{job['id']}.{number}.{tried}.{place}"
            ops.append(["a", key, value])
            put(key, [*seen, value])

with agent.boot() as rf:
    for number in range(job["transactions"]):
        dice = random.Random(f"{job['id']} {number}")
        tried = 0
        while not once(rf, number, tried, dice):
            tried += 1
"""


class Lists:
    """Two kernels, their agents, and what these told."""

    def __init__(self, database: Server, kernels: list[KernelProcess]) -> None:
        self.server = database
        self.scenes = [Scene(kernel) for kernel in kernels]
        self.agents: dict[str, tuple[Scene, str]] = {}

    def run(
        self,
        seed: int,
        *,
        agents: int,
        transactions: int,
        strikes: int,
        isolated: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> list[str]:
        """Let agents work while kills come, and judge the history. `isolated`: in transactions; else in bare reads and writes.

        Returns:
            What no serial order explains.
        """
        dice = random.Random(seed)  # noqa: S311 - kills that can be repeated
        tag = f"{'tx' if isolated else 'bare'}{seed}"
        keys = [f"{key}/{tag}" for key in KEYS]
        for number in range(agents):
            scene = self.scenes[number % len(self.scenes)]
            job = {"id": f"{tag}-{number}", "keys": keys, "transactions": transactions, "isolated": isolated}
            self.agents[job["id"]] = scene, submit(scene, job)
        for number in range(strikes):
            # The instant itself is what is random here; nothing waits for anything.
            time.sleep(dice.expovariate(4.0))
            self.strike(dice, dice.choices(list(STRIKES), list(STRIKES.values()))[0])
            say(f"strike {number + 1} of {strikes}")
        mine = {name: agent for name, agent in self.agents.items() if name.startswith(f"{tag}-")}
        problems = list[str]()
        history = list[Txn]()
        for name, (scene, agent) in mine.items():
            eventually(lambda scene=scene, agent=agent: over(scene, agent), f"{name} does not end", 180)
            state = patient(lambda scene=scene, agent=agent: scene.show(agent))["state"]
            problems += [f"{name} is {state}"] if state != "done" else []
            history += told(name, scene.output(agent), problems)
        problems += [
            f"{name} told too little" for name in mine if len(committed(history, name)) != transactions
        ]
        return problems + anomalies(history, {key: self.value(key) for key in keys})

    def strike(self, dice: random.Random, victim: str) -> None:
        scene, agent = dice.choice(list(self.agents.values()))
        if victim == "agent":
            pid = patient(lambda: scene.show(agent))["pid"]
            kill_all([pid] if pid else [])
        elif victim == "kernel":
            scene.kernel.kill()
            scene.kernel.start()
        elif victim == "sandboxes":
            kill_all(wardens(scene.kernel))
        else:
            self.server.kill()

    def value(self, key: str) -> list[str]:
        found = self.scenes[0].sql("select value from state where key = %s", key)
        return json.loads(bytes(found[0][0])) if found else []


def submit(scene: Scene, job: dict[str, Any]) -> str:
    manifest = manifest_of(
        job["id"],
        ["python", "agent.py"],
        allow=['state.*: "**"'],
        more="restart: {policy: on-failure, max: 1000}",
    )
    return scene.operator.submit(manifest, {"agent.py": PROGRAM}, input_bytes=json.dumps(job).encode())


def over(scene: Scene, agent: str) -> bool:
    with contextlib.suppress(Refused):
        return scene.show(agent)["state"] in ("done", "failed", "killed", "unknown", "parked")
    return False


def told(name: str, output: str, problems: list[str]) -> list[Txn]:
    """What an agent printed, over all its starts. A restart tells the same again, or something is wrong with replay."""
    by_try: dict[tuple[int, int], dict[str, Any]] = {}
    for line in output.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # it was killed while it printed; its next start printed it again
        known = by_try.setdefault((found["n"], found["tried"]), found)
        if known != found:
            problems.append(f"{name} was told two things at {found['n']}.{found['tried']}: {known}, {found}")
    return [
        Txn(agent=name, number=number, ops=[tuple(op) for op in found["ops"]], ok=found["ok"])
        for (number, _), found in sorted(by_try.items())
    ]


def committed(history: list[Txn], name: str) -> list[Txn]:
    return [txn for txn in history if txn.agent == name and txn.ok]


@contextlib.contextmanager
def lists() -> Iterator[Lists]:
    """Everything of it is gone afterwards."""
    with server() as database, short_directory() as directory:
        kernels = [KernelProcess(directory / name, dsn=database.dsn) for name in ("one", "two")]
        try:
            for kernel in kernels:
                kernel.start()
            yield Lists(database, kernels)
        finally:
            for kernel in kernels:
                kernel.stop()
