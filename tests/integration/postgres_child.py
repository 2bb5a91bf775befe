"""Runs an embedded server in a process of its own: says how that went, then waits for a line and stops it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from ringfence.kernel.postgres import EmbeddedPostgres, PostgresError


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def main(data_dir: str) -> None:
    postgres = EmbeddedPostgres(Path(data_dir))
    try:
        dsn = await postgres.start()
    except PostgresError as error:
        say(error=str(error))
        return
    say(dsn=dsn, pid=postgres.pid, version=postgres.version)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await postgres.stop()
    say(stopped=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
