"""Workflows of DBOS that do what the agents of a measurement do. Runs in the peers' own interpreter and imports nothing of ours."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import sys
import threading
import time
from typing import Any

from dbos import DBOS, SetWorkflowID

heard: list[str] = []
come = threading.Event()


def note(number: int) -> dict[str, Any]:
    """What a step brings: 400 characters that no packing makes much shorter."""
    return {"role": "tool", "page": number, "text": hashlib.shake_256(b"%d" % number).hexdigest(200)}


def say(**what: Any) -> None:
    """One line for the measurement."""
    print(json.dumps(what), flush=True)


@DBOS.step()
def work(number: int) -> dict[str, Any]:
    """One step."""
    return note(number)


@DBOS.workflow()
def steps(behind: int, count: int) -> float:
    """Some steps, a word, and the steps that are measured."""
    for number in range(behind):
        work(number)
    say(ready=True)
    sys.stdin.readline()
    began, took = time.perf_counter(), list[float]()
    for number in range(count):
        before = time.perf_counter()
        work(behind + number)
        took.append(time.perf_counter() - before)
    say(seconds=time.perf_counter() - began, p50_ms=sorted(took)[len(took) // 2] * 1e3)
    return 0.0


@DBOS.step()
async def work_async(number: int) -> dict[str, Any]:
    """One step."""
    return note(number)


@DBOS.workflow()
async def worker(behind: int, gate: float) -> None:
    """Some steps at once, one after a moment that the measurement chose, then nothing."""
    for number in range(behind):
        await work_async(number)
    while time.time() < gate:
        await asyncio.sleep(0.5)
    await work_async(behind)
    await asyncio.sleep(3600)


@DBOS.workflow()
async def sleeper(group: str, until: float) -> None:
    """A step, a durable sleep, a step; the group is a part of its id."""
    del group
    await work_async(0)
    await DBOS.sleep_async(max(0.0, until - time.time()))
    await work_async(1)


async def started(which: Any, count: int, *values: Any) -> None:
    """Start many workflows of one kind."""
    for number in range(count):
        with SetWorkflowID(f"{which.__name__}-{values[0]}-{number}"):
            await DBOS.start_workflow_async(which, *values)


def main() -> None:
    """Parse the command line and do as it says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["steps", "workers", "recover", "sleepers"])
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--behind", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--gate", type=float, default=0.0)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    DBOS(config={"name": "bench", "system_database_url": options.dsn, "run_admin_server": False})
    DBOS.launch()
    if options.mode == "steps":
        steps(options.behind, options.count)
    elif options.mode == "workers":
        asyncio.run(forever(started(worker, options.count, options.behind, options.gate)))
    elif options.mode == "sleepers":
        asyncio.run(sleepers(options.count))
    else:
        say(ready=True)
    sys.stdin.readline()
    DBOS.destroy()


async def sleepers(count: int) -> None:
    """Start many that sleep for long; then, as often as told, more that wake together: a line names how many and when."""
    await started(sleeper, count, "long", time.time() + 36_000)
    say(ready=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        more, until = line.split()
        await started(sleeper, int(more), f"till-{until}", float(until))
        say(ready=True)


async def forever(first: Any) -> None:
    """Start them, say so, and let them work until standard input ends."""
    await first
    say(ready=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


if __name__ == "__main__":
    main()
