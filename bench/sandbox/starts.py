"""How long a program takes to start: in our sandbox, bare, and in others; by turns, so that a busy moment hits all."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.host import Bench, BenchError, median, rank
from bench.report import Target
from bench.sandbox import others

if TYPE_CHECKING:
    from bench.sandbox.place import Door, Place

WARM_ANSWER_MS = 8.0
OF_BUBBLEWRAP = 1 / 3
CALM_S = 0.1
"""Longer than the warden waits before it makes a spare, so that one is ready."""


def row(what: str, spent: list[float], beside: str = "", its: list[float] | None = None) -> dict[str, Any]:
    """One line of the table; seconds become milliseconds."""
    other = median(its or []) * 1e3
    return {
        "what": what,
        "ms": median(spent) * 1e3,
        "p99 ms": rank(spent, 0.99) * 1e3,
        "beside": beside,
        "its ms": other or None,
        "ratio": median(spent) * 1e3 / other if other else None,
    }


class Starts:
    """All of them."""

    def __init__(self, bench: Bench, place: Place) -> None:
        self._bench = bench
        self._place = place
        self.times = 8 if bench.quick else 30
        self._python = others.interpreter()
        self.rows: list[dict[str, Any]] = []
        self.targets: list[Target] = []
        self.checks: dict[str, bool] = {}
        self.notes: list[str] = []

    async def measure(self) -> None:
        """Fill rows, targets, checks and notes."""
        self._bench.say("the first one")
        began = time.perf_counter()
        await self._until(["python", "first.py"], ["warm", "cold"])
        self.rows.append(row("the very first, with the zygote's own start", [time.perf_counter() - began]))
        await self._answers()
        await self._lines()
        await self._commands()
        await self._peers()

    async def _until(
        self, argv: Sequence[str], expected: Sequence[str], door: Door | None = None
    ) -> tuple[float, str]:
        began = time.perf_counter()
        started = await self._place.start(argv, door)
        line = (await started.line()).strip()
        taken = time.perf_counter() - began
        await started.kill()
        if line not in expected:
            raise BenchError(f"the sandboxed `{' '.join(argv)}` said {line[-300:]!r}")
        return taken, line

    async def _by_turns(
        self, what: str, ways: Mapping[str, Callable[[], Awaitable[float]]]
    ) -> dict[str, list[float]]:
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.times):
            self._bench.say(f"{what}, {turn + 1} of {self.times}")
            for name, way in ways.items():
                spent[name].append(await way())
        return spent

    async def _answers(self) -> None:
        """Through a door of a real kernel: policy, journal, commit and reply are in it."""
        place = self._place

        async def ours() -> float:
            return (await self._until(["python", "answered.py"], ["answered"], next(place.doors)))[0]

        async def calm() -> float:
            await asyncio.sleep(CALM_S)
            return await ours()

        async def cold() -> float:
            argv = ["python", "-W", "default", "answered.py"]  # an option of its own: it has to be executed
            return (await self._until(argv, ["answered"], next(place.doors)))[0]

        async def bare() -> float:
            return await self._line(
                others.bare, [self._python, "answered.py"], ["answered"], next(place.doors)
            )

        async def boxed() -> float:
            return await self._line(others.boxed, ["python", "answered.py"], ["answered"], next(place.doors))

        ways = {"warm": calm, "at once": ours, "cold": cold, "bare": bare} | (
            {"boxed": boxed} if others.bubblewrap() else {}
        )
        spent = await self._by_turns("the first call answered", ways)
        what = "warm start to the first call answered, a spare ready"
        self.rows.append(row(what, spent["warm"], "bare python3", spent["bare"]))
        if "boxed" in spent:
            self.rows.append(row(what, spent["warm"], "bubblewrap, python3", spent["boxed"]))
        self.rows.append(
            row(
                "warm start to the first call answered, at once",
                spent["at once"],
                "bare python3",
                spent["bare"],
            )
        )
        self.rows.append(
            row("cold start to the first call answered", spent["cold"], "bare python3", spent["bare"])
        )
        warm = median(spent["warm"])
        self.targets.append(
            Target(
                name="warm start to the first call answered, ms",
                got=warm * 1e3,
                wanted=WARM_ANSWER_MS,
                at_least=False,
            )
        )
        if "boxed" in spent:
            part = warm / median(spent["boxed"])
            self.targets.append(
                Target(name="the same, part of bubblewrap's", got=part, wanted=OF_BUBBLEWRAP, at_least=False)
            )
        else:
            self.notes.append("bubblewrap: not installed")

    async def _lines(self) -> None:
        """Until the first line of Python, and until the library is there."""
        warm: list[str] = []
        for what, script, expected in (
            ("the first line of Python", "first.py", ("warm", "cold")),
            ("the library imported", "library.py", ("ready",)),
        ):

            async def ours(script: str = script, expected: Sequence[str] = expected) -> float:
                taken, line = await self._until(["python", script], expected)
                warm.append(line)
                return taken

            async def bare(script: str = script, expected: Sequence[str] = expected) -> float:
                return await self._line(others.bare, [self._python, script], expected)

            async def boxed(script: str = script, expected: Sequence[str] = expected) -> float:
                return await self._line(others.boxed, ["python", script], expected)

            ways = {"ours": ours, "bare": bare} | ({"boxed": boxed} if others.bubblewrap() else {})
            spent = await self._by_turns(what, ways)
            self.rows.append(row(f"warm, {what}", spent["ours"], "bare python3", spent["bare"]))
            if "boxed" in spent:
                self.rows.append(row(f"warm, {what}", spent["ours"], "bubblewrap, python3", spent["boxed"]))
        self.checks["every Python was forked from a warm interpreter"] = "cold" not in warm

    async def _line(
        self,
        start: Callable[..., subprocess.Popen[bytes]],
        argv: Sequence[str],
        expected: Sequence[str],
        door: Door | None = None,
    ) -> float:
        return await asyncio.to_thread(
            others.seconds_to_line, lambda: start(self._place, argv, door), expected
        )

    async def _commands(self) -> None:
        """Programs that are not Python, and commands of exec.run with their overlay."""
        place = self._place

        async def ours() -> float:
            return (await self._until(["/bin/echo", "ready"], ["ready"]))[0]

        async def command() -> float:
            began = time.perf_counter()
            await place.command(["/bin/true"])
            return time.perf_counter() - began

        async def bare() -> float:
            return await self._line(others.bare, ["/bin/echo", "ready"], ["ready"])

        async def boxed() -> float:
            return await self._line(others.boxed, ["/bin/echo", "ready"], ["ready"])

        async def bare_command() -> float:
            return await asyncio.to_thread(others.seconds_to_end, lambda: others.bare(place, ["/bin/true"]))

        ways = {"ours": ours, "command": command, "bare": bare, "bare command": bare_command}
        ways |= {"boxed": boxed} if others.bubblewrap() else {}
        spent = await self._by_turns("programs that are executed", ways)
        self.rows.append(row("`echo`, executed, its first line", spent["ours"], "bare", spent["bare"]))
        if "boxed" in spent:
            self.rows.append(
                row("`echo`, executed, its first line", spent["ours"], "bubblewrap", spent["boxed"])
            )
        self.rows.append(
            row("`true` as a command, on its overlay", spent["command"], "bare", spent["bare command"])
        )

    async def _peers(self) -> None:
        """They hand out no stream: what is compared is a whole run."""

        async def ours() -> float:
            began = time.perf_counter()
            started = await self._place.start(["python", "first.py"])
            await started.program.wait()
            started.close()
            return time.perf_counter() - began

        ways: dict[str, Callable[[], Awaitable[float]]] = {"ours": ours}
        for name, (package, module, run) in others.PEERS.items():
            if not others.version(package, module):
                self.notes.append(f"{name} (PyPI `{package}`): not installed")
                continue

            async def peer(run: Callable[..., float] = run) -> float:
                path = str(self._place.image / "first.py")
                return await asyncio.to_thread(run, self._place, [self._python, path])

            ways[name] = peer
        if len(ways) == 1:
            return
        spent = await self._by_turns("other sandboxes", ways)
        for name in list(ways)[1:]:
            package, module, _ = others.PEERS[name]
            beside = f"{name} {others.version(package, module)}"
            self.rows.append(row("one print, from start to end", spent["ours"], beside, spent[name]))
