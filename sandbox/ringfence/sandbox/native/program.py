"""The kernel's side of one sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ringfence.sandbox.native import identity
from ringfence.sandbox.native.cgroups import GONE, Groups
from ringfence.sandbox.native.client import WardenClient
from ringfence.sandbox.native.job import Order
from ringfence.sandbox.native.supervisor import KILL, PAUSE, RESUME
from ringfence.sandbox.types import Exit, ExitReason, SandboxError, SandboxLostError

_DEATH_S = 30.0
_PATIENCE_S = 10.0


class NativeProgram:
    """A sandbox that has started, or is being started.

    Attributes:
        name: names its record and control groups.
        written: of a command that has ended: how many bytes it wrote to standard output and to standard error.
    """

    def __init__(self, warden: WardenClient, order: Order) -> None:
        loop = asyncio.get_running_loop()
        self.name = order["name"]
        self.written: list[int] = []
        self._records = order["records"]
        self._warden = warden
        self._started: asyncio.Future[int] = loop.create_future()
        self._forms: dict[str, str] = {}
        self._last: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._answers: dict[str, list[asyncio.Future[str]]] = {"paused": [], "resumed": []}

    @classmethod
    async def launch(cls, warden: WardenClient, order: Order, descriptors: Sequence[int]) -> NativeProgram:
        """Have a sandbox made, and wait until the program runs.

        Args:
            warden: who makes it.
            order: what it has to know.
            descriptors: the job, standard input, and for a program its outputs; they stay the caller's.

        Raises:
            SandboxError: it was refused; nothing runs.
            SandboxLostError: it died before the program ran.
        """
        program = cls(warden, order)
        warden.begin(program, order, descriptors)
        try:
            await asyncio.shield(program._started)
        except BaseException:
            await asyncio.shield(asyncio.create_task(program.kill()))
            raise
        return program

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call back once nothing of the sandbox is left."""
        self._last.add_done_callback(lambda _: callback())

    @property
    def identity(self) -> Mapping[str, str | int]:
        """`{"pid": …}`: the first process of the pid namespace, as the host sees it; empty before it runs."""
        runs = self._started.done() and not self._started.exception()
        return {"pid": self._started.result()} if runs else {}

    @property
    def forms(self) -> Mapping[str, str]:
        """The form of each wall that has several; empty before it runs."""
        return self._forms

    async def wait(self) -> Exit:
        """Wait for the end of the whole tree."""
        last = await asyncio.shield(self._last)
        if last["event"] != "exit":
            return Exit(reason=ExitReason.KILLED, code=-9)
        self.written = last["written"]
        return Exit(reason=ExitReason(last["reason"]), code=last["code"])

    async def kill(self) -> None:
        """End the whole tree, frozen or not; returns when nothing of it is left."""
        self._warden.order(self.name, KILL)
        if await self._gone(_PATIENCE_S):
            return
        # Its supervisor hangs: end the tree without it, but spare the others that the same warden watches.
        await asyncio.to_thread(self._clean_up, spare_launcher=True)
        if not await self._gone(_PATIENCE_S):
            # The warden itself hangs or was stopped by someone: its end is the end of all its trees.
            self._warden.kill()
            await asyncio.wait([self._last])

    async def _gone(self, patience_s: float) -> bool:
        done, _ = await asyncio.wait([self._last], timeout=patience_s)
        return bool(done)

    async def pause(self) -> None:
        """Freeze every process of the tree.

        Raises:
            SandboxError: a process can't be frozen; it runs on.
        """
        await self._ask(PAUSE, "paused")

    async def resume(self) -> None:
        """Thaw it.

        Raises:
            SandboxError: the host refuses.
        """
        await self._ask(RESUME, "resumed")

    async def _ask(self, order: str, answer: str) -> None:
        if self._last.done():
            return
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[answer].append(future)
        self._warden.order(self.name, order)
        if problem := await future:
            raise SandboxError(f"the sandbox can't be {answer}: {problem}; kill it instead")

    # -- what the warden says -------------------------------------------------------------------------------------

    def on_event(self, event: dict[str, Any]) -> None:
        """Take one event of the warden's."""
        kind = event["event"]
        if kind == "started":
            self._forms = event["forms"]
            if not self._started.done():
                self._started.set_result(event["pid"])
        elif kind in self._answers:
            self._answer(kind, event.get("error", ""))
        else:
            self._finish(event)

    async def on_death(self, problem: str) -> None:
        """The warden died without a word on this sandbox: do its last work. Without a record nothing ever ran."""
        await asyncio.to_thread(self._clean_up)
        self._finish({"event": "lost", "message": f"the warden of the sandboxes failed: {problem}"})

    def _finish(self, last: dict[str, Any]) -> None:
        for answer in self._answers:
            self._answer(answer, "")
        if not self._started.done():
            message = last.get("message", "it ended")
            refused = last["event"] == "refused"
            self._started.set_exception(
                SandboxError(message)
                if refused
                else SandboxLostError(f"the sandbox died before its program ran: {message}; start it again")
            )
            self._started.exception()  # whoever launches it was cancelled, or sees it
        self._last.set_result(last)

    def _answer(self, kind: str, problem: str) -> None:
        waiting, self._answers[kind] = self._answers[kind], []
        for future in waiting:
            if not future.done():
                future.set_result(problem)

    def _clean_up(self, *, spare_launcher: bool = False) -> None:
        path = Path(self._records) / f"{self.name}.json"
        if path.exists():
            record = cast("identity.Record", json.loads(path.read_bytes()))
            end_recorded(record, spare_launcher=spare_launcher)
            if not spare_launcher:
                identity.remove_record(self._records, self.name)


def end_recorded(record: identity.Record, *, spare_launcher: bool = False) -> bool:
    """End one sandbox by the identity of its processes, and remove its control groups.

    Args:
        record: of the sandbox.
        spare_launcher: leave its warden and the control groups alone: others are watched by it.

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
            try:
                groups.freeze(False)
            except OSError as error:
                if error.errno not in GONE:
                    raise
        identity.wait_dead(init, _DEATH_S)
    if spare_launcher:
        return init is not None
    launcher = identity.kill_process(record["launcher"])
    if launcher is not None:
        identity.wait_dead(launcher, _DEATH_S)
    groups.kill()  # what was forked for it and never became a process of its namespace
    groups.remove()
    return init is not None or launcher is not None
