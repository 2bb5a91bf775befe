"""One container from the start of its program to its removal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringfence.sandbox.docker.engine import Engine, EngineError, EngineGoneError
from ringfence.sandbox.docker.link import Started
from ringfence.sandbox.docker.oom import OomCount
from ringfence.sandbox.types import Exit, ExitReason, SandboxError

log = logging.getLogger(__name__)

_PACKET_BYTES = 65536
SHORT_ID = 12
_SIGKILL_EXIT = 137
_TRIES = 40
_PAUSE_S = 0.1
_INTERNAL_ERROR = 500


class DockerProgram:
    """A program that runs in a container.

    Args:
        engine: whose container it is.
        container: its id.
        link: with its first process.
        started: what that process said of the start.
        starting: the engine's own word on it, which may still be to come; nothing else is asked of the engine before.
        timeout_s: how long it may run; the clock stands still while it is frozen.
        stderr: a descriptor of the program's standard error to say on why it was ended from outside; becomes this object's.
            -1: nowhere.
        forms: of its walls.
        volumes: names of its volumes, which go with it.
        left: gets the container's id and its volumes when they could not be removed.
    """

    def __init__(
        self,
        engine: Engine,
        container: str,
        link: socket.socket,
        *,
        started: Started,
        starting: asyncio.Task[None],
        timeout_s: float,
        stderr: int,
        volumes: Sequence[str],
        forms: Mapping[str, str],
        left: Callable[[str, Sequence[str]], None],
    ) -> None:
        self.container = container
        self._engine = engine
        self._link = link
        self._pid = started.pid
        self._starting = starting
        self._stderr = stderr
        self._volumes = volumes
        self._forms = forms
        self._left = left
        self._oom = OomCount(started.pid)
        self._oom_kills = 0
        self._received = b""
        self._status: int | None = None
        self._ended = ""
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._closed = self._loop.create_future()
        self._frozen = False
        self._switching = asyncio.Lock()
        self._left_s = timeout_s
        self._since = self._loop.time()
        self._clock: asyncio.TimerHandle | None = self._loop.call_later(timeout_s, self.end, "timeout")
        link.setblocking(False)
        self._take(started.rest)
        self._loop.add_reader(link.fileno(), self._on_link)
        self._follower = asyncio.create_task(self._follow(), name=f"container {container[:SHORT_ID]}")

    @property
    def identity(self) -> Mapping[str, str | int]:
        """The container's short id, and the pid of its first process where that is one of this host."""
        found: dict[str, str | int] = {"container": self.container[:SHORT_ID]}
        return {**found, "pid": self._pid} if self._pid > 0 else found

    @property
    def forms(self) -> Mapping[str, str]:
        """In which form each wall that has several stands around it."""
        return self._forms

    async def wait(self) -> Exit:
        """Wait for the end of the whole tree."""
        return await asyncio.shield(self._follower)

    def end(self, reason: str) -> None:
        """End it for a reason of this kernel's own: `killed`, `timeout` or `disk`."""
        if self._status is None and not self._over.done():
            self._ended = reason
            self._over.set_result(None)

    async def kill(self) -> None:
        """End the whole tree, frozen or not; returns when nothing of it is left.

        Raises:
            SandboxError: it is frozen and the engine does not answer.
        """
        self.end("killed")
        done, _ = await asyncio.wait([self._follower], timeout=4 * self._engine.patience_s)
        if not done:
            raise SandboxError(
                f"container `{self.container[:SHORT_ID]}` can't be ended: the docker engine at `{self._engine.socket}` does not answer; "
                "start it anew, the container is ended then"
            )

    async def pause(self) -> None:
        """Freeze every process of the tree.

        Raises:
            SandboxError: the engine refuses or can't be reached; it runs on.
        """
        async with self._switching:
            if not self._frozen and await self._switch("pause"):
                self._frozen = True
                self._stop_clock()

    async def resume(self) -> None:
        """Thaw it.

        Raises:
            SandboxError: the engine refuses or can't be reached; it stays frozen.
        """
        async with self._switching:
            if self._frozen and await self._switch("unpause"):
                self._frozen = False
                self._since = self._loop.time()
                if not self._over.done():
                    self._clock = self._loop.call_later(self._left_s, self.end, "timeout")

    async def _switch(self, verb: str) -> bool:
        """Pause or unpause; false: it has ended meanwhile."""
        await self._settled()
        for last in (*(False,) * _TRIES, True):
            if self._over.done():
                return False
            try:
                await self._engine.call(lambda api: getattr(api, verb)(self.container))
            except EngineError as error:
                if error.not_found or (error.conflict and "not running" in str(error)):
                    return False
                if error.conflict and "paused" in str(error):
                    return True
                # An engine that has just paused may fail to unpause, and the other way round; a moment later it can.
                if last or error.status != _INTERNAL_ERROR:
                    raise SandboxError(
                        f"the sandbox can't be switched to `{verb}`: {error}; kill it instead"
                    ) from error
                await asyncio.sleep(_PAUSE_S)
            else:
                return True
        return False

    async def _settled(self) -> None:
        """Wait for the engine's word on the start. What it refuses then ends by itself, and the link tells of it."""
        await asyncio.wait([self._starting])
        if not self._starting.cancelled():
            self._starting.exception()

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
            self._left_s -= self._loop.time() - self._since

    # -- the link -------------------------------------------------------------------------------------------------

    def _on_link(self) -> None:
        try:
            data = self._link.recv(_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._link.fileno())
            self._set(self._closed)
            self._set(self._over)
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        self._received = (self._received + data)[-_PACKET_BYTES:]
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                message: dict[str, Any] = json.loads(line)
                if "exit" in message and not self._over.done():
                    self._status = int(message["exit"])
                    # INVARIANT: read while the first process waits for the link to close, as long as its group is there.
                    self._oom_kills = self._oom.kills()
                    self._set(self._over)

    @staticmethod
    def _set(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    # -- the end --------------------------------------------------------------------------------------------------

    async def _follow(self) -> Exit:
        await self._over
        if self._status is None:
            # At the limit it is the group that kills, and the count says so as long as the group is there.
            self._oom_kills = self._oom.kills()
        self._stop_clock()
        await self._settled()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        oom, why = await self._what_became_of_it()
        await self._remove()
        if not self._closed.done():
            self._loop.remove_reader(self._link.fileno())
        self._link.close()
        found = self._verdict(oom)
        if found.reason is ExitReason.KILLED and not self._ended:
            self._tell(why)
        if self._stderr >= 0:
            os.close(self._stderr)
        return found

    async def _what_became_of_it(self) -> tuple[bool, str]:
        """Whether the engine saw it run out of memory, and how it was ended from outside."""
        if self._ended or (self._status is not None and self._pid > 0):
            return False, ""
        try:
            state: dict[str, Any] = (
                await self._engine.call(lambda api: api.inspect_container(self.container))
            )["State"]
        except EngineError as error:
            if error.not_found:
                return False, "its container was removed from outside"
            return False, f"the docker engine says of its container: {error}"
        except SandboxError as error:
            return False, str(error)
        return bool(state.get("OOMKilled")), "its container was ended from outside, or with the docker engine"

    async def _remove(self) -> None:
        """Remove the container with all its processes; only an engine that is away can keep it."""
        while True:
            try:
                if await remove(self._engine, self.container, self._volumes):
                    return
            except EngineGoneError as error:
                log.warning("container %s: %s", self.container[:SHORT_ID], error)
            except SandboxError as error:
                log.warning("container %s can't be removed: %s", self.container[:SHORT_ID], error)
            # The first process closes the link by its end, and with it all others end.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._closed), self._engine.patience_s / 10)
            if self._closed.done():
                self._left(self.container, self._volumes)
                return

    def _verdict(self, oom: bool) -> Exit:
        if self._status is None:
            if self._ended:
                return Exit(reason=ExitReason(self._ended), code=-signal.SIGKILL)
            reason = ExitReason.MEMORY if oom or self._oom_kills else ExitReason.KILLED
            return Exit(reason=reason, code=-signal.SIGKILL)
        code = os.waitstatus_to_exitcode(self._status)
        if (oom or self._oom_kills) and code in (-signal.SIGKILL, _SIGKILL_EXIT):
            return Exit(reason=ExitReason.MEMORY, code=-signal.SIGKILL)
        return Exit(reason=ExitReason.SIGNAL if code < 0 else ExitReason.EXIT, code=code)

    def _tell(self, why: str) -> None:
        """Leave a line where the program's own last words are."""
        if self._stderr < 0 or not why:
            return
        poll = select.poll()
        poll.register(self._stderr, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poll.poll(0)):
            with contextlib.suppress(OSError):
                os.write(self._stderr, f"ringfence: {why}\n".encode())


async def remove(engine: Engine, container: str, volumes: Sequence[str]) -> bool:
    """Remove a container and its volumes; `container` may be empty.

    Returns:
        Whether all of it is gone; false: the engine is still at it.

    Raises:
        SandboxError: the engine refuses or can't be reached.
    """
    if container and not await remove_container(engine, container):
        return False
    for volume in volumes:
        try:
            await engine.call(lambda api, name=volume: api.remove_volume(name, force=True), slow=True)
        except EngineError as error:
            if error.conflict:
                return False
            if not error.not_found:
                raise
    return True


async def remove_container(engine: Engine, container: str) -> bool:
    """Remove a container with all its processes, frozen or not.

    Returns:
        Whether it is gone; false: the engine is still at it.

    Raises:
        SandboxError: the engine refuses or can't be reached.
    """
    for _ in range(_TRIES):
        try:
            await engine.call(lambda api: api.remove_container(container, v=True, force=True), slow=True)
        except EngineError as error:
            if error.not_found:
                return True
            # Another removal of the same container is under way, or it is about to start or thaw.
            if not error.conflict and error.status != _INTERNAL_ERROR:
                raise
            await asyncio.sleep(_PAUSE_S)
        else:
            return True
    return False
