"""Fields of answers that a resource vouches for, though the rest of what it answers is untrusted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Items, Node, Scalar

_FIELD: Final = re.compile(r"(/([^~/*]|~[01])*|/\*){1,16}")
_FORM: Final = "write `/items/*/owner`, with `*` for every one of a list or object"


@dataclass(frozen=True, slots=True, kw_only=True)
class VouchDecl:
    """Fields of a JSON answer that are the resource's own word: JSON pointers, where `*` is every one of a list or object."""

    method: str
    path: str
    fields: tuple[str, ...]


def read_vouches(
    reader: Reader, node: Node, what: str, place_of: Callable[[Reader, Scalar], tuple[str, str]]
) -> tuple[VouchDecl, ...]:
    """Read `vouches` of a resource; `place_of` reads its keys, which are those of `effects`."""
    found: list[VouchDecl] = []
    for key, value in reader.free_mapping(node, what):
        method, path = place_of(reader, key)
        fields: list[str] = []
        for item in value.items if isinstance(value, Items) else [value]:
            field = reader.text(item, what)
            if field is not None and _FIELD.fullmatch(field) is None:
                reader.wrong(item, f"`{field}` is no field of an answer", _FORM)
            elif field is not None:
                fields.append(field)
        if isinstance(value, Items) and not value.items:
            reader.wrong(value, f"`{key.text}` vouches for nothing", "name a field, or leave it out")
        if fields:
            found.append(VouchDecl(method=method, path=path, fields=tuple(fields)))
    return tuple(found)
