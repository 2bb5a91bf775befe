"""Sandboxes: how fast they start, what they take of memory, and the same of others, measured in the same minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from bench.host import Bench, serving
from bench.report import Section
from bench.sandbox import engine
from bench.sandbox.fleet import OTHERS, Fleet
from bench.sandbox.place import place
from bench.sandbox.starts import Starts

WAYS = 4
"""Programs that call in each turn: warm, cold, bare, bubblewrap."""


def measure(bench: Bench) -> Section:
    """Starts by turns, then fleets, then containers, on one kernel with a door for every program that calls."""
    section = Section(name="sandbox", title="starting sandboxed programs, and fleets of them; others beside")
    home = bench.directory("kernel")
    live = 40 if bench.quick else 200
    doors = WAYS * (8 if bench.quick else 30) + live + 2 * OTHERS
    bench.say(f"starting a kernel with {doors} doors")
    options = ("--data", str(home / "k"), "--agents", str(doors))
    with serving("bench.serve", *options, log=home / "serve.log") as (_, told):
        asyncio.run(_measure(bench, section, told["targets"]))
    return section


async def _measure(bench: Bench, section: Section, targets: Sequence[Mapping[str, Any]]) -> None:
    async with place(bench, targets) as found:
        starts = Starts(bench, found)
        await starts.measure()
        fleet = Fleet(bench, found)
        await fleet.measure()
        rows, more, notes = await engine.measure(bench, found)
    columns = ("what", "ms", "p99 ms", "MB each", "beside", "its ms", "its MB", "ratio")
    section.rows = [
        {column: line.get(column) for column in columns} for line in (*starts.rows, *rows, *fleet.rows)
    ]
    section.targets = [*starts.targets, *fleet.targets, *more]
    section.checks = starts.checks
    section.notes = [
        *starts.notes,
        *notes,
        "the first call goes through the door of a kernel with its policy, journal and PostgreSQL; medians of starts by turns",
        "MB: proportional share (PSS) of the programs, their first processes, and all processes that make and watch them",
    ]
