"""How a destructive HTTP call can be undone: what is read and kept before it, and how that is put back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Node, Scalar

KEYS: Final = ("keep", "put_back")
"""Keys of each mapping below `undo`."""

PUT_BACK_METHODS: Final = ("PUT", "POST", "PATCH")
_HOLE: Final = re.compile(r"\{(path|(?:/(?:[^~/{}]|~[01])*){1,16})\}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*")
_FORM: Final = 'write `{keep: "GET /files/{/id}", put_back: "PUT /files/{/id}"}`'


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A request: its method, and below the base its path, where `{path}` is that of the call and `{/a/b}` a field of its JSON body."""

    method: str
    parts: tuple[str, ...]
    """Plain text and holes by turns; a hole is `path` or a JSON pointer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoDecl:
    """How calls of one method on matching paths are undone."""

    method: str
    path: str
    keep: Template
    put_back: Template


def read_undo(
    reader: Reader, node: Node, what: str, place_of: Callable[[Reader, Scalar], tuple[str, str]]
) -> tuple[UndoDecl, ...]:
    """Read `undo` of a resource; `place_of` reads its keys, which are those of `effects`."""
    found: list[UndoDecl] = []
    for key, value in reader.free_mapping(node, what):
        method, path = place_of(reader, key)
        fields = reader.mapping(value, f"{what}.{key.text}", KEYS)
        missing = [name for name in KEYS if name not in fields]
        if missing:
            reader.wrong(value, f"`{key.text}` has no `{missing[0]}`", _FORM)
            continue
        keep = _template(reader, fields["keep"][1], f"{what}.keep", ("GET",))
        put_back = _template(reader, fields["put_back"][1], f"{what}.put_back", PUT_BACK_METHODS)
        if keep is not None and put_back is not None:
            found.append(UndoDecl(method=method, path=path, keep=keep, put_back=put_back))
    return tuple(found)


def _template(reader: Reader, node: Node, what: str, methods: tuple[str, ...]) -> Template | None:
    text = reader.text(node, what)
    if text is None:
        return None
    method, space, path = text.partition(" ")
    parts = _HOLE.split(path)
    if not space or method not in methods or not path.startswith(("/", "{path}")):
        reader.wrong(node, f"`{text}` is no {' or '.join(methods)} and path", _FORM)
        return None
    if any(_PLAIN.fullmatch(plain) is None for plain in parts[::2]):
        reader.wrong(
            node,
            f"`{text}` holds what can't stand in a URL",
            "use `{path}` and `{/field}`, and escape the rest",
        )
        return None
    return Template(method=method, parts=tuple(parts))
