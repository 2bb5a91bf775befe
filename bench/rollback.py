"""What a way back costs: a point before a call as the workspace grows, a point of rows as they get more, and the rollback itself.

Beside what else keeps a state to go back to: a copy of the tree, git, and nono's snapshots where it is installed. The others' figures
are of the snapshot alone; ours are of the whole call, policy, journal and sandbox included.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from ringfence.kernel.postgres import EmbeddedPostgres

from bench import kernels
from bench.host import Bench, BenchError, median, timed
from bench.report import Section, Target

FILES = (100, 5_000, 100_000)
QUICK_FILES = (100, 5_000)
ROWS = (1, 100, 10_000)
FILE_BYTES = 200
DELETE_MS, COMMAND_MS = 10.0, 15.0
FLAT, TIMES_ROWS = 2.0, 3.0
"""At most so many times the cost at the fewest files; and of the statement alone, which its point may take twice of."""

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: back}
spec:
  run: {command: [python, agent.py]}
  permissions:
    allow:
      - fs.*: "/workspace/**"
      - exec.run: "*"
      - sql.*: {database: shop}
"""

KERNEL_FILE = """
apiVersion: ringfence/v1
kind: Kernel
spec: {resources: {shop: {type: postgres, embedded: true}}}
"""

PROGRAM = (
    kernels.TIMED
    + b"""\
    def three(number):
        for name in "abc":
            rf.fs.write_text("three/%s" % name, "content %d" % number)
    edit = ["sh", "-c", "for f in a b c; do echo x >> edits/$f; done"]
    bare = ["sh", "-c", "for f in a b c; do echo x >> /dev/null; done"]
    three(0)
    for name in "abc":
        rf.fs.write_text("edits/" + name, "0")
    rf.exec.run(bare)
    reads, deletes, runs, edits = [], [], [], []
    for number in range(job["times"]):
        three(number)
        reads.append(timed(lambda: rf.fs.read_bytes("three/a")))
        deletes.append(timed(lambda: rf.fs.delete("three", recursive=True)))
        runs.append(timed(lambda: rf.exec.run(bare)))
        edits.append(timed(lambda: rf.exec.run(edit)))
    writes = {}
    if job["rows"]:
        look = "select kept from stock where id = 1"
        writes[0] = [timed(lambda: rf.sql.query("shop", look)) for _ in range(5 * job["writes"])]
    for count in job["rows"]:
        statement = "update stock set kept = kept + 1 where id <= %s"
        times = job["writes"] * (5 if count < 1000 else 1)
        writes[count] = [timed(lambda: rf.sql.execute("shop", statement, [count])) for _ in range(times)]
print(json.dumps({"bare": reads, "deletes": deletes, "runs": runs, "edits": edits, "writes": writes}))
"""
)


def measure(bench: Bench) -> Section:
    """One agent for each size of workspace; rows in the first."""
    section = Section(
        name="rollback",
        title="the way back: points before calls, and rollbacks, by files in the workspace and rows of a statement",
    )
    times = 8 if bench.quick else 25
    home = bench.directory("rollback")
    sizes = QUICK_FILES if bench.quick else FILES
    with kernels.running(home, config=KERNEL_FILE) as kernel:
        shop = EmbeddedPostgres(kernel.data).dsn("shop", "shop")
        with psycopg.connect(shop, autocommit=True) as connection:
            connection.execute("create table stock (id int primary key, name text, kept int)")
            connection.execute(
                "insert into stock select n, 'row ' || n, 0 from generate_series(1, %s) n", [ROWS[-1]]
            )
        for count in sizes:
            bench.say(f"{count} files")
            section.rows.append(_files(bench, kernel, count, times))
        bench.say("rows")
        _rows(section, shop, _written(kernel, section), times)
    _targets(section, sizes)
    return section


def _tree(root: Path, count: int) -> None:
    for number in range(count):
        path = root / f"tree/{number % 100}/{number // 100}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * FILE_BYTES)


def _written(kernel: kernels.Kernel, section: Section) -> dict[int, float]:
    """What an agent's statements took, by their rows; 0: one that reads."""
    job = json.dumps({"times": 0, "rows": ROWS, "writes": 5}).encode()
    agent = kernel.submit(MANIFEST, {"agent.py": PROGRAM}, job=job)
    report = kernel.finished(agent)
    back = timed(lambda: kernel.operator.call("Rollback", 600.0, agent=agent, to="0"))
    section.notes.append(
        f"rollback of {sum(len(taken) for rows, taken in report['writes'].items() if int(rows))} statements on up to {ROWS[-1]} rows: "
        f"{back * 1e3:.0f} ms"
    )
    return {int(number): min(taken) for number, taken in report["writes"].items()}


def _files(bench: Bench, kernel: kernels.Kernel, count: int, times: int) -> dict[str, Any]:
    """The figures of one size."""
    files = {f"tree/{n % 100}/{n // 100}.txt": b"x" * FILE_BYTES for n in range(count)}
    job = {"times": times, "rows": (), "writes": 0}
    agent = kernel.submit(MANIFEST, {"agent.py": PROGRAM, **files}, job=json.dumps(job).encode())
    report = kernel.finished(agent)
    # Back from the end: three files that came and went, and three that were changed.
    back = timed(lambda: kernel.operator.call("Rollback", 600.0, agent=agent, to="0"))
    copies = bench.directory("copies")
    _tree(copies / "live", count)
    peers = {name: _tried(work, copies, times) for name, work in PEERS.items()}
    shutil.rmtree(copies, ignore_errors=True)

    def ms(name: str) -> float:
        return min(report[name]) * 1e3

    return {
        "files": count,
        "read ms": ms("bare"),
        "delete of 3 ms": ms("deletes"),
        "bare command ms": ms("runs"),
        "edit of 3 ms": ms("edits"),
        "edit over bare ms": ms("edits") - ms("runs"),
        "rollback ms": back * 1e3,
        **{f"{name} ms": taken for name, taken in peers.items()},
    }


def _rows(section: Section, shop: str, written: dict[int, float], times: int) -> None:
    """The statement alone, on the same server, committed; and of ours what a read of one row takes too."""
    call = written.pop(0)
    with psycopg.connect(shop, autocommit=True) as connection:
        for count, whole in written.items():
            bare = min(_statement(connection, count) for _ in range(times))
            own = min(_transaction(connection, count) for _ in range(times))
            name = f"{count} rows behind their point, less a reading call, over the statement alone"
            got = max(0.0, whole - call) / bare
            section.targets.append(Target(name=name, got=got, wanted=TIMES_ROWS, at_least=False))
            section.notes.append(
                f"{count} rows: {whole * 1e3:.1f} ms the whole call with its point, {call * 1e3:.1f} a call that reads one row, "
                f"{bare * 1e3:.1f} the bare statement, {own * 1e3:.1f} in a transaction that is begun and committed around it, as anybody "
                "does who looks at what it changed before it counts"
            )


def _targets(section: Section, sizes: tuple[int, ...]) -> None:
    first, last = section.rows[0], section.rows[-1]
    for column, most in (("delete of 3 ms", DELETE_MS), ("edit over bare ms", COMMAND_MS)):
        for row in section.rows:
            name = f"{column.removesuffix(' ms')}: {row['files']} files, ms"
            section.targets.append(Target(name=name, got=row[column], wanted=most, at_least=False))
    for column in ("delete of 3 ms", "edit of 3 ms", "rollback ms"):
        name = f"{column.removesuffix(' ms')}: {sizes[-1]} files beside {sizes[0]}"
        section.targets.append(
            Target(name=name, got=last[column] / first[column], wanted=FLAT, at_least=False)
        )
    section.notes.append(
        "the least of all times of ours, so that others on the machine count less; the median of theirs"
    )
    section.notes.append(
        "delete of 3: fs.delete of a directory with three files, the whole call, its point verified; rollback: of all that the agent did"
    )
    section.notes.append(
        "copy, git, nono: taking a state of the whole tree of which three files changed; nan: not installed"
    )


def _statement(connection: psycopg.Connection[Any], count: int) -> float:
    return timed(lambda: connection.execute("update stock set kept = kept + 1 where id <= %s", [count]))


def _transaction(connection: psycopg.Connection[Any], count: int) -> float:
    def whole() -> None:
        with connection.transaction():
            connection.execute("update stock set kept = kept + 1 where id <= %s", [count])

    return timed(whole)


# -- others ---------------------------------------------------------------------------------------------------------------


def _touch(live: Path, number: int) -> None:
    for name in ("0", "1", "2"):
        (live / f"tree/{name}/0.txt").write_text(f"changed {number}")


def _copy(place: Path, number: int) -> float:
    target = place / "copy"
    shutil.rmtree(target, ignore_errors=True)
    _touch(place / "live", number)
    return timed(lambda: _run(place, "cp", "-a", "live", "copy"))


def _git(place: Path, number: int) -> float:
    live = place / "live"
    if not (live / ".git").exists():
        _run(live, "git", "init", "-q")
        _run(live, "git", "add", "-A")
        _run(live, *_COMMIT)
    _touch(live, number)

    def commit() -> None:
        _run(live, "git", "add", "-A")
        _run(live, *_COMMIT)

    return timed(commit)


_COMMIT = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "commit", "-q", "-m", "state")


def _nono(place: Path, number: int) -> float:
    """Its own snapshots, as it takes them around a command."""
    module: Any = importlib.import_module("nono_py")
    store = place / "nono"
    store.mkdir(exist_ok=True)
    manager = module.SnapshotManager(str(store), [str(place / "live")], module.ExclusionConfig())
    manager.create_baseline()
    _touch(place / "live", number)
    return timed(manager.create_incremental)


PEERS: dict[str, Callable[[Path, int], float]] = {"cp -a": _copy, "git": _git, "nono": _nono}


def _run(place: Path, *argv: str) -> None:
    done = subprocess.run(argv, cwd=place, check=False, capture_output=True)
    if done.returncode:
        raise BenchError(f"`{argv[0]}` failed: {done.stderr[-200:]!r}")


def _tried(work: Callable[[Path, int], float], place: Path, times: int) -> float:
    """Milliseconds, or nan where the other one is not there."""
    try:
        return median([work(place, number) for number in range(min(times, 3))]) * 1e3
    except (ImportError, FileNotFoundError, AttributeError):
        return float("nan")
