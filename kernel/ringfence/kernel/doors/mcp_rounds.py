"""What a declared server asks for before it answers, passed on to the client of the door that made the call.

INVARIANT: the words are the server's, so whoever reads them is told whose they are; nothing of the kernel's own is answered by them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import TypeAdapter, ValidationError
from ringfence.kernel.doors.mcp_asking import WAIT, Context, Made
from ringfence.kernel.doors.mcp_calls import Parked
from ringfence.kernel.doors.mcp_results import REFUSED
from ringfence.kernel.settled import Answer

ROUNDS_MAX: Final = 10
"""How often one call of a client with a handshake may have it asked something."""

_ONE: Final[TypeAdapter[Any]] = TypeAdapter(types.InputRequest)
_RESULTS: Final[Mapping[str, Any]] = {
    "elicitation/create": types.ElicitResult,
    "sampling/createMessage": types.CreateMessageResult,
    "roots/list": types.ListRootsResult,
}


class Wants(NamedTuple):
    """What a server asks for, and what goes with the answers."""

    requests: Mapping[str, Any]
    state: str


def given_by(
    context: Context, params: types.CallToolRequestParams | types.GetPromptRequestParams
) -> dict[str, Any]:
    """What a client says of itself and answers, as fields of a call."""
    found: dict[str, Any] = {}
    capabilities = context.session.client_capabilities
    if capabilities is not None:
        elicits = capabilities.elicitation
        # One that names no form of it takes the first that there was.
        forms = elicits is not None and (elicits.form is not None or elicits.url is None)
        able = {"elicitation": forms, "sampling": capabilities.sampling, "roots": capabilities.roots}
        can = [name for name, there in able.items() if there not in (None, False)]
        found |= {"can": can} if can else {}
    answers = {name: one for name, one in (params.input_responses or {}).items() if name != WAIT}
    if answers:
        found["responses"] = {
            name: one.model_dump(mode="json", by_alias=True, exclude_none=True)
            for name, one in answers.items()
        }
    if params.request_state:
        found["state"] = params.request_state
    return found


async def in_rounds(
    context: Context,
    server: str,
    given: Mapping[str, Any],
    make: Callable[[Mapping[str, Any]], Awaitable[Made | Parked | types.InputRequiredResult]],
) -> Made | Parked | types.InputRequiredResult:
    """Make a call, and again with what the client answers, until the server has what it asks for.

    Args:
        context: of the request.
        server: its name.
        given: fields of the call.
        make: makes one call.

    Raises:
        MCPError: the client does not answer, or the server asks too often.
    """
    for _ in range(ROUNDS_MAX):
        made = await make(given)
        wants = _wants(made.answer) if isinstance(made, Made) else None
        if wants is None:
            return made
        requests = {name: _signed(server, one) for name, one in wants.requests.items()}
        if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return types.InputRequiredResult(input_requests=requests, request_state=wants.state or None)
        answers = {name: await _answered(context, one) for name, one in requests.items()}
        given = {**given, "responses": answers, "state": wants.state}
    raise MCPError(REFUSED, f"the MCP server `{server}` asked more than {ROUNDS_MAX} times")


def _wants(answer: Answer) -> Wants | None:
    if answer.withheld or answer.failure is not None:
        return None
    said = json.loads(answer.result or b"{}")
    return Wants(said["requests"], said.get("state") or "") if said.get("requests") is not None else None


def _signed(server: str, one: Any) -> Any:
    """A request of a server, as the client reads it.

    Raises:
        MCPError: it is none that this version of the protocol knows.
    """
    try:
        found = _ONE.validate_python({"params": {}, **one}, by_name=False)
    except ValidationError:
        raise MCPError(REFUSED, f"the MCP server `{server}` asks what can't be read") from None
    if isinstance(found, types.ElicitRequest):
        message = f"The MCP server `{server}` asks: {found.params.message}"
        return found.model_copy(update={"params": found.params.model_copy(update={"message": message})})
    return found


async def _answered(context: Context, one: Any) -> dict[str, Any]:
    about = ServerMessageMetadata(related_request_id=context.request_id)
    try:
        said = await context.session.send_request(one, _RESULTS[one.method], metadata=about)
    except ValidationError:
        raise MCPError(REFUSED, "the client answers what can't be read") from None
    return said.model_dump(mode="json", by_alias=True, exclude_none=True)
