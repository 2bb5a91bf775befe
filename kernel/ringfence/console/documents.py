"""Reads the kernel's JSON documents. Another version may leave keys out; nothing here fails on that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Mapping


def as_record(value: object) -> dict[str, Any]:
    """The value as an object, an empty one where it is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def record(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object at a key, an empty one where there is none."""
    return as_record(document.get(key))


def items(document: Mapping[str, Any], key: str) -> list[Any]:
    """The list at a key, an empty one where there is none."""
    value = document.get(key)
    return cast("list[Any]", value) if isinstance(value, list) else []


def records(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects of the list at a key."""
    return [found for value in items(document, key) if (found := as_record(value))]


def source_line(source: Mapping[str, Any]) -> str:
    """Where an argument of a call was read, in one line."""
    where = f"{source.get('action', '')} of {source.get('resource', '')}".removesuffix(" of ")
    mark = ", untrusted" if source.get("untrusted") else ""
    return f"{source.get('argument', '')} `{source.get('text', '')}` stands in {where}{mark}"
