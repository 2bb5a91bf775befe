"""`DockerSandbox`: the Sandbox protocol on a docker engine of this host."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.sandbox.docker import layers, readiness
from ringfence.sandbox.docker.containers import Box, Shown, Volume
from ringfence.sandbox.docker.engine import PATIENCE_S, Engine, usual_host
from ringfence.sandbox.docker.launch import Launcher, Plan, undisturbed
from ringfence.sandbox.docker.places import Places
from ringfence.sandbox.docker.program import DockerProgram, remove
from ringfence.sandbox.docker.scrub import scrub
from ringfence.sandbox.docker.sweeping import sweep
from ringfence.sandbox.docker.watch import Watch
from ringfence.sandbox.native.job import STDERR_NAME, STDOUT_NAME, WORK_NAME
from ringfence.sandbox.specs import (
    checked_directory,
    checked_environment,
    checked_inside,
    checked_limits,
    checked_mount,
    checked_readonly,
    checked_uid,
    checked_words,
)
from ringfence.sandbox.types import (
    CommandResult,
    CommandSpec,
    ProgramSpec,
    SandboxError,
    Wall,
)

log = logging.getLogger(__name__)

_TIDY_SHARE = 0.2
_RIGHTS = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd"), 0)
_OF_LINUX = {"CapAmb": 0, "NoNewPrivs": 1, "Seccomp": 2}
"""What only Linux itself says of a process; the kernel of another runtime has its own means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """What the kernel file says of the backend.

    Attributes:
        image: `sha256:…` or `NAME@sha256:…`; empty: none is named, and nothing can be started.
        runtime: the engine's name of the runtime.
        host: the engine's socket, `unix:///…`; empty: that of `DOCKER_HOST`, else the usual one.
        patience_s: how long the engine may take for an answer.
    """

    image: str = ""
    runtime: str = "runc"
    host: str = ""
    patience_s: float = PATIENCE_S


class DockerSandbox:
    """Sandboxes that are containers of a docker engine on this host.

    A command whose changes grow over its disk limit is killed and reported as `ExitReason.DISK`; what it prints beyond
    a quarter of that limit is counted and dropped, beginning and end are kept, and it is not killed for it.

    Args:
        data_dir: the kernel's data directory.
        settings: which engine, and which image.
    """

    def __init__(self, data_dir: Path, settings: DockerSettings) -> None:
        self.settings = settings
        self._data = data_dir
        self._places = Places(data_dir)
        self._engine, self._launcher = self._reach(settings)
        self._held: readiness.Held | None = None
        self._swept = False
        self._preparing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """`docker`."""
        return "docker"

    def configure(self, settings: DockerSettings) -> None:
        """Follow other settings from the next start on; what runs goes on as it is."""
        if settings != self.settings:
            self.settings, self._held, self._swept = settings, None, False
            self._engine, self._launcher = self._reach(settings)

    @property
    def direct(self) -> str:
        """Why a program can't work on an overlay of its own."""
        return "its overlays are for commands alone; use `backend: native`"

    def walls(self) -> Sequence[Wall]:
        """Try every wall, in a container that is made for it."""
        own = DockerSandbox(self._data, self.settings)
        # INVARIANT: who only looks ends nothing: to a backend of its own the kernel that may run here is an earlier one.
        own._swept = True
        return readiness.walls(own, self._engine, self.settings.image, self.settings.runtime)

    async def start(self, spec: ProgramSpec) -> DockerProgram:
        """Start an agent's program.

        Raises:
            SandboxError: a required wall is missing or the program can't be found; nothing runs.
            SandboxLostError: the engine can't be reached any more, or the container ended on its way.
        """
        if spec.overlay is not None:
            raise SandboxError(f"the sandbox `{self.name}` has no overlay for a program: {self.direct}")
        if spec.loopback is not None and self.settings.runtime != "runc":
            raise SandboxError(
                f"a container of `{self.settings.runtime}` can't have doors: its sockets are its own; leave `sandbox.doors` out"
            )
        image = checked_directory(spec.image, "program image")
        sockets = checked_directory(spec.socket_dir, "socket directory")
        places = [
            Shown(source=Path(image), target="/program"),
            # The directory, not the socket: a bound file would keep the inode of a socket that the next kernel replaces.
            Shown(source=Path(sockets), target="/run/ringfence"),
        ]
        plan = await self._plan(spec, "program", places)
        plan.job |= {"image": image, "cwd": "/program"}
        plan.stdout, plan.stderr, plan.keep_stderr = spec.stdout_fd, spec.stderr_fd, True
        if spec.loopback is None:
            return await self._launcher.launch(plan)
        plan.job["loopback"], plan.box = spec.loopback.port, dataclasses.replace(plan.box, tcp=True)
        program = await self._launcher.launch(plan)
        with socket.socket(fileno=os.dup(spec.loopback.hand_fd)) as hand:
            socket.send_fds(hand, [b"\0"], plan.views)
        for view in plan.views:
            os.close(view)
        return program

    async def run_command(self, spec: CommandSpec) -> CommandResult:
        """Run one command to its end. Cancelling the await ends the command's whole tree first.

        Raises:
            SandboxError: as for `start`.
        """
        lower = Path(checked_directory(spec.lower, "workspace"))
        scratch = Path(checked_directory(spec.scratch, "scratch directory"))
        cwd = checked_inside(spec.cwd, "working directory")
        masks = [checked_inside(mask, "mask") for mask in spec.masks]
        plan = await self._plan(spec, "command", [])
        making = asyncio.to_thread(
            layers.prepare, lower, scratch, masks, self._places.masks(), trusted=os.geteuid() == 0
        )
        made = await undisturbed(making)
        watch = Watch(scratch, plan.box.limits.disk_bytes)
        plan.stdout, plan.stderr = watch.writers
        plan.job |= {"cwd": cwd, "views": [] if self.settings.runtime != "runc" else ["/proc", "/workspace"]}
        workspace = Volume(name=_fresh(), target="/workspace", options=made.options)
        plan.box = dataclasses.replace(
            plan.box, volumes=[workspace, *plan.box.volumes], shown=[*plan.box.shown, *made.covers]
        )
        try:
            program = await self._launcher.launch(plan)
            watch.handed_over()
            loop = asyncio.get_running_loop()

            def exceeded() -> None:
                loop.call_soon_threadsafe(program.end, "disk")

            watch.start(made.upper, plan.views, exceeded)
            try:
                ended = await program.wait()
            except asyncio.CancelledError:
                await asyncio.shield(asyncio.create_task(program.kill()))
                raise
        finally:
            await asyncio.shield(asyncio.create_task(self._after_command(watch, scratch, plan)))
        stdout_bytes, stderr_bytes = watch.totals
        return CommandResult(
            exit=ended,
            upper=made.upper,
            stdout=scratch / STDOUT_NAME,
            stderr=scratch / STDERR_NAME,
            stdout_bytes=stdout_bytes,
            stderr_bytes=stderr_bytes,
        )

    async def sweep(self) -> Sequence[str]:
        """End what an earlier kernel of this data directory left; returns the agents whose leftovers were ended.

        Raises:
            SandboxError: the engine can't be reached, or something can't be ended.
        """
        if not self._places.used():
            self._swept = True
            return []
        agents = await sweep(self._engine, self._places)
        self._swept = True
        return agents

    async def close(self) -> None:
        """Let go of the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._engine.close()

    # -- one container --------------------------------------------------------------------------------------------

    def _reach(self, settings: DockerSettings) -> tuple[Engine, Launcher]:
        engine = Engine(settings.host or usual_host(), settings.patience_s)

        def left(made: str, volumes: Sequence[str]) -> None:
            self._spawn(_tidy(engine, made, volumes))

        return engine, Launcher(engine=engine, places=self._places, left=left)

    async def _plan(self, spec: ProgramSpec | CommandSpec, kind: str, places: list[Shown]) -> Plan:
        uid = checked_uid(spec.uid)
        if uid is None:
            uid = os.geteuid()
        if uid == 0:
            raise SandboxError("a sandbox never runs as uid 0; give the agent a uid of its own")
        argv, env, limits = (
            checked_words(spec.argv),
            checked_environment(spec.env),
            checked_limits(spec.limits),
        )
        shown = [
            *(Shown(source=path.resolve(), target=checked_readonly(path)) for path in spec.readonly),
            *(
                Shown(source=source.resolve(), target=checked_readonly(at, source))
                for at, source in spec.binds.items()
            ),
        ]
        held = await self._prepare()
        readiness.demand(spec.require, held)
        own = self._places.etc(uid)
        linux = self.settings.runtime == "runc"
        job: dict[str, Any] = {
            "argv": argv,
            "env": env,
            "uid": uid,
            "image": "",
            "cwd": "",
            "views": [],
            "loopback": 0,
            "shown": [[one.target, str(one.source)] for one in shown],
            "status": _RIGHTS | (_OF_LINUX if linux else {}),
            "linux": linux,
        }
        box = Box(
            image=self.settings.image,
            runtime=self.settings.runtime,
            uid=uid,
            limits=limits,
            labels=self._places.labels(spec.agent, kind),
            shown=[*places, *shown, *(Shown(source=path, target=target) for path, target in own)],
            volumes=[
                Volume(
                    name=_fresh(),
                    target=checked_mount(at),
                    options=layers.beneath(source.resolve(), str(at), self._places.nothing()),
                    readonly=True,
                )
                for at, source in spec.mounts.items()
            ],
        )
        return Plan(job=job, box=box, timeout_s=limits.timeout_s, stdin=spec.stdin)

    async def _prepare(self) -> readiness.Held:
        """Before the first container: the engine can raise the walls, and nothing of an earlier kernel runs."""
        async with self._preparing:
            return await self._prepared()

    async def _prepared(self) -> readiness.Held:
        if self._held is None:
            await asyncio.to_thread(self._places.prepare)
        else:  # a few names to look at: a thread would take longer to come and go
            self._places.prepare()
        held, settings = self._held, self.settings
        if held is None:
            await asyncio.to_thread(self._places.remember, self._engine.host)
            held = await asyncio.to_thread(readiness.require, self._engine, settings.image, settings.runtime)
            self._held = held
        if not self._swept:
            await self.sweep()
        return held

    async def _after_command(self, watch: Watch, scratch: Path, plan: Plan) -> None:
        await asyncio.to_thread(watch.finish)
        if not await asyncio.to_thread(layers.tidy, scratch):
            try:
                await scrub(self._engine, plan.box.image, plan.box.labels, scratch / WORK_NAME)
            except SandboxError as error:
                log.warning("`%s` can't be emptied: %s", scratch / WORK_NAME, error)
            await asyncio.to_thread(layers.tidy, scratch)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fresh() -> str:
    return f"ringfence-{uuid.uuid4().hex}"


async def _tidy(engine: Engine, made: str, volumes: Sequence[str]) -> None:
    """Remove what an engine that was away could not, as soon as it is back."""
    while True:
        await asyncio.sleep(engine.patience_s * _TIDY_SHARE)
        with contextlib.suppress(SandboxError):
            if await remove(engine, made, volumes):
                return


def all_used(data_dir: Path) -> list[DockerSandbox]:
    """A backend for each engine that kernels of a data directory ever used, for sweeping."""
    return [DockerSandbox(data_dir, DockerSettings(host=host)) for host in Places(data_dir).engines()]
