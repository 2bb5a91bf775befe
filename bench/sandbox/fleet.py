"""Many sandboxes at once: what each takes of memory, and how fast all of them start, freeze and go."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.host import Bench, BenchError
from bench.report import Target
from bench.sandbox import others

if TYPE_CHECKING:
    from bench.sandbox.place import Place, Started

AT_ONCE = 16
OTHERS = 20
AGENT_MB = 15.0
IDLE_S_FOR_1000 = 8.0


def row(
    what: str, *, ms: float | None = None, mb: float | None = None, beside: str = "", its: float | None = None
) -> dict[str, Any]:
    """One line of the table of many."""
    return {
        "what": what,
        "ms": ms,
        "MB each": mb,
        "beside": beside,
        "its MB": its,
        "ratio": mb / its if mb and its else None,
    }


def below(root: int) -> list[int]:
    """A process and all that come from it."""
    above: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                above[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in above.items() if parent == pid]
    return found


def pss_bytes(pids: Sequence[int]) -> int:
    """Their part of memory: a page that several share counts for each of them by its share."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


class Fleet:
    """Live agents with the library, then idle ones."""

    def __init__(self, bench: Bench, place: Place) -> None:
        self._bench = bench
        self._place = place
        self.live = 40 if bench.quick else 200
        self.idle = 200 if bench.quick else 1000
        self.rows: list[dict[str, Any]] = []
        self.targets: list[Target] = []

    async def measure(self) -> None:
        """Fill rows and targets."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            await self._live()
            await self._idle()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    async def _all(self, count: int, argv: Sequence[str], word: str, *, called: bool) -> list[Started]:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Started:
            async with limit:
                door = next(self._place.doors) if called else None
                started = await self._place.start(argv, door, number=number)
                line = (await started.line()).strip()
                if line != word:
                    raise BenchError(f"a sandboxed program said {line[-300:]!r}")
                return started

        return list(await asyncio.gather(*(one(number) for number in range(count))))

    async def _live(self) -> None:
        """Every one has called, holds its connection, and waits."""
        self._bench.say(f"{self.live} live agents")
        began = time.perf_counter()
        agents = await self._all(self.live, ["python", "connected.py"], "answered", called=True)
        taken = time.perf_counter() - began
        each = pss_bytes(below(self._place.sandbox.warden_pid)) / len(agents) / 1e6
        await asyncio.gather(*(agent.kill() for agent in agents))
        what = f"{self.live} live agents, library connected"
        bare = await asyncio.to_thread(self._others, others.bare, others.interpreter())
        self.rows.append(row(what, ms=taken * 1e3, mb=each, beside=f"{OTHERS} bare python3", its=bare))
        if others.bubblewrap():
            boxed = await asyncio.to_thread(self._others, others.boxed, "python")
            self.rows.append(row(what, ms=taken * 1e3, mb=each, beside=f"{OTHERS} in bubblewrap", its=boxed))
        self.targets.append(
            Target(
                name=f"{self.live} live agents, MB each with all helpers",
                got=each,
                wanted=AGENT_MB,
                at_least=False,
            )
        )

    def _others(self, start: Callable[..., subprocess.Popen[bytes]], interpreter: str) -> float:
        """MB each of others with the library connected."""
        running: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(OTHERS):
                process = start(self._place, [interpreter, "connected.py"], next(self._place.doors))
                running.append(process)
            for process in running:
                assert process.stdout is not None
                line = process.stdout.readline().decode(errors="replace").strip()
                if line != "answered":
                    raise BenchError(f"a program said {line[-300:]!r}")
            return sum(pss_bytes(below(process.pid)) for process in running) / OTHERS / 1e6
        finally:
            for process in running:
                process.kill()
                process.communicate()

    async def _idle(self) -> None:
        """Every one runs and has said a word."""
        self._bench.say(f"{self.idle} idle agents")
        began = time.perf_counter()
        agents = await self._all(self.idle, ["python", "idle.py"], "ready", called=False)
        started = time.perf_counter() - began
        each = pss_bytes(below(self._place.sandbox.warden_pid)) / len(agents) / 1e6
        self.rows.append(row(f"{self.idle} idle agents, started", ms=started * 1e3, mb=each))
        for what, orders in (
            ("frozen", [agent.program.pause for agent in agents]),
            ("thawed", [agent.program.resume for agent in agents]),
            ("killed", [agent.kill for agent in agents]),
        ):
            began = time.perf_counter()
            await asyncio.gather(*(order() for order in orders))
            taken = time.perf_counter() - began
            self.rows.append(row(f"{self.idle} idle agents, {what}", ms=taken * 1e3))
        wanted = IDLE_S_FOR_1000 * self.idle / 1000
        self.targets.append(
            Target(name=f"{self.idle} idle agents started, s", got=started, wanted=wanted, at_least=False)
        )
