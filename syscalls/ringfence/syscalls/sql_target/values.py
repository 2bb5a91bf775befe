"""Values between JSON and PostgreSQL.

In answers: booleans and NULL are JSON's own; `smallint`, `integer`, `bigint` and `oid` are numbers; `real`
and `double precision` are numbers, or the strings `NaN`, `Infinity` and `-Infinity`; `numeric` is a string,
so that no digit is lost; `json` and `jsonb` are themselves; `bytea` is base64; timestamps are ISO 8601 with
`T`, and `Z` where they have a zone; arrays are lists; everything else is the text that PostgreSQL prints. In
parameters: lists are arrays, objects (and lists that hold objects) are `jsonb`.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import psycopg
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TIMESTAMP: Final = re.compile(r"(\d{4,}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)(\+00)?")
_ARRAY_BOUNDS: Final = re.compile(r"(\[-?\d+:-?\d+\])+=")


def to_parameter(value: Any) -> Any:
    """A JSON value as a parameter."""
    if isinstance(value, dict):
        return Jsonb(value)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return Jsonb(items) if _holds_object(items) else items
    return value


def _holds_object(items: list[Any]) -> bool:
    return any(
        isinstance(item, dict) or (isinstance(item, list) and _holds_object(cast("list[Any]", item)))
        for item in items
    )


def to_json(text: str | None, oid: int) -> Any:
    """A value's text as JSON, by the oid of its type."""
    if text is None:
        return None
    convert = _SCALARS.get(oid)
    if convert is not None:
        return convert(text)
    element = _ELEMENTS.get(oid)
    if element is not None:
        return _array(text, *element)
    return text


def row_to_json(row: Sequence[str | None], oids: Sequence[int]) -> list[Any]:
    """A row as a list of JSON values."""
    return [to_json(text, oid) for text, oid in zip(row, oids, strict=True)]


def _float(text: str) -> float | str:
    return text if text in ("NaN", "Infinity", "-Infinity") else float(text)


def _bytea(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()


def _timestamp(text: str) -> str:
    match = _TIMESTAMP.fullmatch(text)
    return text if match is None else f"{match[1]}T{match[2]}{'Z' if match[3] else ''}"


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text  # numbers that no double holds, or nesting that nobody reads


def _array(text: str, oid: int, delimiter: str) -> list[Any]:
    """An array in its output form, as `{1,NULL,"a b"}`; bounds other than 1 are dropped."""
    bounds = _ARRAY_BOUNDS.match(text)
    stack: list[list[Any]] = [[]]
    at = bounds.end() if bounds else 0
    while at < len(text):
        char = text[at]
        if char == "{":
            inner: list[Any] = []
            stack[-1].append(inner)
            stack.append(inner)
            at += 1
        elif char == "}":
            stack.pop()
            at += 1
        elif char == delimiter:
            at += 1
        else:
            item, at = _element(text, at, delimiter)
            stack[-1].append(to_json(item, oid))
    return stack[0][0]


def _element(text: str, at: int, delimiter: str) -> tuple[str | None, int]:
    if text[at] != '"':
        end = at
        while text[end] not in (delimiter, "}"):
            end += 1
        bare = text[at:end]
        return (None if bare == "NULL" else bare), end
    parts: list[str] = []
    at += 1
    while text[at] != '"':
        if text[at] == "\\":
            at += 1
        parts.append(text[at])
        at += 1
    return "".join(parts), at + 1


_BY_NAME: Final[dict[str, Callable[[str], Any]]] = {
    "bool": lambda text: text == "t",
    "int2": int,
    "int4": int,
    "int8": int,
    "oid": int,
    "float4": _float,
    "float8": _float,
    "bytea": _bytea,
    "json": _json,
    "jsonb": _json,
    "timestamp": _timestamp,
    "timestamptz": _timestamp,
}
_SCALARS: Final = {psycopg.adapters.types[name].oid: convert for name, convert in _BY_NAME.items()}
_ELEMENTS: Final = {
    info.array_oid: (info.oid, info.delimiter) for info in psycopg.adapters.types if info.array_oid
}
