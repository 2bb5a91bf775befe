"""MCP over the socket of an agent: messages between a stream of gRPC and the server of that connection."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import DecodeError
from ringfence.kernel.doors.mcp_calls import Calls
from ringfence.kernel.server import frames
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.server.gate import Hold
from ringfence.kernel.server.status import end_with
from ringfence.kernel.server.stream import Stream
from ringfence.syscalls.errors import BadCredential
from ringfence.v1 import doors_pb2 as pb

if TYPE_CHECKING:
    from ringfence.kernel.doors.mcp_server import Door

METHOD = "/ringfence.v1.DoorService/Mcp"
_SERVER = "ringfence.kernel.doors.mcp_server"
MISSING = "this kernel has no MCP server: install `ringfence[mcp]` where it runs, and start it again"


class McpTalk:
    """Serves one client of one agent.

    INVARIANT: a request holds its place among the agent's calls under way until it is answered or taken back.
    """

    def __init__(self, desk: Desk, calls: Calls, stream: Stream, *, vouched: bool) -> None:
        self._desk = desk
        self._calls = calls
        self._stream = stream
        self._vouched = vouched
        self._came: deque[tuple[bytes, Hold]] = deque()
        self._stir = asyncio.Event()
        self._last = False
        self._held: dict[object, list[Hold]] = {}
        self._work: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """It is its turn."""
        if not self._vouched:
            end_with(self._stream, BadCredential("send `authorization: Bearer TOKEN` with RINGFENCE_TOKEN"))
            return
        self._work = asyncio.create_task(self._serve())
        self._desk.hold(self._work)
        self._stream.serve()

    def message(self, data: bytes) -> None:
        """Take a message."""
        try:
            said = pb.McpRequest.FromString(data).data
        except DecodeError:
            end_with(self._stream, self._desk.misread())
            return
        self._came.append((said, Hold(self._desk.bounds.gate, len(said))))
        self._stir.set()

    def ended(self) -> None:
        """The client sends no more: what is under way is still answered."""
        self._last = True
        self._stir.set()

    def gone(self) -> None:
        """The stream is over. Calls go on and are recorded."""
        if self._work is not None:
            self._work.cancel()
        for _, hold in self._came:
            hold.end()
        for holds in self._held.values():
            for hold in holds:
                hold.end()
        self._came.clear()
        self._held.clear()
        self._desk.bounds.streams.leave(self)

    async def _serve(self) -> None:
        try:
            door = await self._door()
            await door.serve(self._incoming(), self._send)
        except ImportError:
            self._stream.end(frames.UNIMPLEMENTED, MISSING)
        except Exception:  # noqa: BLE001 - a bug is logged, as often as the log can bear
            end_with(self._stream, self._desk.bug("MCP"))
        else:
            self._stream.end(frames.OK)

    async def _door(self) -> Door:
        return await door_of(self._desk, self._calls)

    async def _incoming(self) -> AsyncGenerator[bytes]:
        while True:
            while self._came:
                data, hold = self._came.popleft()
                self._note(data, hold)
                yield data
            if self._last:
                return
            self._stir.clear()
            await self._stir.wait()

    def _note(self, data: bytes, hold: Hold) -> None:
        """Hold a request's place for as long as it is under way; anything else is done when it is handed on."""
        said = _said(data)
        if "method" in said and _key(said.get("id")) is not None:
            self._held.setdefault(_key(said["id"]), []).append(hold)
            return
        hold.end()
        if said.get("method") == "notifications/cancelled":
            params = said.get("params")
            if isinstance(params, dict):
                self._let_go(cast("dict[str, Any]", params).get("requestId"))

    def _let_go(self, request: object) -> None:
        holds = self._held.get(_key(request))
        if holds:
            holds.pop().end()
            if not holds:
                del self._held[_key(request)]

    async def _send(self, data: bytes) -> None:
        """Send a message, and wait until the connection has it."""
        sent = asyncio.Event()
        self._stream.send(pb.McpResponse(data=data).SerializeToString(), sent.set)
        await sent.wait()
        said = _said(data)
        if "method" not in said:
            self._let_go(said.get("id"))


async def door_of(desk: Desk, calls: Calls) -> Door:
    """Make a server.

    Raises:
        ImportError: the kernel was installed without it.
    """
    # It takes most of a second the first time, which nobody else is to wait for.
    module: Any = await asyncio.to_thread(importlib.import_module, _SERVER)
    return module.Door(desk, calls)


def _said(data: bytes) -> dict[str, Any]:
    """The members of a message; none where it is no object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _key(request: object) -> str | None:
    """What an id is kept under: `1` and `"1"` are two."""
    return json.dumps(request) if isinstance(request, (str, int)) else None
