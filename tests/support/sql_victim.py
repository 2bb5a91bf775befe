"""Makes calls of `sql.write`, and rollbacks, in processes that are killed meanwhile: reads jobs from its input, forks for each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.syscalls import sql_write
from ringfence.syscalls.sql_target.restore import plan_restore, restore
from support.targets import Database


async def _work(job: dict[str, Any]) -> None:
    database = Database(job["dsn"], SnapshotStore(Path(job["store"])))
    if job["what"] == "restore":
        records = [database.store.require(point).extra for point in job["points"]]
        plan = await plan_restore(database.resource, records)
        _die_after(job["after_s"])
        await restore(database.resource, plan)
        return
    database.step = job["step"] - 1

    def look(name: str) -> None:
        if name == job["at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    call, arguments = database.prepare_write(job["statement"], on_failpoint=look)
    _die_after(job["after_s"])
    await sql_write.run(call, arguments)


def _die_after(seconds: float) -> None:
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """One line with a job a line of input; says how each ended."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(Exception):
                asyncio.run(_work(json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else "ended", flush=True)


if __name__ == "__main__":
    main()
