"""The MCP server of an agent's door: with `mcp_results` all that imports `mcp`, which is large and slow to import.

Nothing here decides anything: a tool call is a syscall, and its answer is told in the words of the protocol.

INVARIANT: whoever speaks here is the agent. Nothing that is said on this connection approves a call: an elicitation asks
whether to wait for the operator's decision, never for the decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any, Final, TypeAlias

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.session import ServerSession
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp.shared.subscriptions import ToolsListChanged
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from ringfence.kernel.boundaries import ITS_OWN
from ringfence.kernel.doors import mcp_results, mcp_tools
from ringfence.kernel.doors.mcp_calls import Asked, Calls, Parked
from ringfence.kernel.doors.mcp_declared import CALL, Declared
from ringfence.kernel.doors.mcp_unread import unreadable
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.settled import Answer
from ringfence.syscalls.codec import ARGUMENTS_BYTES_MAX
from ringfence.syscalls.errors import InvalidRequest, SyscallError
from ringfence.syscalls.table import Row

Context: TypeAlias = ServerRequestContext[Any, Any]

WAIT_S: Final = 45.0
"""How long a call that was found again waits for its answer: less than the minute that clients commonly wait."""

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
_WAIT: Final = {
    "type": "object",
    "properties": {"wait": {"type": "boolean", "title": "Wait for the decision", "default": True}},
    "required": ["wait"],
}

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
        """Say that clients hear of changed tools."""
        told = notification_options or NotificationOptions(tools_changed=True)
        return super().create_initialization_options(told, experimental_capabilities, extensions)

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> types.ServerCapabilities:
        """Say of resources that they never change: they are recorded results."""
        found = super().get_capabilities(
            notification_options, experimental_capabilities, extensions, protocol_version=protocol_version
        )
        return found.model_copy(update={"resources": types.ResourcesCapability()})


class Door:
    """Serves clients of one agent, each in whichever version of the protocol it opens with.

    Attributes:
        server: the package's own.
    """

    def __init__(self, desk: Desk, calls: Calls) -> None:
        self._desk = desk
        self._calls = calls
        self._results = mcp_results.Results(desk)
        table = desk.dispatcher.table
        self._rows = mcp_tools.by_name(table)
        self._call_row = table[CALL]
        self._declared = Declared(desk, calls, table)
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
            on_list_resources=self._resources,
            on_list_resource_templates=self._templates,
            on_read_resource=self._read,
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

    def _state(self) -> tuple[object, ...]:
        """What the list rests on: names, and of declared servers the rights themselves."""
        servers = self._declared.servers()
        return (*self._offered(), *servers, self._desk.thread.rights.version if servers else "")

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
        """Say that other tools are offered, once for each time that they are."""
        known = self._state()
        while True:
            await self._changed.wait()
            self._changed.clear()
            now = self._state()
            if now == known:
                continue
            known = now
            await self._bus.publish(ToolsListChanged())
            for peer in tuple(self._peers):
                # Whoever doesn't read now looks at its list when it does.
                with anyio.move_on_after(TELL_S):
                    await peer.send_tool_list_changed()

    # -- calls --------------------------------------------------------------------------------------------------

    async def _call(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        row, given = self._rows.get(params.name), params.arguments or {}
        if row is None:
            lent = await self._declared.find(params.name)
            if lent is None:
                text = f"there is no tool `{params.name[:64]}`; list the tools to see those that there are"
                raise MCPError(types.INVALID_PARAMS, text)
            row, given = self._call_row, lent.arguments(given)
        try:
            raw = mcp_tools.arguments(row, given)
        except InvalidRequest as error:
            return mcp_results.failed(error)
        asked = await self._calls.ask(row, raw)
        again, told = asked.told, False
        try:
            found = await asked.first()
            if isinstance(found, Parked):
                found = await self._person(context, params, asked, found, again=again)
            if isinstance(found, types.InputRequiredResult):
                told = True
                return found
            if isinstance(found, Parked):
                told = True
                return mcp_results.parked(params.name, found)
            return await self._answer(row, asked, found)
        finally:
            if told or not asked.over:
                self._calls.leave(asked, told=told)

    async def _answer(self, row: Row, asked: Asked, answer: Answer) -> types.CallToolResult:
        if answer.withheld:
            # Nobody is told: the program is ended, and this connection with it.
            await self._desk.closed.wait()
            raise MCPError(types.INTERNAL_ERROR, "the program has ended")
        if answer.failure is not None:
            return mcp_results.failed(answer.failure)
        try:
            if row is self._call_row:
                return mcp_results.passed_on(answer, asked.place)
            return mcp_results.done(row, answer, asked.place)
        except Exception:  # noqa: BLE001 - a bug is logged, as often as the log can bear
            return mcp_results.failed(self._desk.bug(row.action))

    async def _person(
        self,
        context: Context,
        params: types.CallToolRequestParams,
        asked: Asked,
        parked: Parked,
        *,
        again: bool,
    ) -> Answer | Parked | types.InputRequiredResult:
        """What comes of a call that waits for a person: its answer, if the client's user waits for it."""
        session = context.session
        capabilities = session.client_capabilities
        elicits = capabilities is not None and capabilities.elicitation is not None
        if params.input_responses is not None:
            said = params.input_responses.get("wait")
            return await self._decided(asked, parked, said if isinstance(said, types.ElicitResult) else None)
        if again:
            with anyio.move_on_after(WAIT_S):
                return await asked.answered()
            return parked
        if not elicits:
            return parked
        message = mcp_results.question(params.name, parked)
        if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
            form = types.ElicitRequestFormParams(message=message, requested_schema=_WAIT)
            return types.InputRequiredResult(input_requests={"wait": types.ElicitRequest(params=form)})
        answer = asyncio.ensure_future(asked.answered())
        question = asyncio.ensure_future(session.elicit_form(message, _WAIT, context.request_id))
        try:
            await asyncio.wait({answer, question}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            try:
                said = question.result()
            except (MCPError, ValidationError):
                said = None
            return await self._decided(asked, parked, said)
        finally:
            answer.cancel()
            question.cancel()

    @staticmethod
    async def _decided(asked: Asked, parked: Parked, said: types.ElicitResult | None) -> Answer | Parked:
        waits = said is not None and said.action == "accept" and (said.content or {}).get("wait") is not False
        return await asked.answered() if waits else parked

    # -- long results -------------------------------------------------------------------------------------------

    async def _resources(
        self, _: Context, __: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[], ttl_ms=0, cache_scope="private")

    async def _templates(
        self, _: Context, __: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(
            resource_templates=[mcp_results.template()], ttl_ms=0, cache_scope="private"
        )

    async def _read(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        try:
            contents = await self._results.read(str(params.uri))
        except SyscallError as error:
            missing = context.protocol_version not in MODERN_PROTOCOL_VERSIONS
            code = mcp_results.RESOURCE_NOT_FOUND if missing else types.INVALID_PARAMS
            raise MCPError(code, error.message, data={"uri": str(params.uri)[:256]}) from None
        return types.ReadResourceResult(contents=[contents], ttl_ms=0, cache_scope="private")


def _message(data: bytes) -> SessionMessage | None:
    """A message; None: it is none."""
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(data, by_name=False))
    except ValidationError:
        return None
