"""`mcp.read`: read a resource of a declared MCP server."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, cast

import msgspec
from ringfence.policy.actions import RESOURCE
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.errors import CallFailed, InvalidRequest
from ringfence.syscalls.mcp_common import ANSWER_BYTES_MAX, action_of, server_of
from ringfence.syscalls.mcp_reading import cleaned, fetch
from ringfence.syscalls.mcp_uris import unusable
from ringfence.syscalls.payload import Room

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import McpResource


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Server and URI."""

    server: str = ""
    uri: str = ""


class Result(msgspec.Struct, frozen=True):
    """What is there."""

    contents: list[Any]


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the server, and see to it that the URI says what rules take it for.

    Raises:
        InvalidRequest: the URI can be read in two ways, or is none.
        NoSuchResource: no such server, or it is unavailable.
    """
    resource = server_of(arguments.server, env)
    why = unusable(arguments.uri)
    if why:
        raise InvalidRequest(f"the URI `{arguments.uri[:80]}` can't be used: {why}")
    question = Question(action=action_of(resource.name, RESOURCE), resource=arguments.uri)
    return Plan(resource=f"{resource.name} {arguments.uri}", questions=(question,), data=resource)


def _readable(part: Any) -> bool:
    """Whether a part is one as the protocol has them."""
    if not isinstance(part, dict):
        return False
    said = cast("dict[str, Any]", part)
    if isinstance(said.get("text"), str):
        return isinstance(said.get("uri"), str)
    try:
        base64.b64decode(said["blob"], validate=True)
    except (KeyError, TypeError, ValueError):
        return False
    return isinstance(said.get("uri"), str)


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del call, arguments
    return Room(most=ANSWER_BYTES_MAX, least=1)


async def run(call: Call, arguments: Arguments) -> Result:
    """Read it.

    Raises:
        CallFailed: the server can't be reached, has no such resource, or gives none.
        QuotaExceeded: the server asks its callers to wait.
        Revoked: from `check_live`, before anything is sent.
    """
    resource: McpResource = call.plan.data
    what = f"the resource `{arguments.uri[:200]}`"
    raw = await fetch(call, resource, "resources/read", {"uri": arguments.uri}, what)
    contents: Any = raw.get("contents")
    if not isinstance(contents, list) or not all(map(_readable, cast("list[Any]", contents))):
        raise CallFailed(f"`{resource.name}` gave an answer that can't be read", sent="yes")
    return Result(
        contents=(await cleaned(call, resource, {"contents": cast("list[Any]", contents)}))["contents"]
    )
