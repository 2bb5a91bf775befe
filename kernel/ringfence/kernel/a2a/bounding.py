"""Errors as clients of A2A get them: bounded. The SDK repeats what it can't read, however long that is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, cast

import msgspec
from ringfence.syscalls.words import shown

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ERROR_BYTES_MAX: Final = 4 << 10
"""A longer error has its texts cut."""
_TEXT_CHARS: Final = 300
_DEPTH_MAX: Final = 6
_MEMBERS_MAX: Final = 16
_ERROR: Final = b'"error"'


def bounded(body: bytes) -> bytes:
    """A JSON answer as it is, or with short texts where it is a long error."""
    if len(body) <= ERROR_BYTES_MAX or _ERROR not in body:
        return body
    try:
        answer: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    if not isinstance(answer, dict) or "error" not in answer or "result" in answer:
        return body
    told = cast("dict[str, Any]", answer)
    return msgspec.json.encode({**told, "error": _cut(told["error"], 0)})


def _cut(value: Any, depth: int) -> Any:
    """The same with short texts, few members and little depth."""
    if isinstance(value, str):
        return value if len(value) <= _TEXT_CHARS else f"{shown(value, _TEXT_CHARS)}…"
    if depth > _DEPTH_MAX:
        return None
    if isinstance(value, dict):
        members = list(cast("dict[str, Any]", value).items())[:_MEMBERS_MAX]
        return {key[:_TEXT_CHARS]: _cut(inner, depth + 1) for key, inner in members}
    if isinstance(value, list):
        return [_cut(inner, depth + 1) for inner in cast("list[Any]", value)[:_MEMBERS_MAX]]
    return value


def bounding(send: Send) -> Send:
    """What passes an answer on, whole ones of JSON through `bounded`; streams as they come."""
    held: MutableMapping[str, Any] | None = None

    async def sent(message: MutableMapping[str, Any]) -> None:
        nonlocal held
        if message["type"] == "http.response.start" and _is_json(message):
            held = message
            return
        begun, held = held, None
        if begun is not None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                body = bounded(message.get("body", b""))
                kept = [(name, value) for name, value in begun["headers"] if name != b"content-length"]
                begun = {**begun, "headers": [*kept, (b"content-length", str(len(body)).encode())]}
                message = {**message, "body": body}
            await send(begun)
        await send(message)

    return sent


def _is_json(message: MutableMapping[str, Any]) -> bool:
    kind = dict(message["headers"]).get(b"content-type", b"")
    return kind.partition(b";")[0].strip().endswith(b"json")
