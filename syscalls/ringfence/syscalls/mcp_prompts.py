"""`mcp.prompts`: list the prompts of a declared MCP server that the agent may get."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.policy.actions import PROMPT
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.errors import Denied
from ringfence.syscalls.mcp_common import ANSWER_BYTES_MAX, Definition, action_of, nameable, server_of
from ringfence.syscalls.mcp_reading import cleaned, taint
from ringfence.syscalls.payload import Room

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import McpResource


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which server."""

    server: str = ""


class Result(msgspec.Struct, frozen=True):
    """The prompts."""

    prompts: list[Any]
    changed: list[str]
    withheld: int


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the server.

    Raises:
        NoSuchResource: no such server, or it is unavailable.
    """
    resource = server_of(arguments.server, env)
    question = Question(action="mcp.prompts", resource=resource.name)
    return Plan(resource=resource.name, questions=(question,), data=resource)


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del call, arguments
    return Room(most=ANSWER_BYTES_MAX, least=1)


async def run(call: Call, arguments: Arguments) -> Result:
    """List them, as their definitions were taken; what no rule lets the agent get is left out and counted.

    Raises:
        Denied: no rule lets it get any prompt of the server.
        CallFailed: the server can't be reached, or does not say.
    """
    del arguments
    resource: McpResource = call.plan.data
    action = action_of(resource.name, PROMPT)
    if not call.env.may_any(action):
        raise Denied(
            f"nothing allows any prompt of `{resource.name}`; ask the operator: ringfence grant {call.env.agent} "
            f"'{action}: \"NAME\"'"
        )
    await call.check_live()
    found = await call.env.servers.look_at_prompts(resource.name)
    seen = {name: one for name, one in sorted(found.items()) if _seen(call.env, action, name)}
    if seen:
        taint(call, resource)
    clean = await cleaned(call, resource, {"prompts": [_shown(name, one) for name, one in seen.items()]})
    changed = [name for name, one in seen.items() if one.changed]
    return Result(prompts=clean["prompts"], changed=changed, withheld=len(found) - len(seen))


def _seen(env: Env, action: str, name: str) -> bool:
    return nameable(name) and env.may(Question(action=action, resource=name))


def _shown(name: str, one: Definition) -> dict[str, Any]:
    # Empty where only the hash of another one is known.
    return json.loads(one.taken) if one.taken else {"name": name}
