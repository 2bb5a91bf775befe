"""What a program pays for asking through a door: beside the same program asking the same endpoint itself."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.host import WAIT_S, Bench, BenchError, child, cpu_seconds, median, serving
from bench.kernels import Kernel, environment, running
from bench.report import Section, Target

HERE = Path(__file__).parent
PARTS = 200
"""Of a stream, each one token."""
KINDS = {"whole": ("a whole reply", 1), "stream": ("a streamed token", PARTS), "tool": ("a tool call", 1)}
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    host: {{type: llm, base: "http://127.0.0.1:{port}/v1", models: ["gpt-*"], timeout: 120s}}
    bench: {{type: mcp, url: "http://127.0.0.1:{port}/mcp", trusted: true, tools: {{"*": {{effect: read}}}}}}
"""
MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: asks}
spec:
  run: {command: [python, program.py]}
  sandbox: {doors: [models, mcp]}
  restart: {policy: never}
  permissions: {allow: [{llm.complete: {models: ["gpt-*"]}}, {"mcp.bench.*": "*"}]}
"""
GROWTH_MB = 64.0
"""What the kernel may hold more after the last round than after the first, with as many agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What some programs did at the same time.

    Attributes:
        rate: units a second, of all.
        us: processor time a unit of the process that serves them, in microseconds.
        p50_ms: median of a call, the median of all programs.
    """

    rate: float
    us: float
    p50_ms: float


@dataclass(slots=True, kw_only=True)
class Place:
    """Endpoint and kernel."""

    endpoint: subprocess.Popen[str]
    port: int
    kernel: Kernel
    seconds: float

    def bare(self, kind: str, many: int) -> Round:
        """The programs ask the endpoint themselves."""
        job = self._job(kind, many, port=self.port, tool="echo")
        argv = [sys.executable, str(HERE / "program.py")]
        with contextlib.ExitStack() as stack:
            programs = [
                stack.enter_context(
                    child(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
                )
                for _ in range(many)
            ]
            stack.callback(lambda: [program.kill() for program in programs])
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(many))
            said = [pool.submit(program.communicate, job, WAIT_S) for program in programs]
            used = self._window(self.endpoint.pid, said)
            return self._round([json.loads(one.result()[0]) for one in said], used)

    def door(self, kind: str, many: int) -> Round:
        """As many agents ask by their doors."""
        job = self._job(kind, many, port=7080, tool="mcp_bench_echo").encode()
        program = {"program.py": (HERE / "program.py").read_bytes()}
        agents = [self.kernel.submit(MANIFEST, program, job=job) for _ in range(many)]
        with concurrent.futures.ThreadPoolExecutor(many) as pool:
            said = [pool.submit(self.kernel.finished, agent) for agent in agents]
            used = self._window(self.kernel.pid, said)
            found = [one.result() for one in said]
        return self._round(found, used)

    def _job(self, kind: str, many: int, **where: Any) -> str:
        return json.dumps({"kind": kind, "of": many, "seconds": self.seconds, "parts": PARTS, **where})

    def _window(self, pid: int, said: list[concurrent.futures.Future[Any]]) -> float:
        """Processor time of a process while all ask: starts, and the first call of each, are over then.

        Raises:
            BenchError: one ended before all had come.
        """
        assert self.endpoint.stdout is not None
        while not select.select([self.endpoint.stdout], [], [], 0.1)[0]:
            if any(one.done() for one in said):
                raise BenchError(f"one ended early: {[one.result() for one in said if one.done()][:1]}")
        start = json.loads(self.endpoint.stdout.readline())["start"]
        time.sleep(max(0.0, start - time.time()))
        before = cpu_seconds(pid)
        time.sleep(self.seconds)
        return cpu_seconds(pid) - before

    def _round(self, said: list[dict[str, Any]], used: float) -> Round:
        middle = sorted(one["p50"] for one in said)[len(said) // 2]
        # Who was in the middle of a call at the end finished it: a rate counts the part that was in time.
        rate = sum(one["units"] / one["seconds"] for one in said)
        return Round(rate=rate, us=used / (rate * self.seconds) * 1e6, p50_ms=middle * 1e3)

    def memory_mb(self) -> float:
        """What the kernel holds now."""
        lines = Path(f"/proc/{self.kernel.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def measure(bench: Bench) -> Section:
    """Bare and by the door in turn, so that both meet the same minutes."""
    section = Section(
        name="doors",
        title=f"asking a model and a tool by the doors of a sandbox, beside the same program that asks itself; streams of {PARTS} tokens",
    )
    home = bench.directory("doors")
    with (
        serving("bench.doors.endpoint", log=home / "endpoint.log") as (endpoint, told),
        running(home, CONFIG.format(port=told["port"])) as kernel,
    ):
        place = Place(endpoint=endpoint, port=told["port"], kernel=kernel, seconds=bench.seconds(1.5, 4.0))
        held: list[float] = []
        for many in (1, 50):
            for kind in KINDS:
                bench.say(f"{many} asking for {KINDS[kind][0]}")
                section.rows.append(_row(place, kind, many, times=1 if bench.quick else 3))
                held.append(place.memory_mb())
        again = place.door("stream", 50)
        grown = place.memory_mb() - held[-1]
    section.targets += _targets(section.rows)
    section.checks["streams arrive whole"] = again.rate > 0
    section.checks[
        f"the kernel's memory stays within {GROWTH_MB:.0f} MB of what it was, with as many agents again"
    ] = grown < GROWTH_MB
    section.notes += [
        f"the kernel held {held[0]:.0f} MB after the first, {held[-1]:.0f} after all, and {grown:+.0f} after 50 more that stream",
        "us: processor time of the endpoint, and of the kernel, for each; PostgreSQL's is not in it, nor what counts prompts",
        "the endpoint does no work: beside a real model, ratios are nearer to 1",
    ]
    return section


def _row(place: Place, kind: str, many: int, times: int) -> dict[str, Any]:
    pairs = [(place.bare(kind, many), place.door(kind, many)) for _ in range(times)]
    name, units = KINDS[kind]
    return {
        "asked for": name,
        "agents": many,
        "bare/s": median([bare.rate for bare, _ in pairs]),
        "door/s": median([door.rate for _, door in pairs]),
        "of bare": median([door.rate / bare.rate for bare, door in pairs]),
        "bare us": min(bare.us for bare, _ in pairs),
        "kernel us": min(door.us for _, door in pairs),
        "more us each": (min(d.p50_ms for _, d in pairs) - min(b.p50_ms for b, _ in pairs)) / units * 1e3,
    }


def _targets(rows: list[dict[str, Any]]) -> list[Target]:
    found = {(row["asked for"], row["agents"]): row for row in rows}
    wanted = (
        ("us more for a whole reply, alone", found["a whole reply", 1]["more us each"], 10_000.0),
        ("us of the kernel for a streamed token", found["a streamed token", 50]["kernel us"], 100.0),
        ("us more for a tool call, alone", found["a tool call", 1]["more us each"], 20_000.0),
    )
    return [Target(name=name, got=got, wanted=most, at_least=False) for name, got, most in wanted]
