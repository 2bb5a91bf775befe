"""The doors of one program: what it connects to on its loopback arrives here, with nothing in between.

The listening socket was made in the sandbox's own network namespace by its first process and handed to the kernel, so that
the socket is the identity, as at the agent's own. The token of the start has to come along, too.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ringfence.kernel.doors.http import LARGE_MAX, Exchange, Gone, Handler, Refuser, Reply, Request
from ringfence.kernel.doors.places import MODULES
from ringfence.kernel.server.desk import Desk

NOT_FOUND: Final = 404
UNAUTHORIZED: Final = 401
_ACCEPTED_AT_ONCE: Final = 16
_NO_DESCRIPTOR_S: Final = 0.1
_READ_AHEAD: Final = 64 << 10
_BYTES_OF_CHORE: Final = 4096
"""Of a body that cost as much as a frame without a call: they are read, sorted and hashed before anything is decided."""
_KEY_HEADERS: Final = ("x-api-key", "api-key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What one door answers.

    Attributes:
        prefix: of the paths that are its own; the longest that fits counts.
        handle: answers a request that has the token.
        refuse: words errors of HTTP itself, and a missing token, as programs of this door read them.
    """

    prefix: str
    handle: Handler
    refuse: Refuser


class Ledger(Protocol):
    """Who counts the connections of an agent."""

    def admit(self) -> bool:
        """Count one more, if it may have it."""
        ...

    def leave(self) -> None:
        """One is over."""
        ...


class Withheld(Exception):
    """Nobody is to hear of the call that a request made: the program is ended first."""


class Bridge:
    """Serves the doors of one program until it ends.

    Args:
        desk: takes its calls.
        ledger: counts its connections, together with those of its socket.
        listener: of its loopback; becomes this object's.
        doors: as its manifest names them.
    """

    def __init__(self, desk: Desk, ledger: Ledger, listener: socket.socket, doors: Sequence[str]) -> None:
        self._desk = desk
        self._ledger = ledger
        self._listener = listener
        self._routes = [
            route for door in doors for route in importlib.import_module(MODULES[door]).routes(desk)
        ]
        self._routes.sort(key=lambda route: -len(route.prefix))
        self._exchange = Exchange(self._handle, self._keep, self._refuse, asyncio.Semaphore(LARGE_MAX))
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop listening and cut every connection; calls in flight go on without anybody to tell."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        self._closed.set()
        for task in list(self._tasks):
            task.cancel()

    # -- connections --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _rest(self, for_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(for_s, self._listen)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if debt_s := self._desk.bounds.calm.debt_s():
                self._rest(debt_s)
                return
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self._rest(_NO_DESCRIPTOR_S)
                return
            self._desk.bounds.calm.spend(1)
            if not self._ledger.admit():
                client.close()
                continue
            client.setblocking(False)
            task = asyncio.create_task(self._serve(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=client, limit=_READ_AHEAD)
            await self._exchange.serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # it is gone, or the program is; nobody is above
        finally:
            if writer is None:
                client.close()
            else:
                await self._part(writer)
            self._ledger.leave()

    async def _part(self, writer: asyncio.StreamWriter) -> None:
        """Let go of a connection when its last bytes are taken. INVARIANT: it is counted as long as the kernel holds it."""
        writer.close()
        try:
            if self._closed.is_set():
                writer.transport.abort()
            await writer.wait_closed()
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _keep(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _route(self, path: str) -> Route | None:
        return next((route for route in self._routes if path.startswith(route.prefix)), None)

    def _refuse(self, path: str, status: int, message: str) -> tuple[bytes, Mapping[str, str]]:
        route = self._route(path) or (self._routes[0] if self._routes else None)
        if route is None:
            return message.encode(), {"content-type": "text/plain; charset=utf-8"}
        return route.refuse(path, status, message)

    async def _handle(self, request: Request, reply: Reply) -> None:
        calm = self._desk.bounds.calm
        calm.spend(1 + len(request.body) / _BYTES_OF_CHORE)
        if debt_s := calm.debt_s():
            await asyncio.sleep(debt_s)
        route = self._route(request.path)
        if route is None:
            text = (
                f"there is nothing at `{request.path[:200]}`; see what the manifest's `sandbox.doors` opens"
            )
            await self._say(request, reply, NOT_FOUND, text)
        elif not self._desk.thread.token_matches(_key(request)):
            text = (
                "the key is not the one of this start; use the one in the environment, such as OPENAI_API_KEY"
            )
            await self._say(request, reply, UNAUTHORIZED, text)
        else:
            await self._answered(route, request, reply)

    async def _say(self, request: Request, reply: Reply, status: int, text: str) -> None:
        body, headers = self._refuse(request.path, status, text)
        await reply.whole(status, body, headers)

    async def _answered(self, route: Route, request: Request, reply: Reply) -> None:
        try:
            await route.handle(request, reply)
        except Withheld:
            await self._closed.wait()
            raise Gone from None
        except Exception as error:
            if reply.lost or isinstance(error, Gone):
                raise
            # A bug must reach the program as an answer: one that never comes would hold it for ever.
            text = self._desk.bug(request.path).message
            if reply.begun:
                raise ConnectionError(text) from error
            await self._say(request, reply, 500, text)


def _key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return next((request.headers[name] for name in _KEY_HEADERS if name in request.headers), "")
