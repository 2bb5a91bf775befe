"""`mcp.resources`: list the resources of a declared MCP server that the agent may read, and the templates of more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.policy.actions import RESOURCE
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.errors import Denied
from ringfence.syscalls.mcp_common import ANSWER_BYTES_MAX, action_of, server_of
from ringfence.syscalls.mcp_reading import cleaned, taint
from ringfence.syscalls.mcp_uris import unusable, unusable_template
from ringfence.syscalls.payload import Room

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import McpResource


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which server."""

    server: str = ""


class Result(msgspec.Struct, frozen=True):
    """Resources and templates."""

    resources: list[Any]
    templates: list[Any]
    withheld: int


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the server.

    Raises:
        NoSuchResource: no such server, or it is unavailable.
    """
    resource = server_of(arguments.server, env)
    question = Question(action="mcp.resources", resource=resource.name)
    return Plan(resource=resource.name, questions=(question,), data=resource)


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del call, arguments
    return Room(most=ANSWER_BYTES_MAX, least=1)


async def run(call: Call, arguments: Arguments) -> Result:
    """List them; what no rule lets the agent read is left out and counted.

    Raises:
        Denied: no rule lets it read any resource of the server.
        CallFailed: the server can't be reached, or does not say.
    """
    del arguments
    resource: McpResource = call.plan.data
    action = action_of(resource.name, RESOURCE)
    if not call.env.may_any(action):
        raise Denied(
            f"nothing allows any resource of `{resource.name}`; ask the operator: ringfence grant {call.env.agent} "
            f"'{action}: \"URI\"'"
        )
    await call.check_live()
    found = await call.env.servers.listed(resource.name, "resources")
    made = await call.env.servers.listed(resource.name, "templates")
    seen = [one for one in found if _seen(call.env, action, one)]
    templates = [one for one in made if not unusable_template(str(one.get("uriTemplate", "")))]
    if seen or templates:
        taint(call, resource)
    kept = {"resources": _ordered(seen, "uri"), "templates": _ordered(templates, "uriTemplate")}
    clean = await cleaned(call, resource, kept)
    return Result(
        resources=clean["resources"],
        templates=clean["templates"],
        withheld=len(found) + len(made) - len(seen) - len(templates),
    )


def _seen(env: Env, action: str, one: Mapping[str, Any]) -> bool:
    uri = str(one.get("uri", ""))
    return not unusable(uri) and env.may(Question(action=action, resource=uri))


def _ordered(found: Sequence[Mapping[str, Any]], key: str) -> Sequence[Mapping[str, Any]]:
    return sorted(found, key=lambda one: str(one.get(key, "")))
