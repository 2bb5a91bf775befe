"""What calls that only read from a declared MCP server have in common: asking it, and what its failures are for an agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import CallFailed
from ringfence.syscalls.mcp_common import Lost, Refused, Sent
from ringfence.syscalls.mcp_input import abilities
from ringfence.syscalls.ratelimits import wait_of
from ringfence.syscalls.redaction import redactor_for
from ringfence.syscalls.refusals import afford_answer
from ringfence.syscalls.upstream import upstream_of
from ringfence.syscalls.words import shown

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call
    from ringfence.syscalls.declared import McpResource
    from ringfence.syscalls.errors import SyscallError
    from ringfence.syscalls.mcp_input import Asked
    from ringfence.syscalls.upstream import Upstream

_HTTP_REFUSED: Final = range(400, 500)
_NO_SESSION: Final = 404
_ASK_LATER: Final = frozenset({429, 503})


def refused_by(server: str, sent: Sent, upstream: Upstream) -> SyscallError | None:
    """What an answer of HTTP itself says; None: nothing that can be relied on."""
    if sent.status in _ASK_LATER:
        wait_s = wait_of(sent.status, sent.headers, b"", 1)
        if wait_s is not None:
            upstream.told(wait_s)
            return upstream.exceeded(1)
    if sent.status in _HTTP_REFUSED:
        code = {"code": str(sent.code)} if sent.code else {}
        code |= {"needs": sent.needs} if sent.needs else {}
        text = f"`{server}` answered {sent.status} and did not carry out the call"
        return CallFailed(text, sent="refused", **code)
    return None


def taint(call: Call, resource: McpResource) -> None:
    """Note where what the agent knows now came from."""
    if resource.untrusted:
        call.taint(f"the MCP server `{resource.name}`")


async def fetch(
    call: Call,
    resource: McpResource,
    method: str,
    params: Mapping[str, Any],
    what: str,
    asked: Asked | None = None,
) -> Mapping[str, Any]:
    """Ask a server for something that it only tells; gives the result as it came.

    Args:
        call: the call.
        resource: the server.
        method: of the protocol.
        params: of it.
        what: that is asked for, for people.
        asked: of a call that the server may ask something for; None: it may not.

    Raises:
        CallFailed: it can't be reached, does not answer, or answers with an error.
        QuotaExceeded: it asks its callers to wait.
        Revoked: from `check_live`, before anything is sent.
    """
    upstream = upstream_of(resource)
    await call.failpoint("before_effect")
    await upstream.wait(call)
    try:
        async with asyncio.timeout(min(resource.timeout_s, call.deadline_s)):
            able = {} if asked is None else abilities(asked)
            raw = await _asked(call, resource, method, params, upstream, able)
    except TimeoutError:
        raise CallFailed(
            f"`{resource.name}` did not answer within {resource.timeout_s:g} s", sent="maybe"
        ) from None
    except Refused as error:
        # A refusal says something too.
        taint(call, resource)
        said = shown(redactor_for(call.env, resource.secrets).text(str(error)))
        raise CallFailed(
            f"`{resource.name}` does not give {what}: {said}", sent="yes", code=str(error.code)
        ) from None
    await call.failpoint("after_effect")
    taint(call, resource)
    if asked is None and raw.get("resultType", "complete") != "complete":
        raise CallFailed(
            f"`{resource.name}` wants more than it was told before it gives {what}, which can't be given here",
            sent="yes",
        )
    return raw


async def _asked(
    call: Call,
    resource: McpResource,
    method: str,
    params: Mapping[str, Any],
    upstream: Upstream,
    able: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Ask, and once more where the session was lost: it only reads."""
    for again in (True, False):
        sent = Sent(able=able)
        session = await call.env.servers.session(resource.name)
        await call.check_live()
        try:
            return await session.ask(method, params, call.effect_id, sent)
        except Lost as error:
            if again and sent.status in (0, _NO_SESSION):
                continue
            text = redactor_for(call.env, resource.secrets).text(str(error))
            failed = CallFailed(f"`{resource.name}` {text}", sent="maybe" if sent.begun else "no")
            raise refused_by(resource.name, sent, upstream) or failed from None
    raise AssertionError  # pragma: no cover - the second try returns or raises


async def cleaned(call: Call, resource: McpResource, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What came, without credentials, and within the budget of bytes.

    Raises:
        BudgetExhausted: it is larger than what is left.
    """
    hide = redactor_for(call.env, resource.secrets)
    data = await asyncio.to_thread(lambda: hide.body(canonical_json(kept)))
    await afford_answer(call, resource.name, len(data), reads=True)
    return msgspec.json.decode(data)
