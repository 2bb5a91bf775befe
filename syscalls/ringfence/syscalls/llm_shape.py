"""Takes a request for a model apart into the texts that the model is shown and what its host puts around them. No I/O.

What is not known is counted as the JSON that it is: that leans upwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from ringfence.syscalls.llm_profiles import PROPERTY_TOKENS, REPLY_TOKENS, Profile
from ringfence.syscalls.llm_tokens import LOW_DETAIL_TOKENS

Place: TypeAlias = tuple[int, int]
"""Index of a message, and of the part of it that holds a tool's result; -1: the message is the result."""
Count: TypeAlias = Callable[[Sequence[str]], Sequence[int]]
"""Counts each of some texts."""

RESULT_ROLES: Final = ("tool", "function")
_UNSHOWN: Final = frozenset(
    ("role", "id", "type", "tool_call_id", "tool_use_id", "call_id", "cache_control", "index")
)
"""Keys whose values hosts don't show the model, or count among what is around it."""
_BARE: Final = ("content", "text", "tool_calls", "function", "output", "name", "arguments", "refusal")
"""Keys that are not shown themselves."""
_OBJECTS: Final = ("input", "arguments", "response")
# Tuples: what stands under `type` may be anything, also what can't be hashed.
_IMAGES: Final = ("image_url", "input_image", "image")
_CALLS: Final = ("tool_use", "function_call")
_RESULTS: Final = ("tool_result", "function_call_output")
_UNIONS: Final = ("anyOf", "oneOf", "allOf")
_DEEP: Final = 64


@dataclass(slots=True)
class Pieces:
    """Texts to count, and tokens that are known.

    Attributes:
        known: tokens besides those of the texts.
    """

    known: int = 0
    texts: list[str] = field(default_factory=list[str])


def result_key(holder: Mapping[str, Any], *, message: bool) -> str | None:
    """The key under which a message or a part of one holds the result of a tool; None: it is none."""
    kind: object = holder.get("type")
    if message and kind == "function_call_output":
        return "output"
    if (message and holder.get("role") in RESULT_ROLES) or (not message and kind == "tool_result"):
        return "content"
    return None


def results(messages: Sequence[Mapping[str, Any]]) -> list[Place]:
    """Where results of tools stand that the model has answered already, oldest first.

    What comes after the model's last turn it has not seen yet: that is none of them.
    """
    seen = max((nr for nr, message in enumerate(messages) if _spoken(message)), default=0)
    places: list[Place] = []
    for nr, message in enumerate(messages[:seen]):
        if (key := result_key(message, message=True)) is not None:
            if message.get(key):
                places.append((nr, -1))
            continue
        content: object = message.get("content")
        for at, one in enumerate(cast("list[Any]", content) if isinstance(content, list) else []):
            part = _mapping(one)
            if part and (key := result_key(part, message=False)) and part.get(key):
                places.append((nr, at))
    return places


def _spoken(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" or message.get("type") in _CALLS


def content_at(messages: Sequence[Mapping[str, Any]], place: Place) -> Any:
    """The result that stands at a place."""
    holder = messages[place[0]] if place[1] < 0 else messages[place[0]]["content"][place[1]]
    key = result_key(holder, message=place[1] < 0)
    return holder[key] if key else None


def shown(value: object, profile: Profile, into: Pieces | None = None, depth: int = 0) -> Pieces:
    """The pieces of a content, a message, a call or whatever else stands in one."""
    into = Pieces() if into is None else into
    if isinstance(value, str):
        into.texts.append(value)
    elif depth > _DEEP:
        into.texts.append(_json(value))
    elif isinstance(value, Mapping):
        _fields(cast("Mapping[str, Any]", value), profile, into, depth)
    elif isinstance(value, Sequence):
        for inner in cast("Sequence[Any]", value):
            shown(inner, profile, into, depth + 1)
    elif value is not None:
        into.texts.append(str(value))
    return into


def _fields(fields: Mapping[str, Any], profile: Profile, into: Pieces, depth: int) -> None:
    kind: object = fields.get("type")
    if kind in _IMAGES:
        into.known += LOW_DETAIL_TOKENS if _low(fields) else profile.image
        return
    if kind in _CALLS or (kind == "function" and isinstance(fields.get("function"), Mapping)):
        into.known += profile.call
    elif kind in _RESULTS:
        into.known += profile.result
    for key, inner in fields.items():
        if key in _UNSHOWN and not isinstance(inner, (Mapping, list)):
            continue
        if key in _OBJECTS and isinstance(inner, Mapping):
            into.texts.append(_json(cast("Any", inner)))
            continue
        if key not in _BARE:
            into.texts.append(key)
        shown(cast("Any", inner), profile, into, depth + 1)


def _low(fields: Mapping[str, Any]) -> bool:
    inner: object = fields.get("image_url")
    holder = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else fields
    return holder.get("detail") == "low"


def message_pieces(message: Mapping[str, Any], profile: Profile) -> Pieces:
    """A message with what is around it."""
    into = shown(message, profile)
    into.known += profile.message + (1 if message.get("name") else 0)
    if result_key(message, message=True) is not None:
        into.known += profile.result
    return into


def extra_pieces(tools: Sequence[Any], tool_choice: Any, response_format: Any, profile: Profile) -> Pieces:
    """What is sent besides the messages: tools, the wanted form of the reply, and its beginning."""
    into = Pieces(known=REPLY_TOKENS + (profile.tools if tools else 0))
    for tool in tools:
        _tool(tool, profile, into)
    for more in (tool_choice, response_format):
        if more:
            into.texts.append(_json(more))
    return into


def _tool(tool: Any, profile: Profile, into: Pieces) -> None:
    into.known += profile.tool
    fields = _mapping(tool) or {}
    inner = _mapping(fields.get("function", fields)) or {}
    schema = _mapping(inner.get("parameters", inner.get("input_schema")) or {})
    if not isinstance(inner.get("name"), str) or schema is None:
        into.texts.append(_json(tool))
        return
    described = str(inner.get("description") or "")
    into.known += 1 if described else 0
    into.texts += [inner["name"], described]
    if schema and profile.result:
        into.texts.append(_json(schema))
    elif schema:
        _schema(schema, into, 0)
    for key, value in inner.items():
        if key not in ("name", "description", "parameters", "input_schema", "type", "strict"):
            into.texts += [key, _json(value)]


def _schema(schema: Any, into: Pieces, depth: int) -> None:
    """A JSON schema as it is written out for a model: properties with type and description."""
    fields = _mapping(schema)
    if fields is None or depth > _DEEP:
        into.texts.append(_json(schema))
        return
    for key, value in fields.items():
        inner = _inner(key, value)
        if inner is not None:
            into.known += PROPERTY_TOKENS * len(inner)
            for name, item in inner:
                into.texts.append(name)
                _schema(item, into, depth + 1)
        elif key == "enum" and isinstance(value, list):
            values = cast("list[Any]", value)
            into.known += PROPERTY_TOKENS * len(values)
            into.texts += [v if isinstance(v, str) else _json(v) for v in values]
        elif key in ("type", "description") and isinstance(value, str):
            into.known += 2 if key == "description" else 0
            into.texts.append(value)
        elif key not in ("required", "additionalProperties"):
            into.texts += [key, value if isinstance(value, str) else _json(value)]


def _inner(key: str, value: object) -> list[tuple[str, Any]] | None:
    """Schemas in a schema, each with its name; None: the key holds none."""
    if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
        return list(cast("dict[str, Any]", value).items())
    if key in _UNIONS and isinstance(value, list):
        return [("", one) for one in cast("list[Any]", value)]
    return [("", value)] if key == "items" else None


def _mapping(value: object) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return str(value)


def tally(pieces: Sequence[Pieces], count: Count, margin: float) -> list[float]:
    """The tokens of each, all their texts counted at once."""
    counts = iter(count([text for piece in pieces for text in piece.texts]))
    return [piece.known + margin * sum(next(counts) for _ in piece.texts) for piece in pieces]
