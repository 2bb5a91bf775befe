"""The rows of the table as tools of the Model Context Protocol: names, JSON Schemas and hints, all from the table itself.

Bytes have two names: `NAME_text` holds them where they are UTF-8 text, `NAME` in base64 where not.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from ringfence.kernel.doors.mcp_words import words
from ringfence.syscalls.base import Effect
from ringfence.syscalls.codec import decode_arguments
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.table import LIST_VALUE, VALUE, Row, int_range, scalar_type

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

WITHHELD: Final = frozenset(
    {
        "checkpoint.save",
        "mcp.call",
        "mcp.tools",
        "mcp.resources",
        "mcp.read",
        "mcp.prompts",
        "mcp.prompt",
        "mcp.complete",
    }
)
"""Rows that are no tools: a checkpoint is the state of a program that the library restarts, saved from its main lane; and each tool of a
declared MCP server is one by itself, its resources and prompts are such."""

TEXT: Final = "_text"
_OUTSIDE: Final = frozenset({"url", "model", "database", "object", "prefix"})
"""Resource fields that name something beyond the kernel's own house."""
_NAMES: Final[Mapping[type, str]] = {bool: "boolean", float: "number", int: "integer", str: "string"}


def tool_name(action: str) -> str:
    """The name of an action in the characters that clients take: `fs.read` is `fs_read`."""
    return action.replace(".", "_")


def by_name(table: Mapping[str, Row]) -> dict[str, Row]:
    """Rows by the names of their tools."""
    return {tool_name(action): row for action, row in table.items() if action not in WITHHELD}


def tool(row: Row) -> dict[str, Any]:
    """A row as `tools/list` shows it."""
    return {
        "name": tool_name(row.action),
        "title": row.action,
        "description": _description(row),
        "inputSchema": _input(row),
        "outputSchema": _object(row.response),
        "annotations": hints(row),
    }


def hints(row: Row) -> dict[str, Any]:
    """What a client may tell its user about a row. A hint that can't be known from the table is the cautious one."""
    reads = row.effect is Effect.READ
    # A point is taken where something that is there may become another; what leaves the system has none.
    destroys = row.point or row.effect in (Effect.DESTROY, Effect.EXTERNAL)
    leaves = row.effect is Effect.EXTERNAL or (row.intent and row.resource_field in _OUTSIDE)
    return {
        "title": row.action,
        "readOnlyHint": reads,
        "destructiveHint": not reads and destroys,
        "idempotentHint": reads,
        "openWorldHint": leaves,
    }


def _description(row: Row) -> str:
    undone = " The kernel can undo it." if row.point and row.effect is not Effect.EXTERNAL else ""
    return f"{words()[row.method]}{undone}"


# -- schemas ------------------------------------------------------------------------------------------------------------


def _input(row: Row) -> dict[str, Any]:
    schema = _object(row.request)
    # Messages have a default for every field; what a call is about has none that says something, but where it is told.
    about = row.resource_field
    if about and "Empty" not in words()[f"{row.request.name}.{about}"]:
        schema["required"] = [about]
    schema["additionalProperties"] = False
    return schema


def _object(message: Descriptor) -> dict[str, Any]:
    said = words()
    shown: dict[str, Any] = {}
    for field in cast("list[FieldDescriptor]", message.fields):
        text = said[f"{message.name}.{field.name}"]
        if _is_bytes(field):
            other = f"{field.name}{TEXT}"
            shown[other] = {"type": "string", "description": f"{text} As UTF-8 text."}
            shown[field.name] = {
                "type": "string",
                "contentEncoding": "base64",
                "description": f"{text} In base64, in place of `{other}`, where it is no text.",
            }
        else:
            shown[field.name] = {**_field(field), "description": text}
    return {"type": "object", "properties": shown}


def _is_bytes(field: FieldDescriptor) -> bool:
    return field.type == field.TYPE_BYTES and not field.is_repeated


def _field(field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        return {"type": "object", "additionalProperties": _one(value)}
    if field.is_repeated:
        return {"type": "array", "items": _one(field)}
    return _one(field)


def _one(field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None:
        if field.message_type.full_name == VALUE:
            return {}
        if field.message_type.full_name == LIST_VALUE:
            return {"type": "array", "items": {}}
        return _object(field.message_type)
    bounds = int_range(field)
    if bounds is None:
        return {"type": _NAMES.get(scalar_type(field), "string")}
    # Numbers beyond 2**53 are not exact in every client, so bounds of 64 bits are not told.
    return {"type": "integer", **({"minimum": 0} if bounds[0] == 0 else {})}


# -- arguments and results ----------------------------------------------------------------------------------------------


def arguments(row: Row, given: Mapping[str, Any]) -> bytes:
    """The canonical arguments of a row that a tool was called with.

    Raises:
        InvalidRequest: they are none; says which field, and what fields there are.
    """
    plain = dict(given)
    for field in cast("list[FieldDescriptor]", row.request.fields):
        text = plain.pop(f"{field.name}{TEXT}", None) if _is_bytes(field) else None
        if text is None:
            continue
        if not isinstance(text, str) or field.name in plain:
            raise InvalidRequest(
                f"`{field.name}{TEXT}` is a text, in place of `{field.name}`; give one of the two"
            )
        plain[field.name] = base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()
    try:
        return decode_arguments(row, msgspec.json.encode(plain))[1]
    except InvalidRequest as error:
        known = ", ".join(f"`{name}`" for name in _object(row.request)["properties"]) or "none"
        raise InvalidRequest(f"{error.message}; its fields: {known}") from None


def result(row: Row, recorded: bytes) -> dict[str, Any]:
    """A recorded result as a tool gives it."""
    return _shown(row.response, json.loads(recorded))


def _shown(message: Descriptor, value: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, item in value.items():
        field: FieldDescriptor | None = message.fields_by_name.get(name)
        if field is None or item is None:
            continue
        if _is_bytes(field):
            data = base64.b64decode(item)
            try:
                shown[f"{name}{TEXT}"] = data.decode()
            except UnicodeDecodeError:
                shown[name] = item
        else:
            shown[name] = item
    return shown
