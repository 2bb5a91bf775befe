"""Calls as a client of the door makes them: answered, or waiting for a person, whom a client may be asked to wait for.

INVARIANT: whoever speaks here is the agent. Nothing that is said on this connection approves a call: an elicitation asks
whether to wait for the operator's decision, never for the decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from ringfence.kernel.doors import mcp_results
from ringfence.kernel.doors.mcp_calls import Asked, Calls, Parked
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.settled import Answer
from ringfence.syscalls.table import Row

Context: TypeAlias = ServerRequestContext[Any, Any]

WAIT_S: Final = 45.0
"""How long a call that was found again waits for its answer: less than the minute that clients commonly wait."""

WAIT: Final = "ringfence/wait"
"""Key of the question whether to wait; those of servers are others."""

_WAIT: Final = {
    "type": "object",
    "properties": {"wait": {"type": "boolean", "title": "Wait for the decision", "default": True}},
    "required": ["wait"],
}


class Made(NamedTuple):
    """A call that has its answer."""

    answer: Answer
    place: tuple[str, int]


async def told(desk: Desk, made: Made) -> Answer:
    """The answer of a call, if anybody is to have it.

    Raises:
        MCPError: nobody is: the program is ended, and this connection with it.
    """
    if made.answer.withheld:
        await desk.closed.wait()
        raise MCPError(types.INTERNAL_ERROR, "the program has ended")
    return made.answer


async def ask(
    calls: Calls, context: Context, name: str, said: Mapping[str, Any] | None, row: Row, raw: bytes
) -> Made | Parked | types.InputRequiredResult:
    """Make a call, or find the one that was left.

    Args:
        calls: of the agent's door.
        context: of the request.
        name: of what is called, for people.
        said: what the client answers to an earlier question.
        row: of the table.
        raw: canonical arguments.
    """
    asked = await calls.ask(row, raw)
    again, told = asked.told, False
    try:
        found: Answer | Parked | types.InputRequiredResult = await asked.first()
        if isinstance(found, Parked):
            found = await _person(context, name, said, asked, found, again=again)
        if isinstance(found, Answer):
            return Made(found, asked.place)
        told = True
        return found
    finally:
        if told or not asked.over:
            calls.leave(asked, told=told)


async def _person(
    context: Context, name: str, given: Mapping[str, Any] | None, asked: Asked, parked: Parked, *, again: bool
) -> Answer | Parked | types.InputRequiredResult:
    """What comes of a call that waits for a person: its answer, if the client's user waits for it."""
    session = context.session
    capabilities = session.client_capabilities
    elicits = capabilities is not None and capabilities.elicitation is not None
    if given is not None and WAIT in given:
        said = given[WAIT]
        return await _decided(asked, parked, said if isinstance(said, types.ElicitResult) else None)
    if again:
        with anyio.move_on_after(WAIT_S):
            return await asked.answered()
        return parked
    if not elicits or given:
        return parked
    message = mcp_results.question(name, parked)
    if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
        form = types.ElicitRequestFormParams(message=message, requested_schema=_WAIT)
        return types.InputRequiredResult(input_requests={WAIT: types.ElicitRequest(params=form)})
    answer = asyncio.ensure_future(asked.answered())
    question = asyncio.ensure_future(session.elicit_form(message, _WAIT, context.request_id))
    try:
        await asyncio.wait({answer, question}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        try:
            said = question.result()
        except (MCPError, ValidationError):
            said = None
        return await _decided(asked, parked, said)
    finally:
        answer.cancel()
        question.cancel()


async def _decided(asked: Asked, parked: Parked, said: types.ElicitResult | None) -> Answer | Parked:
    waits = said is not None and said.action == "accept" and (said.content or {}).get("wait") is not False
    return await asked.answered() if waits else parked
