"""Between the scenes of harm: is the agent's own work right? Counted again by other code."""

from __future__ import annotations

import base64
import csv
import hashlib
import stat
from collections import Counter
from pathlib import Path

from ringfence.console.demo_world import World

_VERIFIED, _ALTERED, _MISSING, _FAMILY = 4, 5, 6, 3
"""Places of the columns in a row of `distributions`."""


def check_work(world: World) -> None:
    """Hold the agent's figures against a recount, and what its commands made against the files."""
    tell = world.tell
    tell.scene("The agent's report, and whether it is right")
    rows = [next(csv.reader([line[1:-1]])) for line in world.rows("distributions")]
    told = [sum(int(row[place]) for row in rows) for place in (_VERIFIED, _ALTERED, _MISSING)]
    counted = _recount(world)
    families = Counter(row[_FAMILY] for row in rows)
    tell.say("licences: " + ", ".join(f"{name} {number}" for name, number in sorted(families.items())))
    tell.fact(
        "the inventory is right",
        "every RECORD hash of every installed file computed a second time, by the demo itself",
        f"{told[0]:,} files as installed, {told[1]} altered, {told[2]} missing; "
        + ("the recount agrees" if told == counted else f"the recount says {counted}"),
        told == counted and len(rows) == len(world.input.names),
    )
    out = world.live / "out"
    sums = {line.split()[1]: line.split()[0] for line in (out / "SHA256SUMS").read_text("utf-8").splitlines()}
    right = [name for name, value in sums.items() if _sha256(world.live / name) == value]
    report = out / "report.md"
    mode = stat.S_IMODE(report.stat().st_mode)
    tell.figures["report"] = report.read_text(encoding="utf-8")
    tell.fact(
        "commands ran in its sandbox and changed its workspace",
        "`sort`, `chmod`, `mkdir`, `ln`, `sha256sum`: their sums, mode, link and directory looked up on disk",
        f"{len(right)} of {len(sums)} sums right, mode {mode:o}, link to {(out / 'latest.md').readlink()}",
        len(right) == len(sums) == 2  # noqa: PLR2004 - the two files it sums
        and mode == 0o640  # noqa: PLR2004 - what `chmod` was told
        and (out / "latest.md").readlink() == Path("report.md")
        and (out / "archive" / "empty").is_dir(),
    )


def _recount(world: World) -> list[int]:
    """Files that are as installed, altered, and missing."""
    verified = altered = missing = 0
    for name, place in world.input.places.items():
        record = (world.root / "workspace" / "dists" / name / "RECORD").read_text(encoding="utf-8")
        wanted = {line[0]: line[1] for line in csv.reader(record.splitlines()) if line and line[1]}
        for path, recorded in wanted.items():
            algorithm, _, value = recorded.partition("=")
            try:
                with Path(place, path).open("rb") as file:
                    found = hashlib.file_digest(file, algorithm).digest()
            except OSError:
                missing += 1
                continue
            same = base64.urlsafe_b64encode(found).rstrip(b"=").decode() == value
            verified, altered = verified + same, altered + (not same)
    return [verified, altered, missing]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
