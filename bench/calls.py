"""Durable calls of the lean generator, beside a bare echo and single inserts measured in the same minute."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import commits
from bench.host import Bench, BenchError, cpu_seconds, median, pin, serving
from bench.report import Section, Target

STREAMS = (1, 8, 64, 200)
KERNEL_CPU, GENERATOR_CPU = 0, 1
AS_IT_COMES = {"GRPC_EXPERIMENTS": ""}
"""gRPC with its own settings; all others here run it with the kernel's, which double an echo."""
ECHOES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "echo": ((), {}),
    "door": (("--door",), {}),
    "plain": ((), AS_IT_COMES),
}
"""Options and environment of each echo: gRPC's server, the server of the kernel's own doors, gRPC's as it comes."""

_lanes = itertools.count(1)


def generate(
    targets: Path, streams: int, seconds: float, *more: str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run the generator once, on a lane of its own; `env` is added to this process's.

    Raises:
        BenchError: it ended without a report, or calls failed.
    """
    argv = [sys.executable, "-m", "bench.lean", "--targets", str(targets), "--streams", str(streams)]
    argv += ["--seconds", str(seconds), "--lane", str(next(_lanes)), "--cpu", str(GENERATOR_CPU), *more]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=seconds + 120,
        check=False,
        env={**os.environ, **(env or {})},
    )
    if not done.stdout:
        raise BenchError(
            f"the generator failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
        )
    report: dict[str, Any] = json.loads(done.stdout)
    if report["failed"]:
        raise BenchError(f"{report['failed']} calls failed: {next(iter(report['failures']))}")
    return report


def measure(bench: Bench) -> Section:
    """Every number of streams, echo and kernel and pgbench in turn."""
    section = Section(
        name="calls",
        title="durable calls of one lean generator (80 % fs.read, 20 % state.put; one call at a time on a stream)",
    )
    home = bench.directory("calls")
    agents = max(STREAMS)
    bench.say(f"starting a kernel with {agents} agents and a bare echo")
    with contextlib.ExitStack() as stack:
        options = ("--data", str(home / "k"), "--agents", str(agents))
        kernel, told = stack.enter_context(serving("bench.serve", *options, log=home / "serve.log"))
        pids = {"kernel": _ready(home, "kernel", kernel, told)}
        for name, (more, env) in ECHOES.items():
            argv = ("--serve", "--streams", str(agents), *more)
            echo = stack.enter_context(serving("bench.echo", *argv, log=home / f"{name}.log", env=env))
            pids[name] = _ready(home, name, *echo)
        dsn = commits.prepare(told["dsn"])
        for streams in STREAMS:
            bench.say(f"{streams} streams")
            rounds = [_round(bench, home, streams, pids, dsn) for _ in range(1 if bench.quick else 3)]
            section.rows.append(_row(streams, rounds))
    section.targets = _targets(section.rows)
    section.notes.append(
        f"commits: {rounds[0]['commits'].tool}, {commits.BODY_BYTES} bytes a row, same server, same minute"
    )
    section.notes.append(
        "echo: gRPC's server with the kernel's settings, by the generator or by gRPC's own client, whichever gave more; "
        "plain echo: gRPC's server and client with its own settings; door echo: the kernel's own server, which does nothing else"
    )
    tuned = ", ".join(
        f"{row['of echo']:.2f} at {row['streams']}" for row in section.rows if row["streams"] >= 64
    )
    section.notes.append(
        f"of the echo with the kernel's settings for gRPC: {tuned} streams; no goal was set by that one"
    )
    section.notes.append(
        "µs: processor time of the server process a call; it depends less on a busy machine than calls/s"
    )
    return section


def _ready(home: Path, name: str, process: subprocess.Popen[str], report: Any) -> int:
    """Write down where a server listens, and give it its processor; gives its pid."""
    (home / f"{name}.json").write_text(json.dumps(report["targets"]))
    pin(process.pid, KERNEL_CPU)
    return process.pid


def _round(bench: Bench, home: Path, streams: int, pids: Mapping[str, int], dsn: str) -> dict[str, Any]:
    seconds = bench.seconds(2.0, 5.0)
    found: dict[str, Any] = {}
    for name, pid in pids.items():
        # INVARIANT: the reference is the best that gRPC gives: a generator that suits it less must not make it smaller.
        clients = {"echo": ((), ("--grpc",)), "plain": (("--grpc",),)}.get(name, ((),))
        for more in clients:
            before = cpu_seconds(pid)
            env = AS_IT_COMES if name == "plain" else None
            report = generate(home / f"{name}.json", streams, seconds, *more, env=env)
            report["us"] = (cpu_seconds(pid) - before) / report["calls"] * 1e6
            if name not in found or report["calls_per_s"] > found[name]["calls_per_s"]:
                found[name] = report
    found["commits"] = commits.measure(dsn, streams, bench.seconds(1.0, 3.0), home)
    return found


def _row(streams: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def middle(value: Any) -> float:
        return median([value(r) for r in rounds])

    return {
        "streams": streams,
        "calls/s": middle(lambda r: r["kernel"]["calls_per_s"]),
        "p50 ms": middle(lambda r: r["kernel"]["p50_ms"]),
        "p99 ms": middle(lambda r: r["kernel"]["p99_ms"]),
        "p99/p50": middle(lambda r: r["kernel"]["p99_ms"] / r["kernel"]["p50_ms"]),
        "µs": middle(lambda r: r["kernel"]["us"]),
        "echo/s": middle(lambda r: r["echo"]["calls_per_s"]),
        "echo p99/p50": middle(lambda r: r["echo"]["p99_ms"] / r["echo"]["p50_ms"]),
        "echo µs": middle(lambda r: r["echo"]["us"]),
        "door echo/s": middle(lambda r: r["door"]["calls_per_s"]),
        "door echo µs": middle(lambda r: r["door"]["us"]),
        "plain echo/s": middle(lambda r: r["plain"]["calls_per_s"]),
        "of plain echo": middle(lambda r: r["kernel"]["calls_per_s"] / r["plain"]["calls_per_s"]),
        "of echo": middle(lambda r: r["kernel"]["calls_per_s"] / r["echo"]["calls_per_s"]),
        "commits/s": middle(lambda r: r["commits"].per_s),
        "commit p50 ms": middle(lambda r: r["commits"].p50_ms),
        "of commits": middle(lambda r: r["kernel"]["calls_per_s"] / r["commits"].per_s),
        "read/commit": middle(lambda r: r["kernel"]["fs.read"]["p50_ms"] / r["commits"].p50_ms),
        "write/commit": middle(lambda r: r["kernel"]["state.put"]["p50_ms"] / r["commits"].p50_ms),
    }


def _targets(rows: list[dict[str, Any]]) -> list[Target]:
    targets: list[Target] = []
    for row in rows:
        name = f"{row['streams']} streams"
        if row["streams"] == 1:
            targets += [
                Target(
                    name="one stream, READ in single commits",
                    got=row["read/commit"],
                    wanted=3,
                    at_least=False,
                ),
                Target(
                    name="one stream, WRITE in single commits",
                    got=row["write/commit"],
                    wanted=5,
                    at_least=False,
                ),
            ]
        if row["streams"] >= 64:
            targets.append(Target(name=f"{name}, calls/s", got=row["calls/s"], wanted=10_000))
            targets.append(
                Target(name=f"{name}, share of the plain echo", got=row["of plain echo"], wanted=0.5)
            )
            targets.append(Target(name=f"{name}, p99/p50", got=row["p99/p50"], wanted=3, at_least=False))
    return targets
