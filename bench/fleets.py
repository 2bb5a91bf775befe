"""Many agents on one kernel: killed in flight and resumed, asleep, and woken together; beside DBOS on the same server."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from ringfence.kernel.journal.types import Phase

from bench import kernels, peers
from bench.host import BenchError, cpu_seconds, eventually, used_seconds
from bench.report import Section, Target
from bench.sandbox.fleet import below, pss_bytes
from bench.steps import database

if TYPE_CHECKING:
    from bench.host import Bench

BEHIND = 20
"""Steps that each agent has behind it when all are killed, and no checkpoint: all of them are replayed."""
LOOK_S = 10.0
"""For so long the processor time of those that sleep is counted."""
WAKES = 200
FIRST = 5
"""Of those that sleep this part is weighed before the others: what the runtimes need once is not theirs."""
PATIENCE_S = 300.0
LOOK_EVERY_S = 0.1
"""Whether all are back: a look counts rows of the journal, and takes its part of a busy machine."""
PROCESSOR = "ms of processor each"

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: many}
spec:
  run: {command: [python, agent.py]}
  approvals: {linger: 1s}
  permissions:
    allow:
      - state.*: "bench/**"
"""

WORKER = b"""
import hashlib, json, sys, time
from ringfence import agent

job = json.load(sys.stdin)
with agent.boot() as rf:
    for number in range(job["behind"]):
        rf.state.put("bench/" + job["id"], hashlib.shake_256(b"%d" % number).hexdigest(200))
    while time.time() < job["gate"]:
        time.sleep(0.5)
    rf.state.put("bench/" + job["id"], "on it goes")
    time.sleep(3600)
"""

SLEEPER = b"""
import json, sys, time
from ringfence import agent

job = json.load(sys.stdin)
with agent.boot() as rf:
    rf.state.put("bench/" + job["id"], 0)
    rf.sleep(max(0.0, job["until"] - rf.now().timestamp()))
    rf.state.put("bench/" + job["id"], 1)
"""


def measure(bench: Bench) -> Section:
    """Resume of many, then many that sleep."""
    section = Section(
        name="fleets", title="many agents on one kernel, beside as many DBOS workflows in one process"
    )
    known = peers.version(peers.DBOS)
    for count in (100,) if bench.quick else (100, 1000):
        _resume(bench, section, count, beside=known is not None)
    _sleep(bench, section, 200 if bench.quick else 1000, beside=known is not None)
    section.notes += [
        known or peers.missing(peers.DBOS),
        (
            f"resumed: kill -9, then until each has a new step in the journal, {BEHIND} steps replayed each; Ringfence starts a sandboxed process for every agent,"
            " DBOS one for all workflows"
        ),
        "MB each: proportional share of memory of the kernel and its helpers, without the database, less what they had with a fifth of them asleep, for each of the others",
        "idle: share of one processor that all of them together take while they sleep",
        "processor: of all processes without the database, from the kill or the moment on; it depends less on a busy machine than seconds do",
        f"woken: from the moment they sleep until, to the next step of the last of {WAKES}",
    ]
    return section


def _row(section: Section, what: str, unit: str, ours: float, theirs: float | None) -> None:
    section.rows.append(
        {
            "what": what,
            "unit": unit,
            "Ringfence": ours,
            "DBOS": theirs,
            "ratio": None if not theirs else ours / theirs,
        }
    )
    if theirs:
        section.targets.append(
            Target(name=f"{what}, {unit}, beside DBOS", got=ours / theirs, wanted=1, at_least=False)
        )


# -- resume -----------------------------------------------------------------------------------------------------------


def _resume(bench: Bench, section: Section, count: int, *, beside: bool) -> None:
    bench.say(f"{count} in flight")
    ours = _resumed(bench, count)
    theirs = _resumed_dbos(bench, count) if beside else (None, None)
    _row(section, f"{count} in flight resumed", "s", ours[0], theirs[0])
    _row(section, f"{count} in flight resumed", PROCESSOR, ours[1] / count * 1e3, _each(theirs[1], count))


def _each(seconds: float | None, count: int) -> float | None:
    return None if seconds is None else seconds / count * 1e3


def _gate(count: int) -> float:
    """When they go on: long enough from now that all are behind their steps and killed before it."""
    others = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)
    return time.time() + 10 + count * 0.06 * others


def _resumed(bench: Bench, count: int) -> tuple[float, float]:
    """Seconds until all are back, and of processors until then."""
    with kernels.running(bench.directory("flight")) as kernel:
        gate = _gate(count)
        _submit(kernel, WORKER, [{"id": f"w{n}", "behind": BEHIND, "gate": gate} for n in range(count)])
        with psycopg.connect(kernel.dsn, autocommit=True) as connection:
            query = (
                "select count(*) from (select 1 from journal where chain > 0 and phase = %s and action = 'state.put'"
                " group by chain having count(*) = %s) as there"
            )
            eventually(
                lambda: _count(connection, query, [int(Phase.OUTCOME), BEHIND]) >= count,
                "not all agents came to their place",
                PATIENCE_S,
                0.2,
            )
        _on_time(gate)
        kernel.kill()
        began, killed_us = time.monotonic(), time.time_ns() // 1000
        kernel.start()
        query = (
            "select count(distinct chain) from journal"
            " where chain > 0 and phase = %s and action = 'state.put' and started_us > %s"
        )
        with psycopg.connect(kernel.dsn, autocommit=True) as connection:
            eventually(
                lambda: _count(connection, query, [int(Phase.OUTCOME), killed_us]) >= count,
                "not all agents came back",
                PATIENCE_S,
                LOOK_EVERY_S,
            )
        return time.monotonic() - began, used_seconds(_processes(kernel))


def _resumed_dbos(bench: Bench, count: int) -> tuple[float, float]:
    with kernels.running(bench.directory("server")) as kernel:
        own = database(kernel.dsn, "bench_dbos")
        log = bench.directory("dbos") / "log"
        gate = _gate(count)
        peer = peers.Peer(
            peers.DBOS,
            log,
            *("workers", "--dsn", own, "--count", str(count), "--behind", str(BEHIND), "--gate", str(gate)),
        )
        query = "select count(distinct workflow_uuid) from dbos.operation_outputs where function_id >= %s"
        with contextlib.closing(peer), psycopg.connect(own, autocommit=True) as connection:
            peer.heard()
            eventually(
                lambda: _count(connection, query, [BEHIND]) >= count,
                "DBOS did not get there",
                PATIENCE_S,
                0.2,
            )
            _on_time(gate)
            peer.kill()
        began = time.monotonic()
        peer = peers.Peer(peers.DBOS, log, "recover", "--dsn", own)
        with contextlib.closing(peer), psycopg.connect(own, autocommit=True) as connection:
            eventually(
                lambda: _count(connection, query, [BEHIND + 1]) >= count,
                "DBOS did not come back",
                PATIENCE_S,
                LOOK_EVERY_S,
            )
            return time.monotonic() - began, used_seconds([peer.pid])


def _on_time(gate: float) -> None:
    """Wait until what comes back may go on at once."""
    left_s = gate - 1.0 - time.time()
    if left_s < 0:
        raise BenchError("the machine is too busy: what was to be killed in flight was there too late")
    time.sleep(left_s)


# -- sleep ------------------------------------------------------------------------------------------------------------


def _sleep(bench: Bench, section: Section, count: int, *, beside: bool) -> None:
    bench.say(f"{count} asleep")
    ours = _asleep(bench, count)
    theirs = _asleep_dbos(bench, count) if beside else {}
    woken = f"{WAKES} woken at once"
    for what, unit in (("asleep", "MB each"), ("asleep, idle", "%"), (woken, "s"), (woken, PROCESSOR)):
        title = what if what.endswith("once") else f"{count} {what}"
        key = PROCESSOR if unit == PROCESSOR else what
        _row(section, title, unit, ours[key], theirs.get(key))


def _asleep(bench: Bench, count: int) -> dict[str, float]:
    with (
        kernels.running(bench.directory("asleep")) as kernel,
        psycopg.connect(kernel.dsn, autocommit=True) as connection,
    ):
        query = "select count(*) from agents where state = 'sleeping' and asleep"

        def sleep(name: str, many: int, until: float, all_in_all: int) -> None:
            _submit(kernel, SLEEPER, [{"id": f"{name}{n}", "until": until} for n in range(many)])
            asleep = lambda: _count(connection, query, [])  # noqa: E731
            what = "not all agents fell asleep"
            eventually(lambda: asleep() >= all_in_all, what, PATIENCE_S, 0.2, moves=asleep)

        few, late = count // FIRST, time.time() + 36_000
        sleep("f", few, late, few)
        time.sleep(2.0)
        before = pss_bytes(_processes(kernel))
        sleep("s", count - few, late, count)

        def weigh() -> float:
            return (pss_bytes(_processes(kernel)) - before) / (count - few) / 1e6

        def wake(until: float) -> None:
            sleep("t", WAKES, until, count + WAKES)

        awake = "select count(*) from state where key like 'bench/t%%' and value = '1'::bytea"
        return _figures(
            weigh, lambda: _processes(kernel), wake, lambda: _count(connection, awake, []) >= WAKES
        )


def _asleep_dbos(bench: Bench, count: int) -> dict[str, float]:
    with kernels.running(bench.directory("server")) as kernel:
        own = database(kernel.dsn, "bench_dbos")
        log = bench.directory("dbos") / "log"
        few = count // FIRST
        query = "select count(distinct workflow_uuid) from dbos.operation_outputs where function_id >= 2"

        def asleep(many: int) -> peers.Peer:
            peer = peers.Peer(peers.DBOS, log, "sleepers", "--dsn", own, "--count", str(many))
            peer.heard()
            with psycopg.connect(own, autocommit=True) as looks:
                there = lambda: _count(looks, query, []) >= many  # noqa: E731
                eventually(there, "they did not fall asleep", PATIENCE_S, 0.2)
            return peer

        with contextlib.closing(asleep(few)) as peer:
            time.sleep(2.0)
            before = pss_bytes([peer.pid])
        with contextlib.closing(asleep(count)) as peer, psycopg.connect(own, autocommit=True) as connection:

            def wake(until: float) -> None:
                peer.tell(f"{WAKES} {until}")
                peer.heard()

            awake = (
                "select count(distinct workflow_uuid) from dbos.operation_outputs"
                " where function_id >= 3 and workflow_uuid like 'sleeper-till%%'"
            )
            return _figures(
                lambda: (pss_bytes([peer.pid]) - before) / (count - few) / 1e6,
                lambda: [peer.pid],
                wake,
                lambda: _count(connection, awake, []) >= WAKES,
            )


def _figures(
    weigh: Callable[[], float],
    pids: Callable[[], list[int]],
    wake: Callable[[float], None],
    awake: Callable[[], bool],
) -> dict[str, float]:
    time.sleep(2.0)
    each = weigh()
    before = sum(map(cpu_seconds, pids()))
    time.sleep(LOOK_S)
    idle = (sum(map(cpu_seconds, pids())) - before) / LOOK_S
    until = time.time() + 20
    wake(until)
    if time.time() > until:
        raise BenchError("the machine is too busy: those that were to wake were not asleep in time")
    before = used_seconds(pids())
    time.sleep(until - time.time())
    began = time.monotonic()
    eventually(awake, "not all woke", PATIENCE_S, 0.02)
    took = time.monotonic() - began
    used = (used_seconds(pids()) - before) / WAKES * 1e3
    return {"asleep": each, "asleep, idle": idle * 100, f"{WAKES} woken at once": took, PROCESSOR: used}


# -- both -------------------------------------------------------------------------------------------------------------


def _submit(kernel: kernels.Kernel, program: bytes, jobs: list[dict[str, Any]]) -> None:
    def one(job: dict[str, Any]) -> str:
        return kernel.submit(MANIFEST, {"agent.py": program}, job=json.dumps(job).encode())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, jobs))


def _processes(kernel: kernels.Kernel) -> list[int]:
    """The kernel and its helpers, without the database, which both sides have."""

    def name(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            return ""

    return [pid for pid in below(kernel.pid) if name(pid) != "postgres"]


def _count(connection: psycopg.Connection[Any], query: str, values: list[Any]) -> int:
    row = connection.execute(query.encode(), values).fetchone()
    return int(row[0]) if row else 0
