"""The MCP server of an agent's door: with `mcp_results` all that imports `mcp`, which is large and slow to import.

Nothing here decides anything: a tool call is a syscall, and its answer is told in the words of the protocol.

INVARIANT: whoever speaks here is the agent, and nothing that is said on this connection approves a call: see `mcp_asking`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any, Final

import anyio
import mcp_types as types
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.session import ServerSession
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp.shared.subscriptions import PromptsListChanged, ResourcesListChanged, ToolsListChanged
from pydantic import ValidationError
from ringfence.kernel.boundaries import ITS_OWN
from ringfence.kernel.doors import mcp_results, mcp_tools
from ringfence.kernel.doors.mcp_asking import Context, Made, ask, told
from ringfence.kernel.doors.mcp_calls import Calls, Parked
from ringfence.kernel.doors.mcp_declared import CALL, Declared
from ringfence.kernel.doors.mcp_offers import Offers
from ringfence.kernel.doors.mcp_rounds import given_by, in_rounds
from ringfence.kernel.doors.mcp_servers import OfServers
from ringfence.kernel.doors.mcp_unread import unreadable
from ringfence.kernel.server.desk import Desk
from ringfence.syscalls.codec import ARGUMENTS_BYTES_MAX
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.table import Row

LISTENS_MAX: Final = 4
"""Subscriptions of one connection, or of all over HTTP."""

PEERS_MAX: Final = 64
"""Clients with a session that are told of changed tools; over HTTP these may be several."""

TELL_S: Final = 5.0
"""How long one of them may take to hear of it."""

INSTRUCTIONS: Final = (
    "Every tool is a call to the Ringfence kernel, which decides, records and can undo it. A refused call says why and what "
    "to do. One that waits for a person says so: make it again with the same arguments to get its result."
)
_OF_OVERLAYS: Final = frozenset({"workspace.commit"})
"""Rows for programs on an overlay alone."""

# What an agent sends must not fill the kernel's log; bugs are told by the desk.
logging.getLogger("mcp").setLevel(logging.CRITICAL + 1)


class _Server(Server[Any]):
    """The package's, whose sessions over HTTP ask the server itself what it can do."""

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        """Say that clients hear of changed lists."""
        told = notification_options or NotificationOptions(
            tools_changed=True, resources_changed=True, prompts_changed=True
        )
        return super().create_initialization_options(told, experimental_capabilities, extensions)

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> types.ServerCapabilities:
        """Say of resources and prompts that which there are may change, and that nobody is told when a resource does."""
        found = super().get_capabilities(
            notification_options, experimental_capabilities, extensions, protocol_version=protocol_version
        )
        return found.model_copy(
            update={
                "resources": types.ResourcesCapability(list_changed=True),
                "prompts": types.PromptsCapability(list_changed=True),
            }
        )


class Door:
    """Serves clients of one agent, each in whichever version of the protocol it opens with.

    Attributes:
        server: the package's own.
    """

    def __init__(self, desk: Desk, calls: Calls) -> None:
        self._desk = desk
        self._calls = calls
        table = desk.dispatcher.table
        self._rows = mcp_tools.by_name(table)
        self._call_row = table[CALL]
        self._declared = Declared(desk, calls, table)
        offers = Offers(desk, calls, OfServers(desk, calls, table))
        self._bus = InMemorySubscriptionBus()
        self._peers: deque[ServerSession] = deque(maxlen=PEERS_MAX)
        self._changed = asyncio.Event()
        self.server: Server[Any] = _Server(
            "ringfence",
            version=metadata.version("ringfence"),
            title="Ringfence",
            instructions=INSTRUCTIONS,
            get_tool_input_schema=self._schema,
            on_list_tools=self._list,
            on_call_tool=self._call,
            on_list_resources=offers.resources,
            on_list_resource_templates=offers.templates,
            on_read_resource=offers.read,
            on_list_prompts=offers.prompts,
            on_get_prompt=offers.prompt,
            on_completion=offers.complete,
            on_subscriptions_listen=ListenHandler(self._bus, max_subscriptions=LISTENS_MAX),
        )
        # Spans with an agent's words in them are no part of the kernel's own.
        self.server.middleware.clear()
        self.server.add_notification_handler(
            "notifications/initialized", types.NotificationParams, self._initialized
        )

    async def serve(self, incoming: AsyncGenerator[bytes], send: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve one client over a pair of streams, until nothing comes any more.

        Args:
            incoming: JSON-RPC messages.
            send: takes a message for the client.
        """
        to_server, from_client = anyio.create_memory_object_stream[SessionMessage | Exception]()
        to_client, from_server = anyio.create_memory_object_stream[SessionMessage]()
        options = self.server.create_initialization_options()

        async def read() -> None:
            async with to_server:
                async for data in incoming:
                    message = _message(data)
                    if message is not None:
                        await to_server.send(message)
                    elif (error := unreadable(data)) is not None:
                        # The package drops it, and whoever asked would wait for ever.
                        await send(error)

        async def write() -> None:
            async with from_server:
                async for message in from_server:
                    await send(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode())

        async with self.announcing(), anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(write)
            await self.server.run(from_client, to_client, options)
            group.cancel_scope.cancel()

    @asynccontextmanager
    async def over_http(
        self, host: str, sessions_max: int, idle_s: float
    ) -> AsyncGenerator[StreamableHTTPSessionManager]:
        """Serve clients over streamable HTTP while the block is entered.

        Args:
            host: address and port, as clients name them; requests for others are refused.
            sessions_max: clients with a session at a time.
            idle_s: how long one may have nothing under way.
        """
        port = host.rpartition(":")[2]
        hosts = [host, f"localhost:{port}"]
        manager = StreamableHTTPSessionManager(
            self.server,
            security_settings=TransportSecuritySettings(
                allowed_hosts=hosts, allowed_origins=[f"http://{name}" for name in hosts]
            ),
            session_idle_timeout=idle_s,
            max_sessions=sessions_max,
            max_request_body_size=ARGUMENTS_BYTES_MAX,
        )
        async with self.announcing(), manager.run():
            yield manager

    # -- the list of tools --------------------------------------------------------------------------------------

    def _offered(self) -> list[str]:
        rights = self._desk.thread.rights
        direct = self._desk.thread.manifest.sandbox.workspace == "direct"
        return [
            name
            for name, row in self._rows.items()
            if rights.offers(row.action) and row.action not in (ITS_OWN if direct else _OF_OVERLAYS)
        ]

    async def _list(self, _: Context, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        await self._desk.thread.current_rights()
        own = [types.Tool.model_validate(mcp_tools.tool(self._rows[name])) for name in self._offered()]
        lent = [mcp_results.lent(one) for one in await self._declared.tools()]
        return types.ListToolsResult(
            tools=[*own, *(tool for tool in lent if tool is not None)], ttl_ms=0, cache_scope="private"
        )

    def _schema(self, name: str) -> Mapping[str, Any] | None:
        row = self._rows.get(name)
        return self._declared.schema(name) if row is None else mcp_tools.tool(row)["inputSchema"]

    def _state(self) -> tuple[Sequence[str], object]:
        """What the lists rest on: names, and of declared servers the rights themselves."""
        servers = self._declared.servers()
        return self._offered(), (servers, self._desk.thread.rights.version if servers else "")

    @asynccontextmanager
    async def announcing(self) -> AsyncGenerator[None]:
        """Tell clients of changed tools while the block is entered."""
        told = self._desk.thread.doors.rights
        told.add(self._changed.set)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._announce)
                yield
                group.cancel_scope.cancel()
        finally:
            told.discard(self._changed.set)

    async def _initialized(self, context: Context, _: types.NotificationParams) -> None:
        self._peers.append(context.session)

    async def _announce(self) -> None:
        """Say that something else is offered, once for each time that it is."""
        known = self._state()
        while True:
            await self._changed.wait()
            self._changed.clear()
            now = self._state()
            if now == known:
                continue
            there = now[1] != known[1]
            known = now
            await self._bus.publish(ToolsListChanged())
            if there:
                await self._bus.publish(ResourcesListChanged())
                await self._bus.publish(PromptsListChanged())
            for peer in tuple(self._peers):
                # Whoever doesn't read now looks at its list when it does.
                with anyio.move_on_after(TELL_S):
                    await peer.send_tool_list_changed()
                    if there:
                        await peer.send_resource_list_changed()
                        await peer.send_prompt_list_changed()

    # -- calls --------------------------------------------------------------------------------------------------

    async def _call(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        row, given, lent = self._rows.get(params.name), params.arguments or {}, None
        if row is None:
            lent = await self._declared.find(params.name)
            if lent is None:
                text = f"there is no tool `{params.name[:64]}`; list the tools to see those that there are"
                raise MCPError(types.INVALID_PARAMS, text)
            row, given = self._call_row, {**lent.arguments(given), **given_by(context, params)}

        async def make(given: Mapping[str, Any]) -> Made | Parked | types.InputRequiredResult:
            raw = mcp_tools.arguments(row, given)
            return await ask(self._calls, context, params.name, params.input_responses, row, raw)

        try:
            made = await (make(given) if lent is None else in_rounds(context, lent.server, given, make))
        except InvalidRequest as error:
            return mcp_results.failed(error)
        if isinstance(made, types.InputRequiredResult):
            return made
        if isinstance(made, Parked):
            return mcp_results.parked(params.name, made)
        goes_on = bool(params.request_state)
        if (error := mcp_results.protocol_error(made.answer, goes_on=goes_on)) is not None:
            raise error
        return await self._answer(row, made)

    async def _answer(self, row: Row, made: Made) -> types.CallToolResult:
        answer = await told(self._desk, made)
        if answer.failure is not None:
            return mcp_results.failed(answer.failure)
        try:
            if row is self._call_row:
                return mcp_results.passed_on(answer, made.place)
            return mcp_results.done(row, answer, made.place)
        except Exception:  # noqa: BLE001 - a bug is logged, as often as the log can bear
            return mcp_results.failed(self._desk.bug(row.action))


def _message(data: bytes) -> SessionMessage | None:
    """A message; None: it is none."""
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(data, by_name=False))
    except ValidationError:
        return None
