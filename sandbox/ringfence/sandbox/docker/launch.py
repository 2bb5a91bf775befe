"""Makes one container and starts its program, or leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ringfence.sandbox.docker.containers import Box, Shown, container, overlay
from ringfence.sandbox.docker.engine import Engine, EngineError
from ringfence.sandbox.docker.link import Listener, Started, greet
from ringfence.sandbox.docker.places import START_DIR, Places, container_name
from ringfence.sandbox.docker.program import SHORT_ID, DockerProgram, remove
from ringfence.sandbox.docker.refusals import refusal
from ringfence.sandbox.types import SandboxError

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_S = 2.0


@dataclass(slots=True, kw_only=True)
class Plan:
    """A container that is yet to be made.

    Attributes:
        job: what its first process is told.
        box: what the engine is asked for.
        timeout_s: how long it may run.
        stdin: bytes for standard input.
        stdout: descriptor for standard output; stays the caller's.
        stderr: the same for standard error.
        keep_stderr: whether a copy of it is kept to say on why the program was ended from outside.
        forms: of the walls around it.
        views: where the first process opened directories for the kernel: descriptors, the caller's to close.
    """

    job: dict[str, Any]
    box: Box
    timeout_s: float
    stdin: bytes
    stdout: int = -1
    stderr: int = -1
    keep_stderr: bool = False
    forms: Mapping[str, str] = field(default_factory=dict[str, str])
    views: Sequence[int] = field(default_factory=list[int])


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Launches for one backend.

    Attributes:
        left: gets the id of a container that can't be removed now, and its volumes.
    """

    engine: Engine
    places: Places
    left: Callable[[str, Sequence[str]], None]

    async def launch(self, plan: Plan) -> DockerProgram:
        """Make the container, start the program in it, and wait until it runs.

        Raises:
            SandboxError: it was refused; nothing runs.
            SandboxLostError: the engine or the container went away on the way; nothing runs any more.
        """
        name = uuid.uuid4().hex
        directory = self.places.link(name, self.engine.host)
        shown = [*plan.box.shown, Shown(source=directory, target=START_DIR)]
        box = dataclasses.replace(plan.box, shown=shown)
        listener = Listener(directory)
        made, wanted = "", container_name(name)
        volumes: list[str] = []
        try:
            for volume in box.volumes:
                volumes.append(volume.name)
                request = overlay(volume, box.labels)
                making = self.engine.call(lambda api, request=request: api.create_volume(**request))
                await self.refusable(undisturbed(making), box)
            making = self.engine.call(lambda api: _create(api, box, wanted), slow=True)
            made = await self.refusable(undisturbed(making), box)
            link, started, starting = await self.refusable(self._begin(made, listener, plan), box)
            plan.views = started.views
            return DockerProgram(
                self.engine,
                made,
                link,
                started=started,
                starting=starting,
                timeout_s=plan.timeout_s,
                stderr=os.dup(plan.stderr) if plan.keep_stderr else -1,
                volumes=volumes,
                forms=plan.forms,
                left=self.left,
            )
        except BaseException:
            # Whoever got no answer has to take it that the container was made.
            await asyncio.shield(asyncio.create_task(self._discard(made or wanted, volumes)))
            raise
        finally:
            listener.close()
            self.places.forget_link(name, self.engine.host)

    async def refusable(self, work: Coroutine[Any, Any, T], box: Box) -> T:
        """Await what the engine does, and say in the user's words why it does not."""
        try:
            return await work
        except EngineError as error:
            raise refusal(error, box.image, box.runtime) from error

    async def _begin(
        self, made: str, listener: Listener, plan: Plan
    ) -> tuple[socket.socket, Started, asyncio.Task[None]]:
        """Start the container, and the program in it as soon as its first process is there.

        The engine takes its time to say that a container has started, a third of the whole at times. Its first process is met
        meanwhile, and has looked at its walls itself: a program that runs is not kept waiting for the engine's word.

        Returns:
            The link, what was said on it, and the engine's word where that is still to come.
        """
        meeting = asyncio.create_task(_met(listener, plan))
        starting = asyncio.create_task(self.engine.call(lambda api: api.start(made), slow=True))
        try:
            await asyncio.wait([meeting, starting], return_when=asyncio.FIRST_COMPLETED)
            if not meeting.done() or meeting.exception() is not None:
                await starting
            while not (await asyncio.wait([meeting], timeout=_CONNECT_S))[0]:
                await self._require_running(made)
            return *meeting.result(), starting
        except BaseException:
            # An abandoned start would make the container run after it was removed.
            await asyncio.wait([starting])
            meeting.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, SandboxError):
                link, started = await meeting
                _part(link, started)
            raise

    async def _require_running(self, made: str) -> None:
        facts: dict[str, Any] = await self.engine.call(lambda api: api.inspect_container(made))
        if not facts["State"]["Running"]:
            raise SandboxError(
                f"the container's first process ended with status {facts['State']['ExitCode']} before the program ran; "
                "the image needs Python 3.9 or newer as `python3`: ringfence image build"
            )

    async def _discard(self, made: str, volumes: Sequence[str]) -> None:
        """Remove what came to nothing."""
        try:
            if await remove(self.engine, made, volumes):
                return
        except SandboxError as error:
            log.warning("container %s can't be removed: %s", made[:SHORT_ID], error)
        self.left(made, volumes)


async def undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """Await what a thread does. Whoever is cancelled meanwhile waits for its end first, so that it can be undone."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _met(listener: Listener, plan: Plan) -> tuple[socket.socket, Started]:
    """Take the connection of the first process and hand the job over; the link is closed when that does not work."""
    link = await listener.accept()
    uid = plan.box.uid if plan.box.runtime == "runc" else None
    work = asyncio.to_thread(greet, link, uid, plan.job, plan.stdin, plan.stdout, plan.stderr)
    task = asyncio.create_task(work)
    try:
        return link, await asyncio.shield(task)
    except BaseException:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            _part(link, task.result())
        link.close()
        raise


def _part(link: socket.socket, started: Started) -> None:
    """Let go of a first process whose container came to nothing after all."""
    for view in started.views:
        os.close(view)
    link.close()


def _create(api: Any, box: Box, name: str) -> str:
    made: dict[str, Any] = api.create_container_from_config(container(box), name)
    for warning in made.get("Warnings") or ():
        # What an engine can't do it leaves out, with a word; less than what was asked for is a refusal here.
        if "swap" not in warning:
            api.remove_container(made["Id"], force=True)
            raise SandboxError(
                f"the docker engine would raise weaker walls: {warning.strip()}; see `ringfence doctor`"
            )
    return str(made["Id"])
