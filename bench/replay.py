"""A long replay in bounded memory: a program without checkpoints is killed with its kernel, and goes through all its steps again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import kernels
from bench.host import BenchError, eventually
from bench.report import Section, Target

if TYPE_CHECKING:
    from bench.host import Bench

LANES = 8
GROWN_MB_MOST = 20
"""What the steps may cost the kernel and the agent together while they are replayed: less than it takes to hold their results."""
PATIENCE_S = 900.0

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: long}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [{state.get: "bench/**"}]}
"""

PROGRAM = b"""
import asyncio, json, sys, time
from ringfence import agent

steps, lanes = json.load(sys.stdin)

async def main():
    async with agent.boot_async() as rf:
        async def lane():
            for _ in range(steps // lanes):
                await rf.state.get("bench/none")
        await asyncio.gather(*(lane() for _ in range(lanes)))
        print("there", flush=True)
        time.sleep(3600)

asyncio.run(main())
"""


def measure(bench: Bench) -> Section:
    """Peaks of memory after replays of growing length."""
    section = Section(name="replay", title="replay of a long program, without checkpoints")
    counts = (1_000, 10_000) if bench.quick else (1_000, 10_000, 100_000)
    for count in counts:
        bench.say(f"{count} steps")
        section.rows.append(_replayed(bench, count))
    first, last = section.rows[0], section.rows[-1]
    section.targets.append(
        Target(
            name=f"MB more for {last['steps']} steps than for {first['steps']}, kernel and agent together",
            got=sum(last[name] - first[name] for name in ("kernel MB", "agent MB")),
            wanted=GROWN_MB_MOST,
            at_least=False,
        )
    )
    section.notes.append(
        f"{LANES} lanes; largest resident memory of the kernel's process and of the agent's since they were started"
    )
    return section


def _replayed(bench: Bench, count: int) -> dict[str, Any]:
    with kernels.running(bench.directory(f"replay-{count}")) as kernel:
        job = json.dumps([count, LANES]).encode()
        agent = kernel.submit(MANIFEST, {"agent.py": PROGRAM}, job=job)
        eventually(lambda: _times(kernel, agent) == 1, "it did not make its steps", PATIENCE_S, 0.2)
        kernel.kill()
        began = time.monotonic()
        kernel.start()
        eventually(lambda: _times(kernel, agent) == 2, "it did not come back", PATIENCE_S, 0.05)
        seconds = time.monotonic() - began
        pid = kernel.operator.call("Show", 30.0, agent=agent)["pid"]
        return {
            "steps": count,
            "kernel MB": _peak(kernel.pid),
            "agent MB": _peak(pid),
            "s": seconds,
        }


def _times(kernel: kernels.Kernel, agent: str) -> int:
    shown = kernel.operator.call("Show", 30.0, agent=agent)
    if shown["state"] == "failed":
        raise BenchError(f"the agent failed: {shown['error']}")
    return kernel.output(agent).split().count("there")


def _peak(pid: int) -> float:
    """Largest resident memory of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kib) * 1024 / 1e6
