"""A kernel whose agents have doors and no programs: what the lean generator drives.

Everything on the path of a call is the real thing: the embedded PostgreSQL, journal, policy, budgets, workspace, one gRPC
server and socket per agent. Only the sandboxed program is left out, for the generator takes its place. Prints one JSON line
with the targets, then serves until standard input is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import uvloop
from ringfence.kernel import main as kernel_main
from ringfence.kernel.config import Settings
from ringfence.kernel.descriptors import Descriptors
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.operations import submit
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.server.agent_door import AgentDoor, by_path
from ringfence.kernel.thread import Thread
from ringfence.v1 import operator_pb2 as pb

TOGETHER = 8
"""Agents submitted at a time."""

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: bench}
spec:
  run: {command: [bench]}
  permissions:
    allow:
      - fs.read: "/workspace/**"
      - fs.list: "/workspace/**"
      - fs.write: "/workspace/out/**"
      - fs.delete: "/workspace/out/**"
      - state.*: "bench/**"
      - exec.run: "git *"
    deny:
      - fs.*: "**/.env"
      - fs.*: "**/.ssh/**"
  budgets: {total: {calls: 100000000}}
"""


class Doors:
    """Stands where `Processes` does: opens doors instead of starting programs."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._real = kernel.processes
        self._descriptors = Descriptors()
        self.targets: list[dict[str, str]] = []

    async def start(self, thread: Thread) -> None:
        """Open the door of one agent and keep its token."""
        token = thread.new_token()
        door = AgentDoor(thread, Dispatcher(self._kernel.core), _never, self._descriptors)
        directory = self._kernel.layout.socket_dir(thread.key)
        await door.open(directory, by_path(self._kernel.core.table), None)
        thread.state = "running"
        socket = str(directory / "syscall.sock")
        self.targets.append({"socket": socket, "token": token, "chain": str(thread.key)})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def _never(_thread: Thread, why: str) -> None:
    print(f"parked: {why}", file=sys.stderr)


async def frames(tar: bytes) -> Any:
    """A submission."""
    yield pb.SubmitRequest(header=pb.SubmitHeader(manifest=MANIFEST, source="bench.yaml"))
    yield pb.SubmitRequest(workspace=tar)


def workspace() -> bytes:
    """One small file to read."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("bench.txt")
        info.size = 512
        tar.addfile(info, io.BytesIO(b"x" * 512))
    return out.getvalue()


async def serve(data: Path, agents: int, dsn: str | None) -> None:
    """Run until standard input ends."""
    settings = Settings(data=data, dsn=dsn)
    layout = kernel_main.prepare(settings)
    async with contextlib.AsyncExitStack() as stack:
        kernel, _ = await kernel_main.compose(settings, layout, stack)
        doors = Doors(kernel)
        real, kernel.processes = kernel.processes, doors  # type: ignore[assignment]
        tar = workspace()
        for first in range(0, agents, TOGETHER):
            many = range(min(TOGETHER, agents - first))
            await asyncio.gather(*(submit.submit(kernel, frames(tar), "bench") for _ in many))
        kernel.processes = real
        kernel_dsn = dsn or kernel.embedded_dsn
        print(json.dumps({"targets": doors.targets, "dsn": kernel_dsn, "pid": os.getpid()}), flush=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--dsn")
    parser.add_argument("--profile", type=Path, help="write a cProfile here")
    options = parser.parse_args()
    work = serve(options.data, options.agents, options.dsn)
    if options.profile is not None:
        profile = cProfile.Profile()
        profile.runcall(uvloop.run, work)
        profile.dump_stats(options.profile)
        return
    uvloop.run(work)


if __name__ == "__main__":
    main()
