"""Tools of MCP servers that the operator declared, as tools of an agent's own door: each judged as `mcp.SERVER.TOOL`.

What a server says of its tools comes by `mcp.tools`, a call of the agent as any other: recorded, and tainting where it taints.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from ringfence.kernel.doors.mcp_calls import Calls, Parked
from ringfence.kernel.server.desk import Desk
from ringfence.syscalls.codec import canonical_json

if TYPE_CHECKING:
    from ringfence.kernel.settled import Answer
    from ringfence.syscalls.table import Row

CALL: Final = "mcp.call"
LIST: Final = "mcp.tools"
PREFIX: Final = "mcp_"
NAME_MAX: Final = 64
_OTHER: Final = re.compile(r"[^a-zA-Z0-9_-]")
_MARK: Final = 8


class Told(msgspec.Struct, frozen=True):
    """A tool of a server, as `mcp.tools` tells it."""

    name: str
    title: str = ""
    description: str = ""
    input_schema: Any = None
    output_schema: Any = None
    effect: str = ""


class _Listed(msgspec.Struct, frozen=True):
    tools: list[Told] = []


class Lent(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a server under the name that clients here know it by."""

    name: str
    server: str
    told: Told

    def tool(self) -> dict[str, Any]:
        """As `tools/list` shows it."""
        told = self.told
        schema: Any = told.input_schema
        shown: dict[str, Any] = {
            "name": self.name,
            "title": told.title or f"mcp.{self.server}.{told.name}",
            "description": told.description,
            "inputSchema": schema if isinstance(schema, dict) else {"type": "object"},
            "annotations": {
                "readOnlyHint": told.effect == "READ",
                "destructiveHint": told.effect != "READ",
                "idempotentHint": told.effect == "READ",
                "openWorldHint": True,
            },
        }
        answers: Any = told.output_schema
        if isinstance(answers, dict):
            shown["outputSchema"] = answers
        return shown

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What `mcp.call` takes to call it."""
        return {"server": self.server, "tool": self.told.name, "arguments": dict(given)}


class Declared:
    """The servers of one agent."""

    def __init__(self, desk: Desk, calls: Calls, table: Mapping[str, Row]) -> None:
        self._desk = desk
        self._calls = calls
        self._list = table.get(LIST)
        self._known: dict[str, Lent] = {}

    def servers(self) -> Sequence[str]:
        """Those of which rules let the agent call something."""
        environment = self._desk.thread.environment
        return [name for name in sorted(environment.mcp) if environment.may_any(f"mcp.{name}")]

    async def tools(self) -> Sequence[Lent]:
        """All that the agent may call or ask for. A server that can't be asked now has none."""
        lists = await asyncio.gather(*(self._of(server) for server in self.servers()))
        self._known = {lent.name: lent for listed in lists for lent in listed}
        return list(self._known.values())

    async def find(self, name: str) -> Lent | None:
        """The tool of a name; None: there is none."""
        if not name.startswith(PREFIX):
            return None
        if name not in self._known:
            # Of a client that listed them over another connection.
            await self.tools()
        return self._known.get(name)

    def schema(self, name: str) -> Mapping[str, Any] | None:
        """Schema of the arguments of a tool that was listed."""
        lent = self._known.get(name)
        return None if lent is None else lent.tool()["inputSchema"]

    async def _of(self, server: str) -> Sequence[Lent]:
        assert self._list is not None  # noqa: S101 - a kernel with servers has the row
        result = await listed_by(self._calls, self._list, server)
        if result is None:
            return []
        listed = msgspec.json.decode(result, type=_Listed)
        return [Lent(name=lent_name(server, one.name), server=server, told=one) for one in listed.tools]


async def listed_by(calls: Calls, row: Row, server: str) -> bytes | None:
    """What a row that lists tells of a server, as JSON; None: nothing now."""
    asked = await calls.ask(row, canonical_json({"server": server}))
    told = False
    try:
        found: Answer | Parked = await asked.first()
        if isinstance(found, Parked):
            told = True
            return None
        return None if found.failure is not None else found.result
    finally:
        if told or not asked.over:
            calls.leave(asked, told=told)


def lent_name(server: str, tool: str) -> str:
    """A name in the characters and the length that clients take; where that is another, with a mark of the true one."""
    true = f"{PREFIX}{server}_{tool}"
    plain = _OTHER.sub("_", true)
    if plain == true and len(true) <= NAME_MAX and "_" not in server:
        return plain
    mark = hashlib.sha256(json.dumps([server, tool]).encode()).hexdigest()[:_MARK]
    return f"{plain[: NAME_MAX - _MARK - 1]}_{mark}"
