"""Real agents: the library in sandboxed Python processes, all calling in a loop at once."""

from __future__ import annotations

import json
import os
from typing import Any

from bench import commits, kernels
from bench.calls import KERNEL_CPU
from bench.host import Bench, cpu_seconds, pin, rank
from bench.report import Section

AGENTS = (1, 8, 32)

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: caller}
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
    rf.state.put("bench/ready/" + job["id"], True)
    begin = None
    while begin is None:
        time.sleep(0.05)
        begin = rf.state.get("bench/begin/" + job["group"])
    time.sleep(max(0, begin - time.time()))
    reads, writes = [], []
    until, number = begin + job["seconds"], 0
    cpu, clock, now = time.process_time(), time.perf_counter, time.time()
    while now < until:
        began = clock()
        if number % 5 == 4:
            rf.state.put("bench/value/" + job["id"], {"page": number, "note": "as an agent would keep it"})
            writes.append(clock() - began)
        else:
            rf.fs.read_bytes("bench.txt")
            reads.append(clock() - began)
        number += 1
        now = time.time()
    cpu = time.process_time() - cpu
print(json.dumps({"reads": reads, "writes": writes, "cpu": cpu}))
"""

STARTER = b"""
import json, sys, time
from ringfence import agent

job = json.load(sys.stdin)
with agent.boot() as rf:
    for one in job["ids"]:
        while rf.state.get("bench/ready/" + one) is None:
            time.sleep(0.02)
    rf.state.put("bench/begin/" + job["group"], time.time() + 0.3)
print("{}")
"""


def measure(bench: Bench) -> Section:
    """Every number of agents in turn, on one kernel."""
    section = Section(
        name="agents", title="durable calls of real agents: the library, in Python processes in sandboxes"
    )
    seconds = bench.seconds(2.0, 5.0)
    home = bench.directory("agents")
    with kernels.running(home) as kernel:
        dsn = commits.prepare(kernel.dsn)
        for count in AGENTS[1:] if bench.quick else AGENTS:
            bench.say(f"{count} agents")
            row = _group(kernel, count, seconds)
            single = commits.measure(dsn, count, bench.seconds(1.0, 3.0), home)
            row |= {"commits/s": single.per_s, "commit p50 ms": single.p50_ms}
            row["read/commit"] = row["read p50 ms"] / single.p50_ms
            section.rows.append(row)
    section.notes.append(f"commits: {single.tool}, as many clients as agents, same server, right after them")
    section.notes.append(
        "agent µs: processor time of the agent's own process a call, gRPC's client for the most part"
    )
    return section


def _group(kernel: kernels.Kernel, count: int, seconds: float) -> dict[str, Any]:
    group = f"g{count}"
    ids = [f"{group}-{number}" for number in range(count)]
    # What a pinned kernel starts would stay on its processor.
    pin(kernel.pid, *sorted(os.sched_getaffinity(0)))
    files = {"agent.py": PROGRAM, "bench.txt": b"x" * 512}
    agents = [
        kernel.submit(
            MANIFEST, files, job=json.dumps({"id": one, "group": group, "seconds": seconds}).encode()
        )
        for one in ids
    ]
    starter = kernel.submit(
        MANIFEST, {"agent.py": STARTER}, job=json.dumps({"ids": ids, "group": group}).encode()
    )
    kernel.finished(starter)
    pin(kernel.pid, KERNEL_CPU)
    before = cpu_seconds(kernel.pid)
    reports = [kernel.finished(agent) for agent in agents]
    kernel_cpu = cpu_seconds(kernel.pid) - before
    reads = [n for report in reports for n in report["reads"]]
    writes = [n for report in reports for n in report["writes"]]
    both = [*reads, *writes]
    return {
        "agents": count,
        "calls/s": len(both) / seconds,
        "p50 ms": rank(both, 0.5) * 1e3,
        "p99 ms": rank(both, 0.99) * 1e3,
        "p99/p50": rank(both, 0.99) / rank(both, 0.5),
        "read p50 ms": rank(reads, 0.5) * 1e3,
        "write p50 ms": rank(writes, 0.5) * 1e3,
        "kernel µs": kernel_cpu / len(both) * 1e6,
        "agent µs": sum(report["cpu"] for report in reports) / len(both) * 1e6,
    }
