"""Definitions of what MCP servers offer, held against those that were taken."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringfence.syscalls.mcp_common import Definition, definition_hash

if TYPE_CHECKING:
    from ringfence.kernel.journal.store import Store
    from ringfence.kernel.journal.store_mcp import McpToolRecord

KERNEL_FILE = "the kernel file"


def compare(
    tool: str, data: bytes, known: McpToolRecord | None, wanted: str
) -> tuple[Definition, dict[str, str] | None]:
    """A tool as it stands now, and what the store does not know of it yet."""
    now = definition_hash(data)
    taken = now if known is None else known.taken_hash
    if wanted:
        taken = wanted
    same = now == taken
    text = data if same else b"" if known is None or known.taken_hash != taken else known.taken.encode()
    one = Definition(
        tool=tool,
        taken=text,
        taken_hash=taken,
        offered=b"" if same else data,
        offered_hash="" if same else now,
    )
    if known is not None and known.offered_hash == one.offered_hash:
        return one, None
    news = {
        "tool": tool,
        "taken": text.decode(),
        "taken_hash": taken,
        "by": KERNEL_FILE if wanted else "",
        "offered": one.offered.decode(),
        "offered_hash": one.offered_hash,
    }
    return one, news


def shown(definition: str | bytes) -> str:
    """A definition for people: one line for each value."""
    if not definition:
        return ""
    return json.dumps(json.loads(definition), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def difference(taken: str | bytes, offered: str | bytes) -> str:
    """What changed in a definition, as a unified diff."""
    sides = [shown(side).splitlines(keepends=True) for side in (taken, offered)]
    return "".join(difflib.unified_diff(sides[0], sides[1], "taken", "offered"))


class ChangedTool:
    """A tool that its server defines in another way by now; until an operator takes that, calls wait."""

    def __init__(self, store: Store, server: str, definition: Definition) -> None:
        self._store = store
        self._server = server
        self._definition = definition

    @property
    def about(self) -> str:
        """Whoever approves has seen this definition."""
        return self._definition.offered_hash

    async def why(self) -> str:
        """In words for people; empty: it was taken meanwhile."""
        known = {one.tool: one for one in await self._store.mcp_tools(self._server)}
        one, tool = known.get(self._definition.tool), self._definition.tool
        if one is not None and one.taken_hash == self._definition.offered_hash:
            return ""
        return f"the MCP server `{self._server}` defines `{tool}` in another way than before; see: ringfence mcp tools {self._server} {tool}"

    def detail(self) -> Mapping[str, Any]:
        """What changed."""
        return {
            "definition": {"taken": self._definition.taken_hash, "offered": self._definition.offered_hash},
            "diff": difference(self._definition.taken, self._definition.offered),
        }
