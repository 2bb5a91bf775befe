"""A kernel whose agents have doors and no programs, for agents that are submitted one by one with manifests of their own.

As `bench.serve`, but it takes a kernel file, and tells each agent's door in `DATA/doors/ID.json`. Operators reach it as any
kernel; `Kill` closes the door.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import uvloop
from ringfence.kernel import main as kernel_main
from ringfence.kernel.config import Settings
from ringfence.kernel.descriptors import Descriptors
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.server.agent_door import AgentDoor, by_path
from ringfence.kernel.thread import Thread


class Doors:
    """Stands where `Processes` does."""

    def __init__(self, kernel: Kernel, told: Path) -> None:
        self._kernel, self._real, self._told = kernel, kernel.processes, told
        self._descriptors = Descriptors()
        self._doors: dict[int, AgentDoor] = {}

    async def start(self, thread: Thread) -> None:
        """Open the door of one agent and tell where it is."""
        token = thread.new_token()
        door = AgentDoor(thread, Dispatcher(self._kernel.core), _never, self._descriptors)
        directory = self._kernel.layout.socket_dir(thread.key)
        await door.open(directory, by_path(self._kernel.core.table), None)
        self._doors[int(thread.key)] = door
        thread.state = "running"
        target = {"socket": str(directory / "syscall.sock"), "token": token}
        (self._told / f"{thread.id}.json").write_text(json.dumps(target))

    async def kill(self, thread: Thread) -> None:
        """End the agent, and close its door."""
        await self._real.kill(thread)
        door = self._doors.pop(int(thread.key), None)
        if door is not None:
            await door.close()

    async def stop_all(self) -> None:
        """Close all doors."""
        for door in self._doors.values():
            await door.close()
        await self._real.stop_all()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def _never(_thread: Thread, why: object) -> None:
    print(f"parked: {why}", file=sys.stderr)


async def serve(data: Path, config: Path) -> None:
    """Run until standard input ends."""
    settings = Settings(data=data, config=config)
    layout = kernel_main.prepare(settings)
    told = data / "doors"
    told.mkdir(exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        kernel, _ = await kernel_main.compose(settings, layout, stack)
        kernel.processes = Doors(kernel, told)  # type: ignore[assignment]
        listen = f"unix:{layout.operator_socket}"
        print(json.dumps({"listen": listen, "doors": str(told)}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attacks.kernel", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.data, options.config))


if __name__ == "__main__":
    main()
