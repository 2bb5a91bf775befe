"""Adds up a year of sales month by month; killed at any moment, it goes on with the month it had reached."""

from __future__ import annotations

import csv
import io
from decimal import Decimal

from ringfence import agent


def totals(text: str) -> dict[str, Decimal]:
    """Turnover of each product in one month's file."""
    found: dict[str, Decimal] = {}
    for row in csv.DictReader(io.StringIO(text)):
        amount = int(row["quantity"]) * Decimal(row["price"])
        found[row["product"]] = found.get(row["product"], Decimal(0)) + amount
    return found


with agent.boot() as rf:
    state = rf.checkpoint.restored
    if state is None:  # a restart comes back to what followed the save, so the listing is made once and kept
        months = sorted(entry.path for entry in rf.fs.list("sales"))
        state = {"months": months, "next": 0, "year": {}}
        rf.fs.write_text("out/report.md", "# Sales\n\n| month | best product | turnover |\n|---|---|---|\n")
        rf.checkpoint.save(state)

    for number in range(state["next"], len(state["months"])):
        path = state["months"][number]
        month = totals(rf.fs.read_text(path))
        best = max(month, key=lambda product: month[product])
        turnover = sum(month.values(), Decimal(0))
        rf.fs.append_text("out/report.md", f"| {path[-11:-4]} | {best} | {turnover} |\n")
        year = {p: str(Decimal(state["year"].get(p, "0")) + amount) for p, amount in month.items()}
        state = {**state, "next": number + 1, "year": {**state["year"], **year}}
        rf.checkpoint.save(state)
        print(f"{path}: {turnover}", flush=True)

    whole = sum((Decimal(amount) for amount in state["year"].values()), Decimal(0))
    rf.fs.append_text("out/report.md", f"\nThe year: {whole}\n")
