"""MCP over streamable HTTP, at `/mcp` of a program's loopback: the official package's own, behind the bridge of doors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ringfence.kernel.doors.bridge import Route
from ringfence.kernel.doors.http import Gone, Reply, Request
from ringfence.kernel.doors.mcp_calls import Calls
from ringfence.kernel.doors.mcp_door import MISSING, door_of
from ringfence.kernel.doors.places import HOST, PORT
from ringfence.kernel.server.desk import Desk

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

PATH: Final = "/mcp"
SESSIONS_MAX: Final = 64
"""Sessions of versions with a handshake, of one program; clients rarely end theirs."""

SESSION_IDLE_S: Final = 1800.0
"""How long one may have nothing under way before it ends."""

_INVALID: Final = -32600
_INTERNAL: Final = -32603
_JSON: Final = {"content-type": "application/json"}
Event: TypeAlias = MutableMapping[str, Any]


def routes(desk: Desk) -> Sequence[Route]:
    """What this door answers."""
    return [Route(prefix=PATH, handle=Http(desk).handle, refuse=refuse)]


def refuse(_path: str, _status: int, message: str) -> tuple[bytes, Mapping[str, str]]:
    """An error of HTTP as clients of the protocol read it."""
    error = {"code": _INVALID, "message": message}
    return json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode(), _JSON


class Http:
    """Answers for one program."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._calls = Calls.of(desk)
        self._starting = asyncio.Lock()
        self._manager: StreamableHTTPSessionManager | None = None

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answer one request.

        Raises:
            Gone: nobody takes the answer.
        """
        if request.path != PATH:
            body, headers = refuse(
                request.path, 404, f"there is nothing at `{request.path[:200]}`; there is {PATH}"
            )
            await reply.whole(404, body, headers)
            return
        await self._desk.bounds.gate.wait()
        try:
            manager = await self._started()
        except ImportError:
            body, headers = refuse(PATH, 501, MISSING)
            await reply.whole(501, body, headers)
            return
        exchange = _Asgi(request, reply)
        work = asyncio.ensure_future(manager.handle_request(exchange.scope, exchange.receive, exchange.send))
        closed = asyncio.ensure_future(self._desk.closed.wait())
        try:
            await asyncio.wait({work, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                # A subscription, or a call that waits, ends with its program.
                raise Gone
            work.result()
        finally:
            closed.cancel()
            work.cancel()

    async def _started(self) -> StreamableHTTPSessionManager:
        async with self._starting:
            if self._manager is None:
                running: asyncio.Future[StreamableHTTPSessionManager] = (
                    asyncio.get_running_loop().create_future()
                )
                self._desk.keep(self._run(running))
                self._manager = await running
            return self._manager

    async def _run(self, running: asyncio.Future[StreamableHTTPSessionManager]) -> None:
        """Keep sessions until the program ends."""
        try:
            door = await door_of(self._desk, self._calls)
            async with door.over_http(f"{HOST}:{PORT}", SESSIONS_MAX, SESSION_IDLE_S) as manager:
                running.set_result(manager)
                await self._desk.closed.wait()
        except Exception as error:
            if running.done():
                raise
            running.set_exception(error)


class _Asgi:
    """One request as the package takes it."""

    def __init__(self, request: Request, reply: Reply) -> None:
        self._request = request
        self._reply = reply
        self._told = False
        self._start: tuple[int, dict[str, str]] | None = None
        self.scope: Event = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in request.pairs],
            "client": (HOST, 0),
            "server": (HOST, PORT),
        }

    async def receive(self) -> Event:
        """The body, once; then that nobody waits any more, when that is so."""
        if not self._told:
            self._told = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._reply.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: Event) -> None:
        """Take a part of the answer."""
        if event["type"] == "http.response.start":
            headers = {name.decode(): value.decode("latin-1") for name, value in event["headers"]}
            headers.pop("cache-control", None)  # the bridge says it of everything
            self._start = (event["status"], headers)
            return
        with contextlib.suppress(Gone):
            if self._start is not None:
                await self._reply.begin(*self._start)
                self._start = None
            if body := event.get("body", b""):
                await self._reply.part(body)
            if not event.get("more_body", False):
                await self._reply.end()
