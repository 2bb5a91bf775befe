"""The heart of a kernel in the test's own process, on a real database: journal, store, dispatcher, ownership, processes.

Only the outermost parts are scripted, so that a test decides when they go on: the body of a call (`Script`) and the
sandbox of a program (`Hand`). What lies between is what a kernel runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ringfence.kernel.backends import Backends
from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.failpoints import Failpoints
from ringfence.kernel.journal.anchor import Anchor
from ringfence.kernel.journal.blobs import Blobs
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.writer import Journal
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.outcomes import Request
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.parking import parker
from ringfence.kernel.processes import Processes
from ringfence.kernel.resources import Resources
from ringfence.kernel.retention import Retention
from ringfence.kernel.revival import Revival
from ringfence.kernel.rollback import Rollback
from ringfence.kernel.scheduler import Scheduler
from ringfence.kernel.secrets import Secrets
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.types import Verdict
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.types import Exit, ExitReason, ProgramSpec
from ringfence.syscalls.base import Call, Plan, Question
from ringfence.syscalls.table import build_table
from support.scenes import manifest_of

URL = "http://pay.test/pay"


class Script:
    """The body of a row: it records every effect, and stops where the test wants it to."""

    def __init__(self, action: str, result: Callable[[Any], Any]) -> None:
        self.action = action
        self.effects: list[tuple[int, str]] = []  # step and effect id
        self.stops: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.raises: list[BaseException] = []
        self.idempotent = True
        self.more: list[Question] = []
        self.progress = False
        self._result = result

    def stop(self, name: str) -> None:
        self.stops[name], self.reached[name] = asyncio.Event(), asyncio.Event()

    def go(self, name: str) -> None:
        self.stops.pop(name).set()

    async def _pass(self, name: str) -> None:
        if name in self.stops:
            self.reached[name].set()
            await self.stops[name].wait()

    def plan(self, arguments: Any, _env: Any) -> Plan:
        resource = getattr(arguments, "url", None) or getattr(arguments, "path", "")
        question = Question(action=self.action, resource=resource)
        return Plan(resource=resource, questions=(question,), idempotent=self.idempotent)

    async def run(self, call: Call, arguments: Any) -> Any:
        await self._pass("before")
        if self.more:
            await call.require(self.more)
        if self.progress:
            await call.record(b'{"at":1}')
        await call.check_live()
        self.effects.append((call.step, call.effect_id))
        await self._pass("after")
        if self.raises:
            raise self.raises.pop(0)
        return self._result(arguments)


class HandProgram:
    """A program that does nothing and ends when the test says so."""

    def __init__(self) -> None:
        self.identity: dict[str, str | int] = {"pid": 1}
        self.forms: dict[str, str] = {}
        self._over: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Exit:
        return await asyncio.shield(self._over)

    def end(self, reason: ExitReason, code: int) -> None:
        if not self._over.done():
            self._over.set_result(Exit(reason=reason, code=code))

    async def kill(self) -> None:
        self.end(ExitReason.KILLED, -9)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


class Hand:
    """A sandbox whose programs the test holds in its hand."""

    name = "hand"

    def __init__(self) -> None:
        self.programs: list[HandProgram] = []
        self.tokens: list[str] = []

    async def start(self, spec: ProgramSpec) -> HandProgram:
        self.tokens.append(spec.env["RINGFENCE_TOKEN"])
        self.programs.append(HandProgram())
        return self.programs[-1]


class Heart:
    """The parts, wired as `main` wires them."""

    def __init__(self, kernel: Kernel, scripts: dict[str, Script], hand: Hand) -> None:
        self.kernel, self.core, self.hand = kernel, kernel.core, hand
        self.ownership, self.processes = kernel.ownership, kernel.processes
        self.dispatcher = Dispatcher(kernel.core)
        self.post, self.get, self.read = (scripts[a] for a in ("http.post", "http.get", "fs.read"))
        self._tasks: list[asyncio.Task[Answer]] = []
        self._parks: set[asyncio.Task[None]] = set()

    def parker(self, thread: Thread) -> Callable[[Thread, Answer], Coroutine[Any, Any, None]]:
        """What the door of a thread's present start was given to park it with."""

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            task = asyncio.create_task(work)
            self._parks.add(task)
            task.add_done_callback(self._parks.discard)

        return parker(self.processes, thread, spawn)

    async def agent(
        self,
        *,
        allow: Iterable[str] = (),
        ask: Iterable[str] = (),
        more: str = "",
        started: bool = False,
        name: str = "heart",
        submitted_by: str = "",
        first_fire: datetime | None = None,
        labels: dict[str, str] | None = None,
    ) -> Thread:
        """An agent of this kernel; its program is not started unless asked."""
        labels = labels or {}
        said = ", ".join(f"{key}: {value}" for key, value in labels.items())
        text = manifest_of(name, ["true"], allow=allow, ask=ask, more=more, labels=said)
        manifest = parse_manifest(text)
        grants = [(r.verdict.value, r.text) for r in manifest.rules if r.verdict is not Verdict.DENY]
        record = await self.core.store.create_agent(
            name=name,
            thread="",
            manifest=text,
            source="test",
            labels=labels,
            input=b"",
            owner=self.core.kernel,
            uid_base=None,
            grants=grants,
            submitted_by=submitted_by,
            first_fire=first_fire,
        )
        for part in ("live", "image", "logs", "scratch"):
            (self.kernel.layout.agent(record.id) / part).mkdir(parents=True)
        thread = await self.ownership.adopt(record)
        if started:
            await self.start(thread)
        return thread

    async def start(self, thread: Thread) -> HandProgram:
        async with thread.operation:
            await self.processes.start(thread)
        return self.hand.programs[-1]

    async def adopted_again(self, thread: Thread) -> Thread:
        """The agent as the next kernel finds it: what this one knew of it is gone, what is stored counts."""
        self.core.threads.pop(thread.key)
        return await self.adopted_again_from(thread)

    async def adopted_again_from(self, thread: Thread) -> Thread:
        """Take over an agent that nobody has."""
        record = await self.core.store.agent_by_key(thread.key)
        assert record is not None
        return await self.ownership.adopt(record)

    def begin(
        self, thread: Thread, lane_step: int, action: str = "http.post", *, lane: str = "0", **arguments: Any
    ) -> asyncio.Task[Answer]:
        """Make a call and go on."""
        if not arguments:
            arguments = {"path": "/workspace/a.txt"} if action.startswith("fs.") else {"url": URL}
        request = Request(
            lane=lane,
            lane_step=lane_step,
            action=action,
            raw=json.dumps(arguments).encode(),
            deadline_ms=60_000,
        )
        task = asyncio.create_task(self._made(thread, request))
        self._tasks.append(task)
        return task

    async def _made(self, thread: Thread, request: Request) -> Answer:
        """As the door makes it: straight to its commit where that is possible."""
        straight: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.dispatcher.begin(thread, request, straight.set_result):
            return await asyncio.shield(straight)
        return await self.dispatcher.call(thread, request)

    async def call(self, thread: Thread, lane_step: int, action: str = "http.post", **more: Any) -> Answer:
        """Make a call and wait for its answer."""
        return await self.begin(thread, lane_step, action, **more)

    def forget_tasks(self) -> None:
        """Let calls go that were made and answered."""
        self._tasks = [task for task in self._tasks if not task.done()]

    async def outcomes(self, thread: Thread) -> list[tuple[int, str]]:
        """Steps and outcomes as they are recorded, in the order they were written."""
        rows = await self.core.store.steps(thread.key)
        return [(row.step, row.outcome) for row in rows if row.outcome]

    async def close(self) -> None:
        await self.kernel.rollback.close()
        for thread in list(self.core.threads.values()):
            async with thread.operation:
                await self.processes.end_program(thread)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def heart_on(
    dsn: str, directory: Path, config: str = "", **clocks: Callable[[], Any]
) -> AsyncGenerator[Heart]:
    """A heart on a database; `clocks` are those of its scheduler."""
    layout = Layout(data=directory / "d", run=directory / "r")
    layout.run.mkdir(parents=True, exist_ok=True)
    layout.data.mkdir(exist_ok=True)
    file = directory / "kernel.yaml"
    file.write_text(config or "apiVersion: ringfence/v1\nkind: Kernel\nspec: {}\n")
    table = dict(build_table())
    answers: dict[str, Callable[[Any], Any]] = {
        "http.post": lambda _: table["http.post"].result(status=200, headers={}, body=b"done"),
        "http.get": lambda _: table["http.get"].result(status=200, headers={}, body=b"read"),
        "fs.read": lambda _: table["fs.read"].result(),
    }
    scripts = {action: Script(action, answer) for action, answer in answers.items()}
    for action, script in scripts.items():
        body: Any = SimpleNamespace(plan=script.plan, run=script.run)
        table[action] = dataclasses.replace(table[action], body=body)
    store = await Store.open(dsn)
    key, fence = await store.register_kernel(
        host="test", pid=1, boot_id="test", data_dir=str(layout.data), lease_s=600
    )
    journal = Journal(dsn, key, fence)
    await journal.start()
    core = Core(
        journal=journal,
        store=store,
        blobs=Blobs(layout.blobs),
        failpoints=Failpoints(None),
        table=table,
        kernel=key,
        fence=fence,
    )
    core.lease.extend(asyncio.get_running_loop().time(), 600)
    hand: Any = Hand()
    resources = Resources.load(file, Secrets(layout.secrets), {})
    backends = Backends(layout)
    backends.named = lambda name: hand  # type: ignore[method-assign]
    ownership = Ownership(core=core, layout=layout, resources=resources, backends=backends)
    ownership.revive = Revival(core, Dispatcher(core)).revive
    processes = Processes(core, layout, ownership, Dispatcher(core))
    settings: Any = SimpleNamespace(data=layout.data, dsn=dsn, config=file, listen=None)
    kernel = Kernel(
        settings=settings,
        layout=layout,
        core=core,
        ownership=ownership,
        processes=processes,
        scheduler=Scheduler(core, processes, **clocks),
        rollback=Rollback(core, ownership, processes),
        retention=Retention(core, lambda agent: SnapshotStore(layout.points(agent))),
        secrets=Secrets(layout.secrets),
        anchor=Anchor(layout.anchor_file, layout.anchor_key),
        database_version="",
        embed=lambda: asyncio.sleep(0, {}),
    )
    heart = Heart(kernel, scripts, hand)
    try:
        yield heart
    finally:
        core.stopping = True
        await heart.close()
        await journal.stop()
        await store.close()
