"""From kill -9 of the kernel, with agents in mid-work, to all of them working again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import psycopg
from ringfence.kernel.journal.types import Phase

from bench import kernels
from bench.host import Bench, eventually, median
from bench.report import Section
from bench.starts import LIBRARY

AGENTS = 20
STEPS_BEFORE = 20
"""Steps each agent has behind it when the kernel is killed; since its last checkpoint it has up to ten."""

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: worker}
spec:
  run: {command: [python, agent.py]}
  permissions:
    allow:
      - fs.read: "/workspace/**"
      - state.*: "bench/**"
"""

PROGRAM = b"""
import json, sys, time
from ringfence import agent

job = json.load(sys.stdin)
with agent.boot() as rf:
    number = (rf.checkpoint.restored or {"next": 0})["next"]
    while True:
        rf.fs.read_text("agent.py")
        rf.state.put("bench/" + job["id"], number)
        number += 1
        if number % 5 == 0:
            rf.checkpoint.save({"next": number})
        time.sleep(0.1)
"""


def measure(bench: Bench) -> Section:
    """Kill, start, and look into the journal for a new outcome of every agent."""
    section = Section(
        name="resume", title=f"kill -9 of the kernel with {AGENTS} working agents, then `ringfence up`"
    )
    with kernels.running(bench.directory("resume")) as kernel:
        bench.say(f"{AGENTS} agents")
        for number in range(AGENTS):
            kernel.submit(MANIFEST, {"agent.py": PROGRAM}, job=json.dumps({"id": f"w{number}"}).encode())
        for number in range(1 if bench.quick else 3):
            eventually(lambda: _behind(kernel) >= STEPS_BEFORE, "the agents did not get to work", every_s=0.1)
            bench.say(f"kill {number + 1}")
            section.rows.append({"kill": number + 1, **_once(kernel)})
        section.checks["no step has two outcomes on one branch"] = _repeated(kernel) == 0
        section.checks["every agent runs"] = all(
            row["state"] == "running" for row in kernel.operator.call("List", 30.0)["agents"]
        )
    bare = median([_bare(AGENTS) for _ in range(1 if bench.quick else 3)])
    for row in section.rows:
        row["bare s"] = bare
        row["ratio"] = row["all working s"] / bare
    section.notes.append(
        f"bare: {AGENTS} Python processes with the library and gRPC imported, started at once, nothing else"
    )
    return section


def _once(kernel: kernels.Kernel) -> dict[str, Any]:
    kernel.kill()
    began, killed_us = time.monotonic(), time.time_ns() // 1000
    kernel.start()
    answers = time.monotonic() - began
    with psycopg.connect(kernel.dsn, autocommit=True) as connection:
        eventually(lambda: _since(connection, killed_us) >= AGENTS, "not all agents came back", every_s=0.01)
    return {"kernel answers s": answers, "all working s": time.monotonic() - began}


def _behind(kernel: kernels.Kernel) -> int:
    """Steps of the agent that has the fewest."""
    with psycopg.connect(kernel.dsn, autocommit=True) as connection:
        query = "select chain, count(*) from journal where chain > 0 and phase = %s group by chain"
        counts = [int(row[1]) for row in connection.execute(query, [int(Phase.OUTCOME)])]
    return min(counts) if len(counts) == AGENTS else 0


def _since(connection: psycopg.Connection[Any], when_us: int) -> int:
    """Agents with an outcome of a call that began after a moment."""
    query = "select count(distinct chain) from journal where chain > 0 and phase = %s and started_us > %s"
    row = connection.execute(query, [int(Phase.OUTCOME), when_us]).fetchone()
    return int(row[0]) if row else 0


def _repeated(kernel: kernels.Kernel) -> int:
    query = (
        "select count(*) from (select 1 from journal where chain > 0 and phase = %s"
        " group by chain, branch, lane, lane_step having count(*) > 1) as twice"
    )
    with psycopg.connect(kernel.dsn, autocommit=True) as connection:
        row = connection.execute(query, [int(Phase.OUTCOME)]).fetchone()
    return int(row[0]) if row else 0


def _bare(count: int) -> float:
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LIBRARY],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kernels.environment(),
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        with process, process.stdout as output:
            output.readline()
            process.kill()
    return time.monotonic() - began
