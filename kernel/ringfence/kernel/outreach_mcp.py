"""The kernel's sessions with declared MCP servers, and the definitions of their tools that it takes.

Each agent has a session of its own with each server that it uses, so that none sees what another one's left there. A session is opened when
it is first needed, ended when nobody has used it for a while, and opened anew where it was lost: nothing that was sent on it is sent again.

INVARIANT: agents are shown definitions as they were taken, and a tool whose definition is another by now is not called unless a person says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ringfence.kernel.config import VERSION
from ringfence.kernel.journal.types import Unavailable
from ringfence.kernel.outreach_mcp_definitions import ChangedTool, compare
from ringfence.syscalls.codec import holds_nul
from ringfence.syscalls.errors import CallFailed, JournalUnavailable
from ringfence.syscalls.mcp_common import (
    PROMPT_KEPT,
    Definition,
    Lost,
    McpSession,
    Sent,
    declared_tool,
    definition_bytes,
)
from ringfence.syscalls.redaction import redactor_of

if TYPE_CHECKING:
    from ringfence.kernel.journal.store import Store
    from ringfence.kernel.outreach_a2a import Cards
    from ringfence.syscalls.declared import McpResource

log = logging.getLogger(__name__)

IDLE_S = 300.0
"""A session that nobody has used for so long is ended."""
OPERATOR = "operator"
"""Whose session it is where an operator looks; no agent has that id, for each ends in letters and digits after a dash."""
_LOOK_S = 30.0
_TEND_S = 10.0


class LiveSession(McpSession, Protocol):
    """A session as the kernel handles it."""

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        ...

    async def ready(self, within_s: float) -> None:
        """Wait until the server has been greeted."""
        ...

    async def listed(self, kind: str) -> list[dict[str, Any]]:
        """All that the server lists of a kind: `tools`, `resources` or `templates`."""
        ...

    async def close(self) -> None:
        """End it; never raises."""
        ...


Starter = Callable[["McpResource", str], Awaitable[LiveSession]]
"""Starts a server of a command for an agent, in a sandbox of its own."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """A session, and what it was opened by."""

    session: LiveSession
    resource: McpResource
    used_at: float
    calls: int = 0


@dataclass(slots=True)
class Servers:
    """All sessions of this kernel."""

    store: Store
    declared: Callable[[], Mapping[str, McpResource]]
    start: Starter
    lives: Callable[[str], bool]
    cards: Cards
    _held: dict[tuple[str, str], _Held] = field(default_factory=dict[tuple[str, str], _Held])
    _locks: dict[tuple[str, str], asyncio.Lock] = field(default_factory=dict[tuple[str, str], asyncio.Lock])
    _idle: asyncio.Task[None] | None = None
    _closing: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    def of(self, agent: str) -> AgentServers:
        """The servers as one agent reaches them."""
        return AgentServers(self, agent)

    def _declared(self, server: str) -> McpResource:
        resource = self.declared().get(server)
        if resource is None:
            raise CallFailed(f"`{server}` is not declared any more; nothing was sent", sent="no")
        return resource

    async def session(self, agent: str, server: str) -> LiveSession:
        """The session of an agent with a server.

        Raises:
            CallFailed: it can't be had; nothing was sent that does anything.
        """
        key, resource = (agent, server), self._declared(server)
        async with self._locks.setdefault(key, asyncio.Lock()):
            held = self._held.get(key)
            # One that was opened with another credential, or elsewhere, is not used any more.
            if held is None or not held.session.alive or held.resource != resource:
                await self._drop(key)
                held = _Held(session=await self._open(agent, resource), resource=resource, used_at=0.0)
                self._held[key] = held
            held.used_at = time.monotonic()
        if self._idle is None or self._idle.done():
            self._idle = asyncio.create_task(self._tend(), name="ringfence mcp idle")
        return held.session

    async def _open(self, agent: str, resource: McpResource) -> LiveSession:
        # Beside the loop, for it takes long the first time.
        try:
            client = await asyncio.to_thread(importlib.import_module, "ringfence.syscalls.mcp_client")
        except ImportError as error:
            text = f"can't be spoken to: the operator installs what the kernel lacks ({error.name}): pip install 'ringfence[mcp]'"
            raise failed(resource, text) from None
        session: LiveSession | None = None
        try:
            opened = (
                await self.start(resource, agent) if resource.command else client.open_http(resource, VERSION)
            )
            session = opened
            await opened.ready(resource.timeout_s)
        except (Lost, TimeoutError) as error:
            why = str(error) or f"did not answer within {resource.timeout_s:g} s"
            raise failed(resource, why) from None
        else:
            session = None
            return opened
        finally:
            if session is not None:
                self._later(session.close())

    @contextlib.contextmanager
    def busy(self, agent: str, server: str) -> Generator[None]:
        """A call is under way while this is entered: the session is kept."""
        held = self._held.get((agent, server))
        if held is None:
            yield
            return
        held.calls += 1
        try:
            yield
        finally:
            held.calls -= 1
            held.used_at = time.monotonic()

    async def lost(self, agent: str, server: str, session: LiveSession) -> None:
        """Let go of a session that is of no use any more."""
        held = self._held.get((agent, server))
        if held is not None and held.session is session:
            await self._drop((agent, server))

    async def _drop(self, key: tuple[str, str]) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._later(held.session.close())

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _tend(self) -> None:
        """End sessions that nobody uses, until there are none."""
        while self._held:
            await asyncio.sleep(_TEND_S)
            for key, held in list(self._held.items()):
                over = (
                    held.used_at + IDLE_S <= time.monotonic()
                    or not self.lives(key[0])
                    or self._other(key[1], held)
                )
                # INVARIANT: a call that is under way has its answer awaited, whatever became of its agent.
                if not held.session.alive or (over and not held.calls):
                    await self._drop(key)

    def _other(self, server: str, held: _Held) -> bool:
        """Whether the kernel file has another server there by now, or none."""
        return self.declared().get(server) != held.resource

    async def reconfigure(self) -> None:
        """End sessions with servers that the kernel file in force declares otherwise; those with a call under way end after it."""
        for key, held in list(self._held.items()):
            if self._other(key[1], held) and not held.calls:
                await self._drop(key)

    async def close(self) -> None:
        """End all of them."""
        if self._idle is not None:
            self._idle.cancel()
        for key in list(self._held):
            await self._drop(key)
        if self._closing:
            await asyncio.wait(list(self._closing), timeout=10.0)

    # -- definitions ----------------------------------------------------------------------------------------------

    async def look(self, agent: str, server: str, kind: str = "tools") -> dict[str, Definition]:
        """The tools, or prompts, as a server defines them now, held against what was taken.

        Raises:
            CallFailed: it can't be reached, or does not say.
            JournalUnavailable: the database is away.
        """
        resource = self._declared(server)
        listed = await self.listed(agent, server, kind)
        given: dict[str, bytes] = {}
        for one in listed:
            tool = str(one.get("name", ""))
            if tool in given:
                raise failed(resource, f"lists `{tool[:80]}` twice among its {kind}")
            if holds_nul(one):
                raise failed(resource, f"defines `{tool[:80]}` with a NUL character, which can't be kept")
            given[tool] = definition_bytes(one)
        try:
            return await self._compared(resource, given, PROMPT_KEPT if kind == "prompts" else "")
        except Unavailable as error:
            raise JournalUnavailable(f"the database is away: {error}; make the call again") from error

    async def listed(self, agent: str, server: str, kind: str) -> Sequence[Mapping[str, Any]]:
        """What a server lists now, whatever was taken of it before.

        Raises:
            CallFailed: it can't be reached, or does not say.
        """
        resource = self._declared(server)
        limit = min(resource.timeout_s, _LOOK_S)
        session = await self.session(agent, resource.name)
        try:
            async with asyncio.timeout(limit):
                return await session.listed(kind)
        except (Lost, TimeoutError):
            # It only reads: a session that was lost meanwhile is had anew.
            await self.lost(agent, resource.name, session)
        session = await self.session(agent, resource.name)
        try:
            async with asyncio.timeout(limit):
                return await session.listed(kind)
        except (Lost, TimeoutError) as error:
            await self.lost(agent, resource.name, session)
            raise failed(resource, str(error) or f"did not list its {kind} within {limit:g} s") from None

    async def _compared(
        self, resource: McpResource, given: Mapping[str, bytes], before: str
    ) -> dict[str, Definition]:
        known = {one.tool: one for one in await self.store.mcp_tools(resource.name)}
        found: dict[str, Definition] = {}
        told: list[dict[str, str]] = []
        for tool, data in given.items():
            declared = None if before else declared_tool(resource, tool)
            wanted = "" if declared is None else declared.definition
            one, news = compare(before + tool, data, known.get(before + tool), wanted)
            found[tool] = one
            if news is not None:
                told.append(news)
        if told:
            await self.store.see_mcp_tools(resource.name, told)
        return found


def failed(resource: McpResource, why: str) -> CallFailed:
    """A server that can't be used, for people and without its credentials."""
    text = redactor_of(resource.secrets).text(why)
    return CallFailed(f"`{resource.name}` {text}; nothing was sent", sent="no")


class AgentServers:
    """The servers as one agent reaches them."""

    def __init__(self, servers: Servers, agent: str) -> None:
        self._servers = servers
        self._agent = agent

    @property
    def declared(self) -> Mapping[str, McpResource]:
        """The servers by name, as the kernel file in force has them."""
        return self._servers.declared()

    async def look(self, server: str) -> Mapping[str, Definition]:
        """The tools of a server by name; see `Servers.look`."""
        return await self._servers.look(self._agent, server)

    async def look_at_prompts(self, server: str) -> Mapping[str, Definition]:
        """The prompts of a server by name; see `Servers.look`."""
        return await self._servers.look(self._agent, server, "prompts")

    async def listed(self, server: str, kind: str) -> Sequence[Mapping[str, Any]]:
        """What a server lists; see `Servers.listed`."""
        return await self._servers.listed(self._agent, server, kind)

    async def session(self, server: str) -> McpSession:
        """The agent's session with a server."""
        return _Watched(self._servers, self._agent, server, await self._servers.session(self._agent, server))

    def doubt(self, server: str, definition: Definition) -> ChangedTool:
        """Why a call of a tool that changed waits."""
        return ChangedTool(self._servers.store, server, definition)


class _Watched:
    """A session that is let go of once it has lost an answer."""

    def __init__(self, servers: Servers, agent: str, server: str, session: LiveSession) -> None:
        self._servers, self._agent, self._server, self._session = servers, agent, server, session

    async def ask(
        self, method: str, params: Mapping[str, Any], effect_id: str, sent: Sent
    ) -> Mapping[str, Any]:
        """Send one request, once."""
        try:
            with self._servers.busy(self._agent, self._server):
                return await self._session.ask(method, params, effect_id, sent)
        except Lost:
            await self._servers.lost(self._agent, self._server, self._session)
            raise
