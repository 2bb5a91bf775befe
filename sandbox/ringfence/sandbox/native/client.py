"""The kernel's end of its warden: starts it, hands over what to start, brings events to the programs they belong to."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from ringfence.sandbox.native import launcher
from ringfence.sandbox.native.job import PACKET_BYTES, Order
from ringfence.sandbox.types import SandboxError, SandboxLostError

_TEXT_BYTES = 4096
_GOODBYE_S = 30.0
_LEAN = {"GLIBC_TUNABLES": "glibc.pthread.stack_cache_size=0:glibc.malloc.arena_max=1"}
"""A warden has a thread for each sandbox. What such a thread had of memory goes with it, and is not kept for 160 more of them."""


class Watched(Protocol):
    """Whoever waits for the events of one sandbox."""

    name: str

    def on_event(self, event: dict[str, Any]) -> None:
        """Take one event."""
        ...

    async def on_death(self, problem: str) -> None:
        """The warden died; `problem` is its last word. Nothing else will be heard of the sandbox."""
        ...


class WardenClient:
    """One warden. Belongs to the event loop that uses it; may move to another one when the first has ended."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, text: int) -> None:
        self._process = process
        self._link = link
        self._text = text
        self._watched: dict[str, Watched] = {}
        self._unsent: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._funeral: asyncio.Task[None] | None = None
        self.alive = True

    @classmethod
    def start(
        cls, warm_environment: Mapping[str, str] | None = None, *, sub_uids: bool = True
    ) -> WardenClient:
        """Start a warden.

        Args:
            warm_environment: the environment that warm interpreters are started with; None: there are none.
            sub_uids: whether programs may run as sub-uids.

        Raises:
            SandboxError: it can't be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = os.memfd_create("warden", os.MFD_CLOEXEC)
        warm = None if warm_environment is None else dict(warm_environment)
        try:
            with theirs:
                # `Popen` uses vfork: the fork handlers of gRPC, which can kill a child, are not run.
                process = subprocess.Popen(
                    launcher.command(
                        "warden", "main", str(theirs.fileno()), json.dumps(warm), json.dumps(sub_uids)
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=text,
                    pass_fds=(theirs.fileno(),),
                    env=_LEAN,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            os.close(text)
            raise SandboxError(
                f"the process that watches sandboxes can't be started: {error.strerror}; "
                "raise the limits of processes and memory around the kernel"
            ) from error
        ours.setblocking(False)
        return cls(process, ours, text)

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def begin(self, program: Watched, order: Order, descriptors: Sequence[int]) -> None:
        """Have a sandbox made; what becomes of it comes to `program`.

        Raises:
            SandboxLostError: the warden is dead.
        """
        self._attend()
        if not self.alive:
            raise SandboxLostError("the process that watches sandboxes has just died; start it again")
        self._watched[program.name] = program
        # A descriptor that waits to be sent must outlive the caller's.
        self._send({"start": order}, [os.dup(descriptor) for descriptor in descriptors])

    def order(self, name: str, order: str) -> None:
        """Pass on an order; does nothing for a sandbox that has ended."""
        self._attend()
        if self.alive and name in self._watched:
            self._send({"name": name, "order": order}, [])

    def kill(self) -> None:
        """End it, and with it every sandbox."""
        self._process.kill()

    async def close(self) -> None:
        """Let it end whatever still runs, and go; returns when it is gone."""
        self._attend()
        if self.alive:
            self._link.shutdown(socket.SHUT_WR)
            try:
                await asyncio.to_thread(self._process.wait, _GOODBYE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._on_readable()
        if self._funeral is not None:
            await self._funeral

    def _attend(self) -> None:
        """Listen in the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or not self.alive:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("a backend is used by two event loops at a time")
        self._loop = loop
        loop.add_reader(self._link, self._on_readable)

    # -- sending --------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        self._unsent.append((json.dumps(message).encode(), descriptors))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = cast("asyncio.AbstractEventLoop", self._loop)
        while self._unsent:
            packet, descriptors = self._unsent[0]
            try:
                socket.send_fds(self._link, [packet], descriptors)
            except BlockingIOError:
                loop.add_writer(self._link, self._flush)
                return
            except OSError:
                break  # it is dead, which the reader finds too
            self._drop_first()
        loop.remove_writer(self._link)

    def _drop_first(self) -> None:
        for descriptor in self._unsent.popleft()[1]:
            os.close(descriptor)

    # -- receiving ------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        while self.alive:
            try:
                packet = self._link.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._bury()
                return
            event = cast("dict[str, Any]", json.loads(packet))
            program = self._watched.get(event["name"])
            if program is not None:
                if event["event"] in ("exit", "refused", "lost"):
                    del self._watched[program.name]
                program.on_event(event)

    def _bury(self) -> None:
        self.alive = False
        loop = cast("asyncio.AbstractEventLoop", self._loop)
        loop.remove_reader(self._link)
        loop.remove_writer(self._link)
        while self._unsent:
            self._drop_first()
        self._link.close()
        self._funeral = loop.create_task(self._mourn(), name="the end of a warden")

    async def _mourn(self) -> None:
        self._process.kill()  # one that closed its link can do nothing any more
        await asyncio.to_thread(self._process.wait)
        size = os.fstat(self._text).st_size
        text = os.pread(self._text, _TEXT_BYTES, max(0, size - _TEXT_BYTES)).decode(errors="replace").strip()
        os.close(self._text)
        problem = text.splitlines()[-1] if text else "it was killed"
        watched, self._watched = list(self._watched.values()), {}
        await asyncio.gather(*(program.on_death(problem) for program in watched))
