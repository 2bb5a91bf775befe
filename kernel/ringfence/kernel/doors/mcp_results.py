"""Answers of syscalls in the words of MCP, and long ones by a pointer that the client can read on from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError
from ringfence.kernel.doors import mcp_tools
from ringfence.kernel.doors.mcp_calls import Parked
from ringfence.kernel.doors.mcp_declared import Lent
from ringfence.kernel.server.desk import Desk
from ringfence.kernel.settled import Answer
from ringfence.syscalls.errors import NoSuchResource, SyscallError
from ringfence.syscalls.mcp_common import MISSING_CAPABILITY
from ringfence.syscalls.table import Row

RESULT_BYTES_MAX: Final = 64 << 10
"""Longest result that is given whole, as JSON."""

PASSED_BYTES_MAX: Final = 4 << 20
"""Longest answer of a declared server's tool that is given whole: it may hold pictures."""

PREVIEW_CHARS: Final = 2048
"""How much of a longer one is given at once."""

READ_CHARS_MAX: Final = 256 << 10
"""How much of a result one reading of its resource gives."""

OWN: Final = "ringfence:"
"""How URIs of recorded results begin; no declared server's are read under such."""

REFUSED: Final = -32000
"""Error code of a request that is none of a tool and was refused, or waits."""

_NOT_FOUND: Final = frozenset({"-32002", "-32602"})
"""What servers say of a resource that they don't have."""

RESOURCE_NOT_FOUND: Final = -32002
"""Error code of the protocol's versions with a handshake."""

STEP: Final = "ringfence/step"
Listed = TypeVar("Listed", bound=BaseModel)

_ADVICE: Final = {
    "Denied": "; nothing was done. It stays refused until the operator changes that: do it another way, or say what you need",
    "Revoked": "; nothing more is done under that right. Do it another way, or say what you need",
    "OutcomeUnknown": "; don't make it again before the operator has settled it",
}
"""What a model may do about an error whose message leaves that to people."""
_PLACE = re.compile(r"/(call-[0-9a-f]{24})/(\d{1,9})").fullmatch
_FIELD_BYTES: Final = 4096


def done(row: Row, answer: Answer, place: tuple[str, int]) -> types.CallToolResult:
    """The result of a call."""
    shown = mcp_tools.result(row, answer.result or b"{}")
    text = _text(shown)
    if _size(text) <= RESULT_BYTES_MAX:
        content: list[Any] = [types.TextContent(text=text)]
        return types.CallToolResult(content=content, structured_content=shown, _meta={STEP: answer.step})
    return _pointed(text, shown, answer.step, place, limited="limit" in row.request.fields_by_name)


def passed_on(answer: Answer, place: tuple[str, int]) -> types.CallToolResult:
    """What a tool of a declared server answered, as it answered."""
    said = json.loads(answer.result or b"{}")
    text = _text(said)
    if _size(text) > PASSED_BYTES_MAX:
        found = _pointed(text, {}, answer.step, place, limited=False)
        return found.model_copy(update={"structured_content": None, "is_error": said.get("is_error") is True})
    wrong = said.get("is_error") is True
    plain = {"content": said.get("content"), "structuredContent": said.get("structured"), "isError": wrong}
    try:
        found = types.CallToolResult.model_validate(plain)
    except ValidationError:
        # What this version of the protocol doesn't know is text.
        found = types.CallToolResult(content=[types.TextContent(text=text)], is_error=wrong)
    return found.model_copy(update={"meta": {STEP: answer.step}})


def lent(one: Lent) -> types.Tool | None:
    """A tool of a declared server; None: what the server says of it is none."""
    try:
        return types.Tool.model_validate(one.tool())
    except ValidationError:
        return None


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _pointed(
    text: str, shown: dict[str, Any], step: int, place: tuple[str, int], *, limited: bool
) -> types.CallToolResult:
    """A result that is too long to give at once."""
    uri = f"ringfence://result/{place[0]}/{place[1]}"
    less = " or ask for less of it" if limited else ""
    told = (
        f"the result has {len(text)} characters; it begins as follows. "
        f"Read on at resource `{uri}?offset={PREVIEW_CHARS}`{less}"
    )
    link = types.ResourceLink(
        uri=uri,
        name=f"result of step {step}",
        mime_type="application/json",
        size=len(text.encode("utf-8", "replace")),
    )
    content: list[Any] = [
        types.TextContent(text=told),
        types.TextContent(text=text[:PREVIEW_CHARS]),
        link,
    ]
    small = {name: value for name, value in shown.items() if len(_text(value)) <= _FIELD_BYTES}
    return types.CallToolResult(content=content, structured_content=small, _meta={STEP: step})


def failed(error: SyscallError) -> types.CallToolResult:
    """A refusal or an error: an answer to the model, which can do something about it."""
    advice = _ADVICE.get(error.reason, "")
    facts = {f"ringfence/{name}": value for name, value in error.metadata.items()}
    return types.CallToolResult(
        content=[types.TextContent(text=f"{error.reason}: {error.message}{advice}")],
        is_error=True,
        _meta={"ringfence/reason": error.reason, **facts},
    )


def parked(name: str, found: Parked) -> types.CallToolResult:
    """A call that waits for a person, to a client that doesn't."""
    text = (
        f"{_waits(name, found)} It is not lost: call `{name}` again later with the same arguments, and you get its result; "
        "meanwhile do something else, or say what you wait for."
    )
    return types.CallToolResult(
        content=[types.TextContent(text=text)],
        is_error=True,
        _meta={"ringfence/reason": "Parked", STEP: found.step, "ringfence/waits_for": found.text},
    )


def parked_error(name: str, found: Parked) -> MCPError:
    """The same of a request that is none of a tool."""
    text = f"{_waits(name, found)} It is not lost: ask the same again later, and you get its result."
    data = {"ringfence/reason": "Parked", STEP: found.step, "ringfence/waits_for": found.text}
    return MCPError(REFUSED, text, data=data)


def refusal(version: str, error: SyscallError, about: dict[str, Any]) -> MCPError:
    """A refusal of a request that is none of a tool.

    Args:
        version: of the protocol.
        error: what was refused.
        about: what it was about.
    """
    code = REFUSED
    if error.reason in ("NoSuchResource", "InvalidRequest") or error.metadata.get("code") in _NOT_FOUND:
        code = types.INVALID_PARAMS if version in MODERN_PROTOCOL_VERSIONS else RESOURCE_NOT_FOUND
    facts = {f"ringfence/{name}": value for name, value in error.metadata.items()}
    text = f"{error.reason}: {error.message}{_ADVICE.get(error.reason, '')}"
    return MCPError(code, text, data={**about, "ringfence/reason": error.reason, **facts})


def protocol_error(answer: Answer, *, goes_on: bool) -> MCPError | None:
    """Of a call of a declared server's tool: an error that clients have to see as one of the protocol; None: it has none.

    Args:
        answer: of the call.
        goes_on: whether the client gave what the server had given it along with its questions.
    """
    error = answer.failure
    code = "" if error is None else error.metadata.get("code", "")
    if error is None or not (code == str(MISSING_CAPABILITY) or (goes_on and code in _NOT_FOUND)):
        return None
    text = f"{error.reason}: {error.message}"
    if code != str(MISSING_CAPABILITY):
        return MCPError(types.INVALID_PARAMS, text)
    needs: dict[str, Any] = {name: {} for name in error.metadata.get("needs", "").split(",") if name}
    return MCPError(MISSING_CAPABILITY, text, data={"requiredCapabilities": needs})


def contents(uri: str, answer: Answer, place: tuple[str, int]) -> types.ReadResourceResult:
    """What a declared server's resource has."""
    text = _text(mcp_said := json.loads(answer.result or b"{}"))
    try:
        if _size(text) <= PASSED_BYTES_MAX:
            found = types.ReadResourceResult.model_validate({"contents": mcp_said.get("contents")})
            return found.model_copy(
                update={"meta": {STEP: answer.step}, "ttl_ms": 0, "cache_scope": "private"}
            )
        told = (
            f"the resource has {len(text)} characters as JSON; it begins as follows. "
            f"Read on at resource `{OWN}//result/{place[0]}/{place[1]}?offset={PREVIEW_CHARS}`"
        )
        parts = [told, text[:PREVIEW_CHARS]]
    except ValidationError:
        # What this version of the protocol doesn't know is text.
        parts = [text]
    shown: list[Any] = [types.TextResourceContents(uri=uri, text=part) for part in parts]
    return types.ReadResourceResult(
        contents=shown, ttl_ms=0, cache_scope="private", _meta={STEP: answer.step}
    )


def messages(answer: Answer, place: tuple[str, int]) -> types.GetPromptResult:
    """What a declared server's prompt says."""
    text = _text(said := json.loads(answer.result or b"{}"))
    meta: Any = {STEP: answer.step}
    try:
        if _size(text) <= PASSED_BYTES_MAX:
            found = types.GetPromptResult.model_validate(
                {"messages": said.get("messages"), "description": said.get("description") or None}
            )
            return found.model_copy(update={"meta": meta})
        told = (
            f"the prompt has {len(text)} characters as JSON; "
            f"read it at resource `{OWN}//result/{place[0]}/{place[1]}`"
        )
    except ValidationError:
        # What this version of the protocol doesn't know is text.
        told = text
    said_so = types.PromptMessage(role="user", content=types.TextContent(text=told))
    return types.GetPromptResult(messages=[said_so], _meta=meta)


def completion(answer: Answer) -> types.CompleteResult:
    """What an argument may be."""
    said = json.loads(answer.result or b"{}")
    found = types.Completion(
        values=said.get("values") or [],
        total=said.get("total") or None,
        has_more=said.get("has_more") is True,
    )
    return types.CompleteResult(completion=found, _meta={STEP: answer.step})


def valid(kind: type[Listed], found: Iterable[Any]) -> list[Listed]:
    """What servers list that this version of the protocol knows."""
    kept: list[Listed] = []
    for one in found:
        with suppress(ValidationError):
            kept.append(kind.model_validate(one))
    return kept


def question(name: str, found: Parked) -> str:
    """What the client's user is asked about a call that waits."""
    return f"{_waits(name, found)} Shall the agent wait for that decision? It can't be made here."


def _waits(name: str, found: Parked) -> str:
    how = f"`ringfence approvals approve {found.text.removeprefix('approval ')}`"
    return f"`{name}` waits for {found.text} (step {found.step}): an operator decides, with {how} or `deny`."


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def template() -> types.ResourceTemplate:
    """Of the kernel's own resources."""
    return types.ResourceTemplate(
        uri_template="ringfence://result/{lane}/{step}{?offset}",
        name="result",
        description=f"The result of an earlier call that was too long to give at once, as JSON: {READ_CHARS_MAX} characters from `offset` on.",
        mime_type="application/json",
    )


class Results:
    """Reads recorded results of one agent."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def read(self, uri: str) -> types.TextResourceContents:
        """Give a part of a result.

        Raises:
            SyscallError: there is none, or it is withheld since its right was revoked.
        """
        lane, step, offset = _place(uri)
        dispatcher = self._desk.dispatcher
        action, answer = await dispatcher.recall(self._desk.thread, (lane, step))
        if answer.failure is not None:
            raise answer.failure
        text = _text(mcp_tools.result(dispatcher.table[action], answer.result or b"{}"))
        part = text[offset : offset + READ_CHARS_MAX]
        after = offset + len(part)
        meta = {
            "ringfence/characters": len(text),
            **({"ringfence/next_offset": after} if after < len(text) else {}),
        }
        return types.TextResourceContents(uri=uri, mime_type="application/json", text=part, _meta=meta)


def _place(uri: str) -> tuple[str, int, int]:
    parts = urlsplit(uri)
    found = _PLACE(parts.path)
    try:
        offset = int(parse_qs(parts.query).get("offset", ["0"])[0])
    except ValueError:
        offset = -1
    if parts.scheme != "ringfence" or parts.netloc != "result" or found is None or offset < 0:
        raise NoSuchResource(f"there is no resource `{uri[:256]}`; take one from the result of a tool")
    return found[1], int(found[2]), offset
