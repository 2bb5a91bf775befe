"""`mcp.call`: call a tool of a declared MCP server, once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from ringfence.policy.facts import field_of
from ringfence.syscalls import mcp_input
from ringfence.syscalls.base import Effect, Plan, Question
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import (
    CallFailed,
    InvalidRequest,
    NoSuchResource,
    OutcomeUnknown,
    QuotaExceeded,
)
from ringfence.syscalls.mcp_common import (
    ANSWER_BYTES_MAX,
    Definition,
    Lost,
    McpSession,
    Refused,
    Sent,
    action_of,
    declared_tool,
    effect_of,
    sayable,
    server_of,
)
from ringfence.syscalls.mcp_reading import refused_by
from ringfence.syscalls.payload import Room
from ringfence.syscalls.redaction import redactor_for
from ringfence.syscalls.refusals import afford_answer, outcome_unknown
from ringfence.syscalls.upstream import upstream_of
from ringfence.syscalls.words import shown

if TYPE_CHECKING:
    from ringfence.policy.mcp_servers import ToolDecl
    from ringfence.syscalls.base import Call, Env
    from ringfence.syscalls.declared import McpResource
    from ringfence.syscalls.upstream import Upstream

_LEAST_BYTES: Final = 64 << 10
"""What a budget of bytes has to have left for an answer before a call is made that does not only read."""


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Server, tool and its arguments."""

    server: str = ""
    tool: str = ""
    arguments: Any = None
    can: list[str] = []
    responses: Any = None
    state: str = ""


class Result(msgspec.Struct, frozen=True):
    """What the tool answered."""

    content: list[Any]
    structured: Any
    is_error: bool
    requests: Any = None
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is called, kept in `Plan.data`.

    Attributes:
        looked: whether the server was asked how it defines the tool.
    """

    resource: McpResource
    tool: str
    declared: ToolDecl | None
    arguments: Mapping[str, Any]
    looked: bool = False


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the server. What its tool does is known once its definition is: see `locate`.

    Raises:
        InvalidRequest: no name of a tool, arguments that are no object, or without what rules look at.
        NoSuchResource: no such server, or it is unavailable.
    """
    resource = server_of(arguments.server, env)
    if not sayable(arguments.tool):
        raise InvalidRequest(
            f"{arguments.tool[:80]!a} is no name of a tool that a rule can say; names have letters, digits, `_`, `-`, `/` and dots"
        )
    given: Any = {} if arguments.arguments is None else arguments.arguments
    if not isinstance(given, dict):
        raise InvalidRequest("`arguments` of a tool are a JSON object; write `{}` for none")
    mcp_input.check(arguments)
    target = Target(
        resource=resource,
        tool=arguments.tool,
        declared=declared_tool(resource, arguments.tool),
        arguments=cast("dict[str, Any]", given),
    )
    return _plan(target, None)


def _plan(target: Target, found: Definition | None) -> Plan:
    declared, target = target.declared, replace(target, looked=found is not None)
    texts = () if found is None else tuple(filter(None, (found.taken, found.offered)))
    effect = effect_of(declared, texts)
    name = f"{target.resource.name}.{target.tool}"
    keyed = declared is not None and bool(declared.key_argument or declared.key_header)
    twice = declared is not None and declared.repeat
    return Plan(
        resource=name,
        questions=(Question(action=action_of(target.resource.name, target.tool), resource=_subject(target)),),
        effect=effect,
        idempotent=keyed or twice or effect is Effect.READ,
        no_return=f"can't be undone: the MCP server `{target.resource.name}` brings nothing back",
        data=target,
    )


def _subject(target: Target) -> str:
    """What rules look at: the argument that the operator names, else the tool's own name.

    Raises:
        InvalidRequest: it is not there, or is no text or number.
    """
    pointer = "" if target.declared is None else target.declared.subject
    if not pointer:
        return target.tool
    value = field_of(target.arguments, pointer)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidRequest(
            f"rules look at `{pointer}` of the arguments, which has to be a text or a number"
        )
    return str(value)


async def locate(arguments: Arguments, env: Env) -> Plan | None:
    """Look at how the server defines the tool now. Nothing is asked of it for an agent that may not call the tool.

    Raises:
        NoSuchResource: it has no such tool.
        CallFailed: it can't be reached, or does not say.
    """
    planned = plan(arguments, env)
    if not env.may(planned.questions[0]):
        return None
    found = await env.servers.look(arguments.server)
    definition = found.get(arguments.tool)
    if definition is None:
        raise NoSuchResource(
            f"the MCP server `{arguments.server}` has no tool `{arguments.tool}`; ask for those that it has with mcp.tools"
        )
    fresh = _plan(planned.data, definition)
    if not definition.changed:
        return fresh
    return msgspec.structs.replace(fresh, doubt=env.servers.doubt(arguments.server, definition))


def room(call: Call, arguments: Arguments) -> Room:
    """How large the answer may be."""
    del arguments
    return Room(most=ANSWER_BYTES_MAX, least=1 if call.plan.effect is Effect.READ else _LEAST_BYTES)


async def run(call: Call, arguments: Arguments) -> Result:
    """Send it once.

    Raises:
        CallFailed: nothing was sent, the server answered with an error, or sending it again does nothing twice; `sent` says which.
        OutcomeUnknown: it may have arrived, and carries no key that the server knows.
        QuotaExceeded: the server asks its callers to wait.
        Revoked: from `check_live`, before anything is sent.
    """
    target: Target = call.plan.data
    if not target.looked:
        # INVARIANT: no tool is called before its definition was held against what was taken.
        raise CallFailed(
            "the right to this call was given while it was decided; nothing was sent, make the call again",
            sent="no",
        )
    sent = Sent(carry=_carried(call, target), able=mcp_input.abilities(arguments))
    upstream = upstream_of(target.resource)
    await call.failpoint("before_effect")
    await upstream.wait(call)
    session = await call.env.servers.session(target.resource.name)
    await call.check_live()
    params = {
        "name": target.tool,
        "arguments": _arguments(call, target),
        **mcp_input.params_of(arguments),
    }
    raw = await _exchange(call, target, session, sent, upstream, params)
    await call.failpoint("after_effect")
    _taint(call, target)
    asks = mcp_input.wanted(target.resource.name, raw, arguments.can)
    return await _result(call, target, raw if asks is None else {}, asks or {})


def _taint(call: Call, target: Target) -> None:
    if target.resource.untrusted:
        call.taint(f"the MCP server `{target.resource.name}`")


def _carried(call: Call, target: Target) -> dict[str, str]:
    header = "" if target.declared is None else target.declared.key_header
    return {header: call.effect_id} if header else {}


def _arguments(call: Call, target: Target) -> Mapping[str, Any]:
    name = "" if target.declared is None else target.declared.key_argument
    # INVARIANT: the key is the kernel's, whatever its caller wrote there.
    return {**target.arguments, name: call.effect_id} if name else target.arguments


async def _exchange(
    call: Call,
    target: Target,
    session: McpSession,
    sent: Sent,
    upstream: Upstream,
    params: Mapping[str, Any],
) -> Mapping[str, Any]:
    timeout_s = min(target.resource.timeout_s, call.deadline_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await session.ask("tools/call", params, call.effect_id, sent)
    except TimeoutError:
        raise _failure(call, target, sent, f"did not answer within {timeout_s:g} s") from None
    except Refused as error:
        # A refusal says something too.
        _taint(call, target)
        said = shown(redactor_for(call.env, target.resource.secrets).text(str(error)))
        raise CallFailed(
            f"`{target.resource.name}` refused the call of `{target.tool}`: {said}",
            sent="yes",
            code=str(error.code),
        ) from None
    except Lost as error:
        raise refused_by(target.resource.name, sent, upstream) or _failure(
            call, target, sent, shown(redactor_for(call.env, target.resource.secrets).text(str(error)))
        ) from None


def _failure(
    call: Call, target: Target, sent: Sent, what: str
) -> CallFailed | OutcomeUnknown | QuotaExceeded:
    name = target.resource.name
    if not sent.begun:
        return CallFailed(f"`{name}` {what}; nothing was sent", sent="no")
    if call.plan.idempotent:
        return CallFailed(f"`{name}` {what}; the call may have arrived", sent="maybe")
    return outcome_unknown(
        call,
        f"`{name}` {what}; the call of `{target.tool}` may have arrived and carries no key",
        sent="maybe",
    )


async def _result(call: Call, target: Target, raw: Mapping[str, Any], asks: Mapping[str, Any]) -> Result:
    """What came, or what the server asks for, without credentials.

    Raises:
        CallFailed: the call was carried out, or begun, and its answer is none that can be passed on.
    """
    content: Any = raw.get("content", [])
    if not isinstance(content, list):
        raise CallFailed(
            f"`{target.resource.name}` gave an answer that can't be read; it carried the call out", sent="yes"
        )
    hide = redactor_for(call.env, target.resource.secrets)
    kept = {"content": cast("list[Any]", content), "structured": raw.get("structuredContent"), **asks}
    data = await asyncio.to_thread(_clean, hide.body, kept)
    await afford_answer(call, target.resource.name, len(data), reads=call.plan.effect is Effect.READ)
    clean: dict[str, Any] = msgspec.json.decode(data)
    return Result(
        content=clean["content"],
        structured=clean["structured"],
        is_error=raw.get("isError") is True,
        requests=clean.get("requests"),
        state=clean.get("state", ""),
    )


def _clean(hide: Any, value: Mapping[str, Any]) -> bytes:
    return hide(canonical_json(value))
