"""Tools of MCP servers, as their definitions were taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.types.json import Jsonb
from ringfence.kernel.journal.store_base import StoreBase


@dataclass(frozen=True, slots=True, kw_only=True)
class McpToolRecord:
    """One tool.

    Attributes:
        taken: JSON of the definition that agents are shown; empty: only its hash is known, from the kernel file.
        taken_by: who took it; empty: it was the first that was seen.
        offered: JSON of another one that the server gives now; empty: it gives the same.
    """

    server: str
    tool: str
    taken: str
    taken_hash: str
    taken_at: datetime
    taken_by: str
    offered: str
    offered_hash: str
    offered_at: datetime | None


class McpStore(StoreBase):
    """The part of the store about tools of MCP servers. Every method may raise Unavailable."""

    async def mcp_tools(self, server: str = "") -> list[McpToolRecord]:
        """The tools of a server in the order of their names; an empty name: of all."""
        return await self._all("mcp.tools", McpToolRecord, {"server": server})

    async def see_mcp_tools(self, server: str, tools: Sequence[Mapping[str, str]]) -> None:
        """Take tools that were never seen, and note what others are offered as now.

        Args:
            server: its name.
            tools: each with `tool`, `taken`, `taken_hash`, `by`, `offered` and `offered_hash`; what is taken counts only for new ones.
        """
        await self._tuple("mcp.see", {"server": server, "tools": Jsonb(list(tools))})

    async def accept_mcp_tool(
        self, server: str, tool: str, offered_hash: str, by: str
    ) -> McpToolRecord | None:
        """Take the definition that is offered; None: another one is by now, or none."""
        values = {"server": server, "tool": tool, "hash": offered_hash, "by": by}
        return await self._first("mcp.accept", McpToolRecord, values)
