"""`mcp.complete`: ask a declared MCP server what an argument of a prompt, or a variable of a template of URIs, may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from ringfence.policy.actions import PROMPT, RESOURCE
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.errors import CallFailed, InvalidRequest
from ringfence.syscalls.mcp_common import action_of, nameable, server_of
from ringfence.syscalls.mcp_reading import cleaned, fetch
from ringfence.syscalls.mcp_uris import unusable_template
from ringfence.syscalls.payload import Room

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import McpResource

VALUES_MAX: Final = 100
"""Most values that are given of one answer, as the protocol bounds them."""
_BYTES_MAX: Final = 1 << 20
_COUNT_MAX: Final = (1 << 31) - 1


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Server, what is completed, and what there is of it so far."""

    server: str = ""
    prompt: str = ""
    uri: str = ""
    argument: str = ""
    value: str = ""
    context: dict[str, str] = {}


class Result(msgspec.Struct, frozen=True):
    """What it may be."""

    values: list[str]
    total: int
    has_more: bool


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the server.

    Raises:
        InvalidRequest: not one of a prompt and a template, or not one that can be named.
        NoSuchResource: no such server, or it is unavailable.
    """
    resource = server_of(arguments.server, env)
    if bool(arguments.prompt) == bool(arguments.uri):
        raise InvalidRequest("give one of the two: the name of a `prompt`, or a template of a `uri`")
    if arguments.prompt and not nameable(arguments.prompt):
        raise InvalidRequest(f"{arguments.prompt[:80]!a} is no name of a prompt")
    why = unusable_template(arguments.uri) if arguments.uri else ""
    if why:
        raise InvalidRequest(f"the template `{arguments.uri[:80]}` can't be used: {why}")
    name = PROMPT if arguments.prompt else RESOURCE
    about = arguments.prompt or arguments.uri
    question = Question(action=action_of(resource.name, name), resource=about)
    return Plan(resource=f"{resource.name} {about}", questions=(question,), data=resource)


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del call, arguments
    return Room(most=_BYTES_MAX, least=1)


async def run(call: Call, arguments: Arguments) -> Result:
    """Ask.

    Raises:
        CallFailed: the server can't be reached, or says nothing of that.
        QuotaExceeded: the server asks its callers to wait.
        Revoked: from `check_live`, before anything is sent.
    """
    resource: McpResource = call.plan.data
    prompt = {"type": "ref/prompt", "name": arguments.prompt}
    params: dict[str, Any] = {
        "ref": prompt if arguments.prompt else {"type": "ref/resource", "uri": arguments.uri},
        "argument": {"name": arguments.argument, "value": arguments.value},
    }
    if arguments.context:
        params["context"] = {"arguments": arguments.context}
    what = f"completions of `{arguments.argument[:80]}`"
    raw = await fetch(call, resource, "completion/complete", params, what)
    try:
        said = msgspec.convert(raw.get("completion"), _Said)
    except msgspec.ValidationError:
        raise CallFailed(f"`{resource.name}` gave an answer that can't be read", sent="yes") from None
    clean = await cleaned(call, resource, {"values": said.values[:VALUES_MAX]})
    return Result(
        values=clean["values"],
        total=min(max(said.total or 0, 0), _COUNT_MAX),
        has_more=said.hasMore is True or len(said.values) > VALUES_MAX,
    )


class _Said(msgspec.Struct):
    values: list[str]
    total: int | None = None
    hasMore: bool | None = None  # noqa: N815 - the protocol's name
