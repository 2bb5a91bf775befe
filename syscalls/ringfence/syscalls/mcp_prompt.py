"""`mcp.prompt`: get a prompt of a declared MCP server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from ringfence.policy.actions import PROMPT
from ringfence.syscalls import mcp_input
from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.errors import CallFailed, InvalidRequest, NoSuchResource
from ringfence.syscalls.mcp_common import ANSWER_BYTES_MAX, action_of, nameable, server_of
from ringfence.syscalls.mcp_reading import cleaned, fetch
from ringfence.syscalls.payload import Room

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import McpResource


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Server, prompt and its arguments."""

    server: str = ""
    prompt: str = ""
    arguments: dict[str, str] = {}
    can: list[str] = []
    responses: Any = None
    state: str = ""


class Result(msgspec.Struct, frozen=True):
    """What it says."""

    description: str
    messages: list[Any]
    requests: Any = None
    state: str = ""


class Target(msgspec.Struct, frozen=True):
    """Of which server, kept in `Plan.data`, and whether it was asked how it defines the prompt."""

    resource: Any
    looked: bool = False


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the server. How it defines the prompt is known once it was asked: see `locate`.

    Raises:
        InvalidRequest: no name of a prompt.
        NoSuchResource: no such server, or it is unavailable.
    """
    resource = server_of(arguments.server, env)
    if not nameable(arguments.prompt):
        raise InvalidRequest(f"{arguments.prompt[:80]!a} is no name of a prompt")
    mcp_input.check(arguments)
    question = Question(action=action_of(resource.name, PROMPT), resource=arguments.prompt)
    named = f"{resource.name} {arguments.prompt}"
    return Plan(resource=named, questions=(question,), data=Target(resource=resource))


async def locate(arguments: Arguments, env: Env) -> Plan | None:
    """Look at how the server defines the prompt now. Nothing is asked of it for an agent that may not get the prompt.

    Raises:
        NoSuchResource: it has no such prompt.
        CallFailed: it can't be reached, or does not say.
    """
    planned = plan(arguments, env)
    if not env.may(planned.questions[0]):
        return None
    definition = (await env.servers.look_at_prompts(arguments.server)).get(arguments.prompt)
    if definition is None:
        raise NoSuchResource(
            f"the MCP server `{arguments.server}` has no prompt `{arguments.prompt}`; ask for those that it has with mcp.prompts"
        )
    fresh = msgspec.structs.replace(planned, data=Target(resource=planned.data.resource, looked=True))
    if not definition.changed:
        return fresh
    return msgspec.structs.replace(fresh, doubt=env.servers.doubt(arguments.server, definition))


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del call, arguments
    return Room(most=ANSWER_BYTES_MAX, least=1)


async def run(call: Call, arguments: Arguments) -> Result:
    """Get it.

    Raises:
        CallFailed: the server can't be reached, or gives none.
        QuotaExceeded: the server asks its callers to wait.
        Revoked: from `check_live`, before anything is sent.
    """
    target: Target = call.plan.data
    resource: McpResource = target.resource
    if not target.looked:
        # INVARIANT: no prompt is got before its definition was held against what was taken.
        raise CallFailed(
            "the right to this call was given while it was decided; nothing was sent, make the call again",
            sent="no",
        )
    params = {
        "name": arguments.prompt,
        "arguments": arguments.arguments,
        **mcp_input.params_of(arguments),
    }
    what = f"the prompt `{arguments.prompt}`"
    raw = await fetch(call, resource, "prompts/get", params, what, arguments)
    asks = mcp_input.wanted(resource.name, raw, arguments.can)
    if asks is not None:
        return Result(description="", messages=[], **await cleaned(call, resource, asks))
    messages: Any = raw.get("messages")
    if not isinstance(messages, list) or not all(map(_readable, cast("list[Any]", messages))):
        raise CallFailed(f"`{resource.name}` gave an answer that can't be read", sent="yes")
    kept = {"description": str(raw.get("description") or ""), "messages": cast("list[Any]", messages)}
    clean = await cleaned(call, resource, kept)
    return Result(description=clean["description"], messages=clean["messages"])


def _readable(message: Any) -> bool:
    """Whether a message is one as the protocol has them."""
    if not isinstance(message, dict):
        return False
    said = cast("dict[str, Any]", message)
    return said.get("role") in ("user", "assistant") and isinstance(said.get("content"), dict)
