"""Durable steps and the bytes they leave, beside DBOS and LangGraph's PostgreSQL saver on the same server."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from bench import kernels, peers
from bench.host import median
from bench.report import Section, Target

if TYPE_CHECKING:
    from bench.host import Bench

HISTORIES = (10, 100, 1000)

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: stepper}
spec:
  run: {command: [python, agent.py]}
  permissions:
    allow:
      - state.*: "bench/**"
"""

PROGRAM = b"""
import hashlib, json, sys, time
from ringfence import agent

def note(number):
    return {"role": "tool", "page": number, "text": hashlib.shake_256(b"%d" % number).hexdigest(200)}

job = json.load(sys.stdin)
behind, count, saves = job["behind"], job["count"], job["saves"]
with agent.boot() as rf:
    history = [note(number) for number in range(behind)]
    if saves:
        rf.checkpoint.save({"messages": history})
    else:
        rf.state.put("bench/note", note(0)["text"])
        for _ in range(behind):
            rf.state.get("bench/note")
    rf.state.put("bench/ready/" + job["id"], True)
    begin = None
    while begin is None:
        time.sleep(0.05)
        begin = rf.state.get("bench/begin/" + job["id"])
    time.sleep(max(0, begin - time.time()))
    took, clock = [], time.perf_counter
    began = clock()
    for number in range(count):
        before = clock()
        if saves:
            history.append(note(behind + number))
            rf.checkpoint.save({"messages": history})
        else:
            rf.state.get("bench/note")
        took.append(clock() - before)
    seconds = clock() - began
print(json.dumps({"seconds": seconds, "p50_ms": sorted(took)[len(took) // 2] * 1e3}))
"""

STARTER = b"""
import json, sys, time
from ringfence import agent

job = json.load(sys.stdin)
with agent.boot() as rf:
    while rf.state.get("bench/ready/" + job["id"]) is None:
        time.sleep(0.02)
    rf.state.put("bench/begin/" + job["id"], time.time() + 1.0)
print("{}")
"""


class Weight:
    """What a database grows by."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._log, self._stored = self._look()

    def _look(self) -> tuple[int, int]:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            row = connection.execute(
                "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint,"
                " (select coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint from pg_class c"
                " join pg_namespace n on n.oid = c.relnamespace"
                " where c.relkind = 'r' and n.nspname not in ('pg_catalog', 'information_schema'))"
            ).fetchone()
        assert row is not None
        return int(row[0]), int(row[1])

    def grown(self) -> tuple[int, int]:
        """Bytes of write-ahead log and of tables with their indexes since it was made."""
        log, stored = self._look()
        return log - self._log, stored - self._stored


def measure(bench: Bench) -> Section:
    """Every history in turn, all runtimes after each other."""
    section = Section(
        name="steps",
        title="durable steps of one agent with some steps behind it, and what each writes; others on the same server",
    )
    count = 200 if bench.quick else 500
    home = bench.directory("steps")
    with kernels.running(home) as kernel:
        for behind in HISTORIES:
            for saves in (False, True):
                what = "state saved, with all messages" if saves else "call recorded"
                bench.say(f"{what}, {behind} behind")
                name = peers.LANGGRAPH if saves else peers.DBOS
                ours, theirs = list[dict[str, float]](), list[dict[str, float]]()
                for number in range(1 if bench.quick else 3):
                    ours.append(_ours(kernel, f"s{behind}-{saves:d}-{number}", behind, count, saves=saves))
                    if peers.version(name):
                        theirs.append(_theirs(bench, kernel.dsn, name, behind, count))
                section.rows.append(_row(what, behind, _middle(ours), name, _middle(theirs)))
    for name in (peers.DBOS, peers.LANGGRAPH):
        section.notes.append(peers.version(name) or peers.missing(name))
    section.notes += [
        "a step brings 400 characters; each run adds as many to its history as were measured; Ringfence's agent is a sandboxed process that calls its kernel, theirs a function in the process that writes",
        "WAL: bytes of PostgreSQL's log for a step; kept: what tables and indexes grow by, in whole pages",
    ]
    section.targets = _targets(section.rows)
    return section


def _row(
    what: str, behind: int, ours: dict[str, float], name: str, theirs: dict[str, float]
) -> dict[str, Any]:
    return {
        "a step": what,
        "behind": behind,
        "steps/s": ours["per_s"],
        "p50 ms": ours["p50_ms"],
        "WAL B": ours["log"],
        "kept B": ours["stored"],
        "beside": name,
        "its steps/s": theirs.get("per_s"),
        "its p50 ms": theirs.get("p50_ms"),
        "its WAL B": theirs.get("log"),
        "its kept B": theirs.get("stored"),
    }


def _targets(rows: list[dict[str, Any]]) -> list[Target]:
    targets: list[Target] = []
    for row in rows:
        if row["its steps/s"] is None:
            continue
        name = f"{row['a step']}, {row['behind']} behind, beside {row['beside']}"
        targets.append(Target(name=f"{name}: steps/s", got=row["steps/s"] / row["its steps/s"], wanted=1))
        targets.append(
            Target(name=f"{name}: WAL", got=row["WAL B"] / row["its WAL B"], wanted=1, at_least=False)
        )
    for what in dict.fromkeys(row["a step"] for row in rows):
        first, *_, last = [row["kept B"] for row in rows if row["a step"] == what]
        targets.append(
            Target(
                name=f"{what}: bytes kept at the longest history beside the shortest",
                got=last / first,
                wanted=1.25,
                at_least=False,
            )
        )
    return targets


def _figures(report: dict[str, Any], weight: Weight, count: int) -> dict[str, float]:
    log, stored = weight.grown()
    return {
        "per_s": count / report["seconds"],
        "p50_ms": report["p50_ms"],
        "log": log / count,
        "stored": stored / count,
    }


def _middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: median([one[name] for one in rounds]) for name in (rounds[0] if rounds else ())}


def _ours(kernel: kernels.Kernel, one: str, behind: int, count: int, *, saves: bool) -> dict[str, float]:
    job = {"id": one, "behind": behind, "count": count, "saves": saves}
    agent = kernel.submit(MANIFEST, {"agent.py": PROGRAM}, job=json.dumps(job).encode())
    starter = kernel.submit(MANIFEST, {"agent.py": STARTER}, job=json.dumps({"id": one}).encode())
    kernel.finished(starter)
    # The agent begins a second after it was told to.
    time.sleep(0.3)
    weight = Weight(kernel.dsn)
    return _figures(kernel.finished(agent), weight, count)


def _theirs(bench: Bench, dsn: str, name: str, behind: int, count: int) -> dict[str, float]:
    own = database(dsn, f"bench_{name}")
    log: Path = bench.directory(name) / "log"
    options = ["--dsn", own, "--behind", str(behind), "--count", str(count)]
    peer = peers.Peer(name, log, *(["steps"] if name == peers.DBOS else []), *options)
    with contextlib.closing(peer):
        peer.heard()
        weight = Weight(own)
        peer.tell()
        return _figures(peer.heard(), weight, count)


def database(dsn: str, name: str) -> str:
    """Make an empty database beside the kernel's; gives its DSN."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"drop database if exists {name} with (force)".encode())
        connection.execute(f"create database {name}".encode())
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))
