"""The kernel's side of one sandbox: talks with its launcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from ringfence.sandbox.native import identity
from ringfence.sandbox.native.cgroups import Groups
from ringfence.sandbox.native.child import Child
from ringfence.sandbox.native.job import HEADER_BYTES, Job
from ringfence.sandbox.native.supervisor import KILL, PAUSE, RESUME
from ringfence.sandbox.types import Exit, ExitReason, SandboxError, SandboxLostError

_SOURCE = Path(__file__).parents[3]
_ENTRY = "import sys; sys.path.insert(0, sys.argv[1]); from ringfence.sandbox.native import launcher; launcher.{}()"
_DEATH_S = 30.0
_PATIENCE_S = 10.0
_TEXT_BYTES = 65536


def launcher_command(entry: str, label: str) -> list[str]:
    """Command line of a launcher: the kernel's own interpreter, without site packages and without its environment."""
    return [sys.executable, "-I", "-S", "-X", "utf8", "-c", _ENTRY.format(entry), str(_SOURCE), label]


class NativeProgram:
    """A sandbox that has started, or is being started.

    Attributes:
        name: names its record and control groups.
    """

    def __init__(self, name: str, records: Path, launcher: Child) -> None:
        self.name = name
        self.written: list[int] = []
        self._records = records
        self._launcher = launcher
        self._started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._last: dict[str, Any] = {}
        self._answers: dict[str, list[asyncio.Future[str]]] = {"paused": [], "resumed": []}
        self._follower = asyncio.create_task(self._follow(), name=f"sandbox {name}")

    @classmethod
    async def launch(cls, job: Job, stdin: bytes, descriptors: tuple[int, ...] = ()) -> NativeProgram:
        """Start a launcher, give it the job, and wait until the program runs.

        Raises:
            SandboxError: it was refused; nothing runs.
            SandboxLostError: its launcher died before the program ran.
        """
        launcher = await Child.start(launcher_command("main", f"ringfence-{job['name']}"), descriptors)
        program = cls(job["name"], Path(job["records"]), launcher)
        text = json.dumps(job).encode()
        try:
            program._write(len(text).to_bytes(HEADER_BYTES, "big") + text + stdin)
            await program._started
        except BaseException:
            await asyncio.shield(asyncio.create_task(program.kill()))
            raise
        return program

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call back once nothing of the sandbox is left."""
        self._follower.add_done_callback(lambda _: callback())

    @property
    def identity(self) -> Mapping[str, str | int]:
        """`{"pid": …}`: the first process of the pid namespace, as the host sees it; empty before it runs."""
        runs = self._started.done() and not self._started.exception()
        return {"pid": self._started.result()} if runs else {}

    async def wait(self) -> Exit:
        """Wait for the end of the whole tree.

        Raises:
            SandboxError: nothing ever ran.
        """
        await asyncio.shield(self._follower)
        if not self._last:
            return Exit(reason=ExitReason.KILLED, code=-9)
        if self._last["event"] == "refused":
            raise SandboxError(self._last["message"])
        self.written = self._last["written"]
        return Exit(reason=ExitReason(self._last["reason"]), code=self._last["code"])

    async def kill(self) -> None:
        """End the whole tree, frozen or not; returns when nothing of it is left."""
        self._write(KILL)
        done, _ = await asyncio.wait([self._follower], timeout=_PATIENCE_S)
        if not done:
            # The launcher itself hangs or was stopped by someone: its end is the end of the tree.
            self._launcher.kill()
            await asyncio.wait([self._follower])

    async def pause(self) -> None:
        """Freeze every process of the tree.

        Raises:
            SandboxError: a process can't be frozen; it runs on.
        """
        await self._order(PAUSE, "paused")

    async def resume(self) -> None:
        """Thaw it.

        Raises:
            SandboxError: the host refuses.
        """
        await self._order(RESUME, "resumed")

    async def _order(self, order: bytes, answer: str) -> None:
        if self._follower.done():
            return
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[answer].append(future)
        self._write(order)
        if problem := await future:
            raise SandboxError(f"the sandbox can't be {answer}: {problem}; kill it instead")

    def _write(self, data: bytes) -> None:
        if not self._launcher.stdin.is_closing():
            self._launcher.stdin.write(data)

    async def _follow(self) -> None:
        """Read events to the end, then make sure that the end is real."""
        text = asyncio.create_task(_last_text(self._launcher.stderr))
        while line := await self._launcher.stdout.readline():
            self._on_event(cast("dict[str, Any]", json.loads(line)))
        problem = await text
        await self._launcher.wait()
        self._launcher.stdin.close()
        if not self._last:
            await asyncio.to_thread(self._clean_up)
        for answer in self._answers:
            self._answer(answer, "")
        if not self._started.done():
            message = self._last.get("message")
            lost = f"the launcher failed before the program ran: {problem or 'it was killed'}; start it again"
            self._started.set_exception(SandboxError(message) if message else SandboxLostError(lost))

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            if not self._started.done():
                self._started.set_result(event["init"]["pid"])
        elif kind in self._answers:
            self._answer(kind, event.get("error", ""))
        else:
            self._last = event

    def _answer(self, kind: str, problem: str) -> None:
        waiting, self._answers[kind] = self._answers[kind], []
        for future in waiting:
            if not future.done():
                future.set_result(problem)

    def _clean_up(self) -> None:
        """The launcher died without a word: do its last work. Without a record nothing ever ran."""
        path = self._records / f"{self.name}.json"
        if path.exists():
            end_recorded(cast("identity.Record", json.loads(path.read_bytes())))
            identity.remove_record(str(self._records), self.name)


def end_recorded(record: identity.Record) -> bool:
    """End one sandbox by the identity of its processes, and remove its control groups.

    Returns:
        Whether anything of it was still running.

    Raises:
        OSError: something of it can't be ended.
    """
    if record["boot"] != identity.boot_id():
        return False
    groups = Groups({str(number): (directory, 0) for number, directory in enumerate(record["groups"])})
    if record["freezer"] is not None:
        directory, version = record["freezer"]
        groups.where["freezer"] = (directory, version)
    init = None if record["init"] is None else identity.kill_process(record["init"])
    if init is not None:
        if "freezer" in groups.where:
            # A frozen process dies only after it thaws.
            with contextlib.suppress(FileNotFoundError):
                groups.freeze(False)
        identity.wait_dead(init, _DEATH_S)
    launcher = identity.kill_process(record["launcher"])
    if launcher is not None:
        identity.wait_dead(launcher, _DEATH_S)
    groups.remove()
    return init is not None or launcher is not None


async def _last_text(stream: asyncio.StreamReader) -> str:
    """The last line of what a launcher said on standard error, in bounded memory."""
    kept = b""
    while part := await stream.read(_TEXT_BYTES):
        kept = (kept + part)[-_TEXT_BYTES:]
    lines = kept.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
