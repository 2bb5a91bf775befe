"""Sandboxes: how fast they start, what they take of memory, and the same of others, measured in the same minutes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterator

from bench.host import Bench, serving
from bench.report import Section
from bench.sandbox import engine
from bench.sandbox.fleet import OTHERS, Fleet
from bench.sandbox.place import Door, doors, place
from bench.sandbox.starts import Starts

WAYS = 5
"""Programs that call in each turn: warm, warm once more at once, cold, bare, bubblewrap."""


def measure(bench: Bench) -> Section:
    """Starts by turns, then containers, then fleets; a door of a real kernel for every program that calls."""
    section = Section(name="sandbox", title="starting sandboxed programs, and fleets of them; others beside")
    asyncio.run(_measure(bench, section))
    return section


async def _measure(bench: Bench, section: Section) -> None:
    async with place(bench) as found:
        starts, fleet = Starts(bench, found), Fleet(bench, found)
        with _kernel(bench, WAYS * starts.times) as found.doors:
            await starts.measure()
        rows, more, notes = await engine.measure(bench, found)
        with _kernel(bench, fleet.live + 2 * OTHERS) as found.doors:
            await fleet.measure()
    columns = ("what", "ms", "p99 ms", "MB each", "beside", "its ms", "its MB", "ratio")
    section.rows = [
        {column: line.get(column) for column in columns} for line in (*starts.rows, *rows, *fleet.rows)
    ]
    section.targets = [*starts.targets, *fleet.targets, *more]
    section.checks = starts.checks
    section.notes = [
        *starts.notes,
        *notes,
        "a spare ready: nothing was started for a tenth of a second, as when a person starts an agent; at once: nothing waits ahead",
        "the first call goes through the door of a kernel with its policy, journal and PostgreSQL; medians of starts by turns",
        "MB: proportional share (PSS) of the programs, their first processes, and all processes that make and watch them",
    ]


@contextlib.contextmanager
def _kernel(bench: Bench, count: int) -> Generator[Iterator[Door]]:
    """A kernel with that many doors; each takes up some of the files that it may open, so there is one at a time."""
    bench.say(f"starting a kernel with {count} doors")
    home = bench.directory("kernel")
    options = ("--data", str(home / "k"), "--agents", str(count))
    with serving("bench.serve", *options, log=home / "serve.log") as (_, told):
        yield doors(told["targets"])
