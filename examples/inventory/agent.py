"""Takes stock of the software installed beside it, cleans up, reports, and goes on wherever it was killed.

Every effect goes through `rf.`, so it is judged, journaled, and can be taken back. The files it hashes are
shown to it read-only.
"""

# pyright: basic
from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import software  # pyright: ignore[reportMissingImports] - it lies beside this file in the workspace
from ringfence import agent

ROWS_A_CALL = 1000
PULSES = 3
say = functools.partial(print, flush=True)
LICENCE_BYTES = 4096

INSERT_DISTRIBUTION = """
insert into distributions (name, version, licence, family, verified, altered, missing)
values (%s, %s, %s, %s, %s, %s, %s)
"""
INSERT_FILES = """
insert into files (distribution, path, sha256, size_bytes)
select %s, x.path, x.sha256, x.size_bytes
from jsonb_to_recordset(%s::jsonb) as x (path text, sha256 text, size_bytes bigint)
"""
PRUNE = "delete from files where sha256 is null"
SHARED = """
select f.sha256, count(distinct f.distribution) as copies, min(f.path) as example, max(f.size_bytes) as size_bytes
from files f where f.size_bytes > 0
group by f.sha256 having count(distinct f.distribution) > 1
order by copies desc, size_bytes desc, f.sha256 limit 10
"""
SHARED_BY_DISTRIBUTION = """
select f.distribution, count(*) as shared from files f
where f.size_bytes > 0
  and exists (select from files g where g.sha256 = f.sha256 and g.distribution <> f.distribution)
group by f.distribution order by f.distribution
"""


class Inventory:
    """The agent's work, phase by phase. What a phase needs from the one before is in the checkpoint."""

    def __init__(self, rf: agent.Ringfence, job: dict[str, Any], state: dict[str, Any]) -> None:
        self.rf = rf
        self.job = job
        self.state = state

    def run(self) -> None:
        """Go through the phases that are left."""
        phases = {
            "stock": self.take_stock,
            "clean": self.clean,
            "report": self.write_report,
            "edges": self.touch_edges,
            "pulse": self.pulse,
        }
        names = list(phases)
        for name in names[names.index(self.state["phase"]) :]:
            self.state["phase"] = name
            phases[name]()

    def save(self, **changes: Any) -> None:
        """Keep the state; a restart goes on from here."""
        self.state.update(changes)
        step = self.rf.checkpoint.save(self.state)
        say(f"checkpoint at step {step}: {self.state['phase']} {self.state['next']}")

    def wait_for(self, phase: str) -> None:
        """Ask the desk until it lets the next phase begin."""
        while not self.rf.http.get(f"{self.job['desk']}/may/{phase}").json()["go"]:
            self.rf.sleep(0.1)

    # -- stock ----------------------------------------------------------------------------------------------------

    def take_stock(self) -> None:
        """Examine one distribution after the other: rows, files, a line in the log, one notice each."""
        names = self.state["names"]
        for number in range(self.state["next"], len(names)):
            self.examine(names[number])
            following = {"next": number + 1}
            if number + 1 == len(names):
                following = {"next": 0, "phase": "clean"}
            self.save(**following)

    def examine(self, name: str) -> None:
        """Check one distribution and tell all who want to know, side by side."""
        rf, folder = self.rf, f"dists/{name}"
        metadata, record = rf.fs.read_text(f"{folder}/METADATA"), rf.fs.read_text(f"{folder}/RECORD")
        texts = [entry.path for entry in rf.fs.list(f"{folder}/licences")]
        title = rf.fs.read_bytes(texts[0], limit=LICENCE_BYTES).decode(errors="replace") if texts else ""
        found = software.examine(metadata, record, title, self.job["places"][name])
        row = [name, found.version, found.licence, found.family]
        row += [found.verified, len(found.altered), len(found.missing)]
        work: list[Callable[[], Any]] = [
            functools.partial(rf.sql.execute, "inventory", INSERT_DISTRIBUTION, row),
            functools.partial(self.insert_files, name, found.entries),
            functools.partial(rf.fs.append_text, "out/progress.log", f"{name}: {found.verified} verified\n"),
            functools.partial(rf.http.post, f"{self.job['desk']}/notices/{name}", json=found.facts()),
        ]
        rf.parallel(work)

    def insert_files(self, name: str, entries: list[software.Entry]) -> None:
        """Insert what the RECORD says, in parts that fit a call."""
        rows = [{"path": e.path, "sha256": e.digest, "size_bytes": e.size_bytes} for e in entries]
        for start in range(0, len(rows), ROWS_A_CALL):
            self.rf.sql.execute("inventory", INSERT_FILES, [name, rows[start : start + ROWS_A_CALL]])

    # -- clean ----------------------------------------------------------------------------------------------------

    def clean(self) -> None:
        """Prune rows that nothing vouches for, and remove caches whose sources are gone or others now."""
        self.wait_for("clean")
        pruned = self.rf.sql.execute("inventory", PRUNE).row_count
        stale = self.stale_caches()
        for folder in stale:
            self.rf.fs.delete(folder, recursive=True)
        for row in self.rf.sql.query("inventory", SHARED_BY_DISTRIBUTION):
            statement = "update distributions set shared = %s where name = %s"
            self.rf.sql.execute("inventory", statement, [row["shared"], row["distribution"]])
        cleaned = {"rows": pruned, "directories": len(stale)}
        self.rf.state.put("inventory/cleaned", cleaned)
        self.save(phase="report", cleaned=cleaned)

    def stale_caches(self) -> list[str]:
        """Cache directories in which nothing is current."""
        current: dict[str, bool] = {}
        for match in self.rf.fs.search("caches", glob="**/__pycache__/*.pyc"):
            folder = match.path.rpartition("/")[0]
            current[folder] = self.is_current(match.path) or current.get(folder, False)
        return sorted(folder for folder, fresh in current.items() if not fresh)

    def is_current(self, cache: str) -> bool:
        """Whether a compiled file still belongs to the source beside it."""
        try:
            source = self.rf.fs.stat(software.source_of(cache))
        except agent.NoSuchResource:
            return False
        mtime = int(source.modified_at.timestamp()) if source.modified_at else 0
        return software.cache_is_current(self.rf.fs.read_bytes(cache, limit=16), source.size_bytes, mtime)

    # -- report ---------------------------------------------------------------------------------------------------

    def write_report(self) -> None:
        """Write the report from the database, dress it with commands, and publish its sums once."""
        rf = self.rf
        rows = rf.sql.query("inventory", "select * from distributions order by name")
        shared = rf.sql.query("inventory", SHARED)
        rf.fs.write_text("out/report.md", software.report(rows, shared, self.state["cleaned"]))
        licences = "".join(f"{row['family']}\t{row['licence']}\t{row['name']}\n" for row in rows)
        rf.fs.write_text("out/licences.tsv", licences)
        rf.exec.run(["sort", "-o", "out/licences.tsv", "out/licences.tsv"], check=True)
        rf.exec.run(["chmod", "640", "out/report.md"], check=True)
        rf.exec.run(["mkdir", "-p", "out/archive/empty"], check=True)
        rf.exec.run(["ln", "-s", "report.md", "out/latest.md"], check=True)
        sums = rf.exec.run(["sha256sum", "out/report.md", "out/licences.tsv"], check=True).stdout
        rf.fs.write_text("out/SHA256SUMS", sums)
        rf.http.post(f"{self.job['desk']}/published", json={"sums": sums}).raise_for_status()
        self.save(phase="edges")

    # -- edges ----------------------------------------------------------------------------------------------------

    def touch_edges(self) -> None:
        """Try what it may not do, and write down what it can see of its surroundings."""
        rf = self.rf
        attempts: dict[str, Callable[[], Any]] = {
            "a call that no rule allows": lambda: rf.http.post(f"{self.job['desk']}/admin/rotate", json={}),
            "a file that a rule denies": lambda: rf.fs.read_text(".env"),
        }
        for what, attempt in attempts.items():
            try:
                attempt()
            except agent.Denied as denied:
                say(f"{what}: {denied.message}")
            else:
                say(f"{what}: it was let through")
        shown = rf.exec.run(["cat", ".env"])
        surroundings = {
            "cat .env": [shown.exit_code, shown.stdout, shown.stderr],
            "env": rf.exec.run(["env"]).stdout,
            "environment": {name: value for name, value in os.environ.items() if name != "RINGFENCE_TOKEN"},
            "program files": sorted(str(path) for path in Path().iterdir()),
        }
        rf.fs.write_text("out/surroundings.json", json.dumps(surroundings, indent=1, sort_keys=True))
        self.save(phase="pulse")

    # -- pulse ----------------------------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Write three files again and again, side by side, until it no longer may."""
        self.wait_for("pulse")
        beats = self.rf.parallel([functools.partial(self.beat, number) for number in range(PULSES)])
        self.save(next=sum(beats))
        say(f"written {sum(beats)} times, until it was refused")

    def beat(self, number: int) -> int:
        """One of the loops; gives how often it wrote."""
        count = 0
        while True:
            try:
                self.rf.fs.write_text(f"pulse/{number}.txt", f"{count}\n")
            except (agent.Denied, agent.Revoked) as refused:
                say(f"loop {number} is refused: {refused.message}")
                return count
            count += 1


def main() -> None:
    """Go on from the checkpoint, or begin."""
    job = json.load(sys.stdin)
    with agent.boot() as rf:
        state = rf.checkpoint.restored
        if state is None:  # after a restart only those calls may come that followed the save
            names = [entry.path.rpartition("/")[2] for entry in rf.fs.list("dists")]
            state = {"phase": "stock", "next": 0, "names": names}
        Inventory(rf, job, state).run()


if __name__ == "__main__":
    main()
