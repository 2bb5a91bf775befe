"""Proposes old uploads for removal; a person says which go."""

from __future__ import annotations

import csv
import io

from ringfence import agent
from ringfence.agent import Denied

OLD_DAYS = 30

with agent.boot() as rf:
    rows = csv.DictReader(io.StringIO(rf.fs.read_text("ages.csv")))
    old = [(row["name"], int(row["days"])) for row in rows if int(row["days"]) > OLD_DAYS]
    answer = rf.ask(
        f"{len(old)} uploads are older than {OLD_DAYS} days. Go through them?",
        details=[{"name": name, "days": days} for name, days in old],
    )
    if not answer:
        print(f"left alone: {answer.answer}", flush=True)
        raise SystemExit
    for name, days in old:
        try:
            rf.fs.delete(
                f"uploads/{name}"
            )  # a rule asks about each: this call waits until a person has looked
        except Denied as denied:
            print(f"kept {name}: {denied}", flush=True)
        else:
            print(f"removed {name} ({days} days)", flush=True)
