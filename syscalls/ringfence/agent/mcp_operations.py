"""Operations on tools of declared MCP servers, for both front ends; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringfence.agent.operations import Json, Operation
from ringfence.agent.values import Found

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """One tool of a server, as its definition was taken.

    Attributes:
        name: of the tool.
        title: for people; empty: it has none.
        description: what its server says that it does.
        input_schema: JSON Schema of its arguments.
        output_schema: JSON Schema of its structured answer; None: it says none.
        effect: what a call counts as: `READ`, `EXTERNAL` or `DESTROY`.
        changed: whether the server defines it in another way by now, so that calls wait for an operator.
    """

    name: str
    title: str
    description: str
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any] | None
    effect: str
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class McpAnswer:
    """What a tool answered.

    Attributes:
        content: blocks, each as the protocol has them: `{"type": "text", "text": …}` and the like.
        structured: the answer as data; None: the tool gives none.
        is_error: whether the tool itself says that it failed.
    """

    content: Sequence[Mapping[str, Any]]
    structured: Any
    is_error: bool

    @property
    def text(self) -> str:
        """All blocks of text, one after the other."""
        return "\n".join(str(block.get("text", "")) for block in self.content if block.get("type") == "text")


def tools(server: str) -> Operation[Found[McpTool]]:
    """List tools."""

    def decode(result: Json) -> Found[McpTool]:
        return Found(map(_tool, result.get("tools", ())), withheld=int(result.get("withheld", 0)))

    return Operation("mcp.tools", {"server": server}, decode)


def _tool(found: Json) -> McpTool:
    return McpTool(
        name=found.get("name", ""),
        title=found.get("title", ""),
        description=found.get("description", ""),
        input_schema=found.get("input_schema") or {},
        output_schema=found.get("output_schema"),
        effect=found.get("effect", ""),
        changed=bool(found.get("changed", False)),
    )


def call(server: str, tool: str, arguments: Mapping[str, Any] | None) -> Operation[McpAnswer]:
    """Call one."""
    given: Json = {"server": server, "tool": tool}
    if arguments:
        given["arguments"] = dict(arguments)

    def decode(result: Json) -> McpAnswer:
        return McpAnswer(
            content=result.get("content") or [],
            structured=result.get("structured"),
            is_error=bool(result.get("is_error", False)),
        )

    return Operation("mcp.call", given, decode)
