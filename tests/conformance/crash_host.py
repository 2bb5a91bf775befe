"""A process that forks kernels which die at a chosen point, and others that sweep after them.

    crash_host.py MODE DATA

Orders and answers are those of `backend_host.py`, one at a time. Each order is done by a fork with a backend of its own, so
that nothing is left of one kernel in the next but what is on the host.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends import KINDS
from points import Points, die, die_with_helpers
from ringfence.sandbox.types import CommandSpec, Limits, ProgramSpec

LINGER_S = 60


class Kernel:
    """One short life."""

    def __init__(self, mode: str, data: Path, points: Points, die: Callable[[], None]) -> None:
        self.box = KINDS[mode].make(data)
        self.points = points
        self.die = die

    async def start(self, at: int, spec: dict[str, Any]) -> None:
        """Die while a program starts, or at once when it runs."""
        self.points.arm(at, self.die)
        await self.program(spec)

    async def stay(self, at: int, spec: dict[str, Any]) -> None:
        """Start a program and live on."""
        await self.start(at, spec)
        await asyncio.sleep(LINGER_S)

    async def program(self, spec: dict[str, Any]) -> Any:
        sink = os.open(os.devnull, os.O_WRONLY)
        try:
            return await self.box.start(ProgramSpec(**typed(spec), stdout_fd=sink, stderr_fd=sink))
        finally:
            os.close(sink)

    async def kill(self, at: int, spec: dict[str, Any]) -> None:
        """Die while a program is killed."""
        program = await self.program(spec)
        self.points.arm(at, self.die)
        await program.kill()
        await program.wait()

    async def pause(self, at: int, spec: dict[str, Any]) -> None:
        """Die while a program is paused, resumed, paused again."""
        program = await self.program(spec)
        self.points.arm(at, self.die)
        await program.pause()
        await program.resume()
        await program.pause()

    async def end(self, at: int, spec: dict[str, Any]) -> None:
        """Die while a program ends by itself."""
        program = await self.program(spec)
        self.points.arm(at, self.die)
        await program.wait()

    async def command(self, at: int, spec: dict[str, Any]) -> None:
        """Die while a command runs."""
        self.points.arm(at, self.die)
        await self.box.run_command(CommandSpec(**typed(spec)))

    async def sweep(self, at: int, spec: dict[str, Any]) -> list[str]:
        """Die while sweeping up after another."""
        del spec
        self.points.arm(at, self.die)
        return list(await self.box.sweep())


def typed(spec: dict[str, Any]) -> dict[str, Any]:
    paths = {name: Path(spec[name]) for name in ("image", "socket_dir", "lower", "scratch") if name in spec}
    shown = [Path(path) for path in spec.get("readonly", ())]
    return {**spec, **paths, "readonly": shown, "limits": Limits(**spec.get("limits", {}))}


def live(
    mode: str,
    data: Path,
    points: Points,
    op: str,
    at: int,
    spec: dict[str, Any],
    alone: bool = True,
    after_ms: float = 0,
) -> dict[str, Any]:
    """One life in a fork: whether it was cut short, how many points it had, and its result or error.

    Not `alone`, whatever the kernel started for itself dies in the same moment. With `after_ms` that moment is one of the
    clock, so that helpers are in the middle of what they do.
    """
    end = die if alone else die_with_helpers
    source, target = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(source)
        try:
            kernel = Kernel(mode, data, points, end)
            if after_ms:
                threading.Timer(after_ms / 1000, end).start()
            result = asyncio.run(asyncio.wait_for(getattr(kernel, op)(at, spec), LINGER_S))
            said = {"points": points.reached, "result": result}
        except Exception as error:  # noqa: BLE001 - the test decides what it means
            said = {"points": points.reached, "error": f"{type(error).__name__}: {error}"}
        points.disarm()
        os.write(target, json.dumps(said).encode())
        die()
    os.close(target)
    os.waitpid(pid, 0)
    os.set_blocking(source, False)
    try:
        text = os.read(source, 1 << 16)
    except BlockingIOError:
        text = b""  # something of the sandbox holds the other end still
    os.close(source)
    return {"cut": not text, **(json.loads(text) if text else {})}


def main(mode: str, data: Path) -> None:
    points = Points(audit=True)
    KINDS[mode].make(data)
    for line in sys.stdin:
        order = json.loads(line)
        reply: dict[str, Any] = {"id": order["id"]}
        try:
            reply["result"] = live(mode, data, points, **order["arguments"])
        except Exception as error:  # noqa: BLE001 - the test decides what it means
            reply["error"], reply["kind"] = str(error), type(error).__name__
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
