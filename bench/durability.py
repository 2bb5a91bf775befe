"""Whether an answer is a promise: kill -9 of PostgreSQL in mid-run, then every answered call is looked up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
from ringfence.kernel.journal.types import Phase

from bench.host import Bench, BenchError, eventually, serving
from bench.report import Section

STREAMS = 32


def measure(bench: Bench) -> Section:
    """Drive, kill the server and all its processes, let it come back, compare."""
    section = Section(
        name="durability",
        title=f"kill -9 of PostgreSQL under {STREAMS} streams; every answered call looked up afterwards",
    )
    home = bench.directory("durability")
    kills = 1 if bench.quick else 3
    seconds = 3.0 + 3.0 * kills
    bench.say(f"{STREAMS} agents")
    options = ("--data", str(home / "k"), "--agents", str(STREAMS))
    with serving("bench.serve", *options, log=home / "serve.log") as (kernel, told):
        targets, answered = home / "targets.json", home / "answered"
        targets.write_text(json.dumps(told["targets"]))
        generator = _generator(targets, answered, seconds)
        try:
            for number in range(kills):
                time.sleep(2.0)
                bench.say(f"kill {number + 1}")
                section.rows.append({"kill": number + 1, "back s": _kill(told["dsn"])})
            output, _ = generator.communicate(timeout=seconds + 120)
        finally:
            if generator.poll() is None:
                generator.kill()
                generator.wait()
        report: dict[str, Any] = json.loads(output) if output else {}
        if not answered.exists():
            raise BenchError("the generator ended without its list of answered calls")
        found = _outcomes(told["dsn"])
        assert kernel.poll() is None
    listed = [_pair(line) for line in answered.read_text().splitlines()]
    missing = [pair for pair in listed if pair not in found]
    for row in section.rows:
        row.update({"answered": len(listed), "found": len(listed) - len(missing), "missing": len(missing)})
        row["failed calls"] = report.get("failed", 0)
        row["slowest ms"] = report.get("max_ms", 0.0)
    section.checks["every answered call is in the journal"] = bool(listed) and not missing
    section.checks["no answered call was recorded twice"] = len(listed) == len(set(listed)) and all(
        found[pair] == 1 for pair in listed if pair in found
    )
    section.notes.append("back: until a new connection is answered, after the server's own crash recovery")
    return section


def _generator(targets: Path, answered: Path, seconds: float) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "bench.lean", "--targets", str(targets), "--answered", str(answered)]
    return subprocess.Popen([*argv, "--seconds", str(seconds)], stdout=subprocess.PIPE, text=True)


def _kill(dsn: str) -> float:
    """Kill the server and its children at once; gives seconds until it is back.

    Raises:
        BenchError: it does not come back.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("select pg_backend_pid(), pg_postmaster_start_time()").fetchone()
        assert row is not None
        postmaster, started = _parent(int(row[0])), row[1]
    for pid in [postmaster, *_children(postmaster)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn, autocommit=True) as again:
            now = again.execute("select pg_postmaster_start_time()").fetchone()
            return now is not None and now[0] != started
        return False

    return eventually(back, "PostgreSQL did not come back", every_s=0.02)


def _outcomes(dsn: str) -> dict[tuple[int, int], int]:
    query = "select chain, step, count(*) from journal where chain > 0 and phase = %s group by chain, step"
    with psycopg.connect(dsn, autocommit=True) as connection:
        return {
            (int(chain), int(step)): int(n)
            for chain, step, n in connection.execute(query, [int(Phase.OUTCOME)])
        }


def _pair(line: str) -> tuple[int, int]:
    chain, step = line.split()
    return int(chain), int(step)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []
