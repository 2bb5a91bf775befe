"""What a rollback point and a command cost as the workspace grows: nothing more, or the tree is being scanned."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench import kernels
from bench.host import Bench, median, rank, timed
from bench.report import Section, Target

FILES = (100, 1_000, 10_000)
FILE_BYTES = 1_000
FLAT = 2.0
"""What counts as flat on a busy machine: 100 times the files, at most so many times the cost."""

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: writer}
spec:
  run: {command: [python, agent.py]}
  permissions:
    allow:
      - fs.*: "/workspace/**"
      - exec.run: "*"
    deny:
      - fs.*: "**/.env"
"""

PROGRAM = (
    kernels.TIMED
    + b"""\
    rf.fs.write_text("tree/0/0.txt", "warm")
    rf.exec.run(["true"])
    reads, writes, runs, edits = [], [], [], []
    for number in range(job["times"]):
        path = "tree/%d/%d.txt" % (number % 10, number % 7)
        reads.append(timed(lambda: rf.fs.read_bytes(path)))
        writes.append(timed(lambda: rf.fs.write_text(path, "new %d" % number)))
        runs.append(timed(lambda: rf.exec.run(["true"])))
        edits.append(timed(lambda: rf.exec.run(["sh", "-c", "echo %d >> tree/1/1.txt" % number])))
print(json.dumps({"reads": reads, "writes": writes, "runs": runs, "edits": edits}))
"""
)


def measure(bench: Bench) -> Section:
    """One agent for each size of workspace, one after the other."""
    section = Section(
        name="points",
        title="a write behind its rollback point, and commands in the sandbox, by files in the workspace",
    )
    times = 12 if bench.quick else 50
    home = bench.directory("points")
    with kernels.running(home) as kernel:
        for count in FILES:
            bench.say(f"{count} files")
            bare_write = median([_bare_write(home) for _ in range(times)])
            bare_run = median([timed(lambda: subprocess.run(["true"], check=True)) for _ in range(times)])
            files = {f"tree/{n % 10}/{n // 10}.txt": b"x" * FILE_BYTES for n in range(count)}
            agent = kernel.submit(
                MANIFEST, {"agent.py": PROGRAM, **files}, job=json.dumps({"times": times}).encode()
            )
            section.rows.append(_row(count, kernel.finished(agent), bare_write, bare_run))
    for column in ("write ms", "true ms", "edit ms"):
        grown = section.rows[-1][column] / section.rows[0][column]
        name = f"{column.removesuffix(' ms')}: {FILES[-1]} files beside {FILES[0]}"
        section.targets.append(Target(name=name, got=grown, wanted=FLAT, at_least=False))
    section.notes.append(
        "write: fs.write of an existing file, its point verified first; edit: a command that changes one file"
    )
    section.notes.append(
        "bare write: the same file written, synced, renamed and its directory synced, no point"
    )
    return section


def _row(count: int, report: dict[str, Any], bare_write: float, bare_run: float) -> dict[str, Any]:
    def ms(name: str) -> float:
        return median(report[name]) * 1e3

    return {
        "files": count,
        "read ms": ms("reads"),
        "write ms": ms("writes"),
        "write p99 ms": rank(report["writes"], 0.99) * 1e3,
        "bare write ms": bare_write * 1e3,
        "write/bare": ms("writes") / bare_write / 1e3,
        "true ms": ms("runs"),
        "edit ms": ms("edits"),
        "bare true ms": bare_run * 1e3,
        "true/bare": ms("runs") / bare_run / 1e3,
    }


def _bare_write(directory: Path) -> float:
    def write() -> None:
        fd, name = tempfile.mkstemp(dir=directory)
        os.write(fd, b"new")
        os.fsync(fd)
        os.close(fd)
        Path(name).rename(directory / "bare.txt")
        handle = os.open(directory, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    return timed(write)
