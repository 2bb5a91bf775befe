"""Operations on tools, resources and prompts of declared MCP servers, for both front ends; no I/O."""

from __future__ import annotations

import base64
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
        requests: what the server asks for before it answers, each as the protocol has it; empty: nothing. Call again with `responses`.
        state: what goes with these, unchanged.
    """

    content: Sequence[Mapping[str, Any]]
    structured: Any
    is_error: bool
    requests: Mapping[str, Any]
    state: str

    @property
    def text(self) -> str:
        """All blocks of text, one after the other."""
        return "\n".join(str(block.get("text", "")) for block in self.content if block.get("type") == "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpResource:
    """One resource of a server, or a template of more, as it lists it.

    Attributes:
        uri: of the resource; of a template with variables in braces.
        name: of it.
        title: for people; empty: it has none.
        description: what its server says that it is.
        mime_type: of what is there; empty: it says none.
        size: of that in bytes; None: it says none.
    """

    uri: str
    name: str
    title: str
    description: str
    mime_type: str
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class McpResources:
    """What a server has to read.

    Attributes:
        resources: that the agent may read, in the order of their URIs.
        templates: of URIs of more; whether one may be read is known when it is.
        withheld: how many there are that no rule lets it read.
    """

    resources: Sequence[McpResource]
    templates: Sequence[McpResource]
    withheld: int


@dataclass(frozen=True, slots=True, kw_only=True)
class McpPart:
    """One part of a resource.

    Attributes:
        uri: of the part.
        mime_type: of it; empty: the server says none.
        text: what is there; None: it is no text.
        data: what is there where it is no text, else None.
    """

    uri: str
    mime_type: str
    text: str | None
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class McpContents:
    """What a resource has.

    Attributes:
        parts: one or more.
    """

    parts: Sequence[McpPart]

    @property
    def text(self) -> str:
        """All parts of text, one after the other."""
        return "\n".join(part.text for part in self.parts if part.text is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpPrompt:
    """One prompt of a server, as its definition was taken.

    Attributes:
        name: of the prompt.
        title: for people; empty: it has none.
        description: what its server says that it is for.
        arguments: of it: name, and whether it has to be given.
        changed: whether the server defines it in another way by now, so that calls wait for an operator.
    """

    name: str
    title: str
    description: str
    arguments: Mapping[str, bool]
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class McpMessages:
    """What a prompt says.

    Attributes:
        description: what it is for; empty: the server says nothing.
        messages: each as the protocol has them: `role` and `content`.
    """

    description: str
    messages: Sequence[Mapping[str, Any]]

    @property
    def text(self) -> str:
        """All messages of text, one after the other."""
        contents: list[Mapping[str, Any]] = [message.get("content") or {} for message in self.messages]
        return "\n".join(str(one.get("text", "")) for one in contents if one.get("type") == "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpCompletion:
    """What an argument may be.

    Attributes:
        values: the likeliest first.
        total: how many there are in all; 0: the server does not say.
        has_more: whether there are more.
    """

    values: Sequence[str]
    total: int
    has_more: bool


def prompts(server: str) -> Operation[Found[McpPrompt]]:
    """List prompts."""

    def decode(result: Json) -> Found[McpPrompt]:
        changed: set[str] = set(result.get("changed") or [])
        found = [_prompt(one, changed) for one in result.get("prompts") or ()]
        return Found(found, withheld=int(result.get("withheld", 0)))

    return Operation("mcp.prompts", {"server": server}, decode)


def _prompt(one: Json, changed: set[str]) -> McpPrompt:
    name = str(one.get("name", ""))
    return McpPrompt(
        name=name,
        title=str(one.get("title") or ""),
        description=str(one.get("description") or ""),
        arguments={
            str(item.get("name", "")): bool(item.get("required")) for item in one.get("arguments") or ()
        },
        changed=name in changed,
    )


def prompt(server: str, name: str, arguments: Mapping[str, str] | None) -> Operation[McpMessages]:
    """Get one."""
    given: Json = {"server": server, "prompt": name}
    if arguments:
        given["arguments"] = dict(arguments)

    def decode(result: Json) -> McpMessages:
        return McpMessages(
            description=result.get("description", ""), messages=list(result.get("messages") or ())
        )

    return Operation("mcp.prompt", given, decode)


def complete(
    server: str, argument: str, value: str, prompt: str, uri: str, context: Mapping[str, str] | None
) -> Operation[McpCompletion]:
    """Ask what an argument may be."""
    given: Json = {"server": server, "argument": argument, "value": value, "prompt": prompt, "uri": uri}
    if context:
        given["context"] = dict(context)

    def decode(result: Json) -> McpCompletion:
        return McpCompletion(
            values=list(result.get("values") or ()),
            total=int(result.get("total", 0)),
            has_more=bool(result.get("has_more", False)),
        )

    return Operation("mcp.complete", given, decode)


def resources(server: str) -> Operation[McpResources]:
    """List resources."""

    def decode(result: Json) -> McpResources:
        return McpResources(
            resources=[_resource(one, "uri") for one in result.get("resources") or ()],
            templates=[_resource(one, "uriTemplate") for one in result.get("templates") or ()],
            withheld=int(result.get("withheld", 0)),
        )

    return Operation("mcp.resources", {"server": server}, decode)


def _resource(one: Json, key: str) -> McpResource:
    return McpResource(
        uri=str(one.get(key, "")),
        name=str(one.get("name", "")),
        title=str(one.get("title") or ""),
        description=str(one.get("description") or ""),
        mime_type=str(one.get("mimeType") or ""),
        size=one.get("size"),
    )


def read(server: str, uri: str) -> Operation[McpContents]:
    """Read one."""

    def decode(result: Json) -> McpContents:
        return McpContents(parts=[_part(one) for one in result.get("contents") or ()])

    return Operation("mcp.read", {"server": server, "uri": uri}, decode)


def _part(one: Json) -> McpPart:
    blob = one.get("blob")
    return McpPart(
        uri=str(one.get("uri", "")),
        mime_type=str(one.get("mimeType") or ""),
        text=one.get("text"),
        data=None if blob is None else base64.b64decode(blob),
    )


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


def call(
    server: str,
    tool: str,
    arguments: Mapping[str, Any] | None,
    can: Sequence[str] = (),
    responses: Mapping[str, Any] | None = None,
    state: str = "",
) -> Operation[McpAnswer]:
    """Call one."""
    given: Json = {"server": server, "tool": tool}
    if arguments:
        given["arguments"] = dict(arguments)
    if can:
        given["can"] = list(can)
    if responses is not None:
        given["responses"] = dict(responses)
    if state:
        given["state"] = state

    def decode(result: Json) -> McpAnswer:
        return McpAnswer(
            content=result.get("content") or [],
            structured=result.get("structured"),
            is_error=bool(result.get("is_error", False)),
            requests=result.get("requests") or {},
            state=result.get("state", ""),
        )

    return Operation("mcp.call", given, decode)
