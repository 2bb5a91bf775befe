"""`mcp.tools`: list the tools of a declared MCP server that the agent may call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.errors import Denied
from ringfence.syscalls.mcp_common import (
    Definition,
    action_of,
    declared_tool,
    effect_of,
    sayable,
    server_of,
)
from ringfence.syscalls.redaction import redactor_for

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import McpResource


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which server."""

    server: str = ""


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool, as it was taken."""

    name: str = ""
    title: str = ""
    description: str = ""
    input_schema: Any = None
    output_schema: Any = None
    effect: str = ""
    changed: bool = False


class Result(msgspec.Struct, frozen=True):
    """The tools."""

    tools: list[Tool]
    withheld: int


class _Said(msgspec.Struct, rename="camel"):
    title: str = ""
    description: str = ""
    input_schema: Any = None
    output_schema: Any = None


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the server.

    Raises:
        NoSuchResource: no such server, or it is unavailable.
    """
    resource = server_of(arguments.server, env)
    question = Question(action="mcp.tools", resource=resource.name)
    return Plan(resource=resource.name, questions=(question,), data=resource)


async def run(call: Call, arguments: Arguments) -> Result:
    """List them, as their definitions were taken; what no rule lets the agent call is left out and counted.

    Raises:
        Denied: no rule lets it call any tool of the server.
        CallFailed: the server can't be reached, or does not say.
    """
    del arguments
    resource: McpResource = call.plan.data
    if not call.env.may_any(f"mcp.{resource.name}"):
        raise Denied(
            f"nothing allows any tool of `{resource.name}`; ask the operator: ringfence grant {call.env.agent} "
            f"'mcp.{resource.name}.TOOL: \"*\"'"
        )
    await call.check_live()
    found = await call.env.servers.look(resource.name)
    seen = [found[tool] for tool in sorted(found) if _seen(call.env, resource, tool)]
    if resource.untrusted and seen:
        call.taint(f"the MCP server `{resource.name}`")
    hide = redactor_for(call.env, resource.secrets)
    tools = [_tool(resource, one, hide.body(one.taken)) for one in seen]
    return Result(tools=tools, withheld=len(found) - len(tools))


def _seen(env: Env, resource: McpResource, tool: str) -> bool:
    if not sayable(tool):
        return False
    declared = declared_tool(resource, tool)
    if declared is not None and declared.subject:
        return env.may_any(action_of(resource.name, tool))
    return env.may(Question(action=action_of(resource.name, tool), resource=tool))


def _tool(resource: McpResource, one: Definition, clean: bytes) -> Tool:
    try:
        said = msgspec.json.decode(clean, type=_Said)
    except msgspec.DecodeError:
        said = _Said()
    texts = tuple(filter(None, (one.taken, one.offered)))
    return Tool(
        name=one.tool,
        title=said.title,
        description=said.description,
        input_schema=said.input_schema,
        output_schema=said.output_schema,
        effect=effect_of(declared_tool(resource, one.tool), texts).name,
        changed=one.changed,
    )
