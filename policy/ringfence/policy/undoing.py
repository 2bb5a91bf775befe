"""How an HTTP call can be undone: what is read and kept before it and put back, or the call that makes up for it afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Items, Node, Scalar, Table

KEYS: Final = ("keep", "put_back", "remove", "compensate", "body")
"""Keys of each mapping below `undo`."""

PUT_BACK_METHODS: Final = ("PUT", "POST", "PATCH")
COMPENSATE_METHODS: Final = ("DELETE", "POST", "PUT", "PATCH")
LOCATION: Final = "location"
REPLY: Final = "reply:"
_POINTER: Final = r"(?:/(?:[^~/{}]|~[01])*){1,16}"
_HOLE: Final = re.compile(rf"\{{(path|location|(?:reply:)?{_POINTER})\}}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*")
_FORM: Final = (
    'write `{keep: "GET /files/{/id}", put_back: "PUT /files/{/id}"}` or `{compensate: "DELETE {location}"}`'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A request: its method, and its path below the base, with holes.

    `{path}` is the path of the call, `{/a/b}` a field of its JSON body, `{reply:/a/b}` one of the JSON that answered it, and
    `{location}` the `Location` of that answer.
    """

    method: str
    parts: tuple[str, ...]
    """Plain text and holes by turns; a hole is `path`, `location`, a JSON pointer, or `reply:` and one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoDecl:
    """How calls of one method on matching paths are undone: `keep` and `put_back`, or `compensate`.

    Attributes:
        remove: what puts back that nothing stood there; None: such a call is refused.
        body: JSON that the compensation sends, with holes in its texts; None: nothing.
    """

    method: str
    path: str
    keep: Template | None = None
    put_back: Template | None = None
    remove: Template | None = None
    compensate: Template | None = None
    body: Any = None


def split_holes(text: str) -> list[str]:
    """Plain text and holes by turns."""
    return _HOLE.split(text)


def read_undo(
    reader: Reader, node: Node, what: str, place_of: Callable[[Reader, Scalar], tuple[str, str]]
) -> tuple[UndoDecl, ...]:
    """Read `undo` of a resource; `place_of` reads its keys, which are those of `effects`."""
    found: list[UndoDecl] = []
    for key, value in reader.free_mapping(node, what):
        method, path = place_of(reader, key)
        nodes = {
            name: inner for name, (_, inner) in reader.mapping(value, f"{what}.{key.text}", KEYS).items()
        }
        wanted = ("compensate",) if "compensate" in nodes else ("keep", "put_back")
        mixed = [name for name in nodes if (name in {"compensate", "body"}) != (wanted == ("compensate",))]
        missing = [name for name in wanted if name not in nodes]
        if missing:
            reader.wrong(value, f"`{key.text}` has no `{missing[0]}`", _FORM)
            continue
        if mixed:
            text = f"`{key.text}` has `{mixed[0]}` beside `{wanted[0]}`"
            reader.wrong(value, text, "keep one of the two ways; " + _FORM)
            continue
        if wanted == ("compensate",):
            one = _compensation(reader, nodes, what)
        else:
            one = _snapshot(reader, nodes, what)
        if one is not None:
            found.append(UndoDecl(method=method, path=path, **one))
    return tuple(found)


def _snapshot(reader: Reader, nodes: dict[str, Node], what: str) -> dict[str, Any] | None:
    keep = _template(reader, nodes["keep"], f"{what}.keep", ("GET",))
    put_back = _template(reader, nodes["put_back"], f"{what}.put_back", PUT_BACK_METHODS)
    remove = None
    if "remove" in nodes:
        remove = _template(reader, nodes["remove"], f"{what}.remove", ("DELETE",))
        if remove is None:
            return None
    return (
        None if keep is None or put_back is None else {"keep": keep, "put_back": put_back, "remove": remove}
    )


def _compensation(reader: Reader, nodes: dict[str, Node], what: str) -> dict[str, Any] | None:
    name = f"{what}.compensate"
    call = _template(reader, nodes["compensate"], name, COMPENSATE_METHODS, after=True)
    body = None
    if "body" in nodes:
        body = _value(reader, nodes["body"], f"{what}.body")
        if call is not None and call.method == "DELETE":
            reader.wrong(nodes["body"], "a DELETE sends no body", "leave `body` out")
            return None
    return None if call is None else {"compensate": call, "body": body}


def _template(
    reader: Reader, node: Node, what: str, methods: tuple[str, ...], *, after: bool = False
) -> Template | None:
    text = reader.text(node, what)
    if text is None:
        return None
    method, space, path = text.partition(" ")
    parts = split_holes(path)
    holes = parts[1::2]
    begins = path.startswith(("/", "{path}")) or (after and path == "{location}")
    if not space or method not in methods or not begins:
        reader.wrong(node, f"`{text}` is no {' or '.join(methods)} and path", _FORM)
        return None
    if not after and any(hole == LOCATION or hole.startswith(REPLY) for hole in holes):
        reader.wrong(
            node, f"`{text}` names the answer, which is not there yet", "only `compensate` comes after it"
        )
        return None
    if any(_PLAIN.fullmatch(plain) is None for plain in parts[::2]) or (
        LOCATION in holes and path != "{location}"
    ):
        reader.wrong(
            node,
            f"`{text}` holds what can't stand in a URL",
            "use `{path}`, `{/field}` and `{reply:/field}`, `{location}` alone, and escape the rest",
        )
        return None
    return Template(method=method, parts=tuple(parts))


def _value(reader: Reader, node: Node, what: str) -> Any:
    """A JSON value as it is written."""
    if isinstance(node, Table):
        return {key.text: _value(reader, value, f"{what}.{key.text}") for key, value in node.entries}
    if isinstance(node, Items):
        return [_value(reader, item, what) for item in node.items]
    if isinstance(node.value, str):
        plain = "".join(split_holes(node.value)[::2])
        if "{" in plain or "}" in plain:
            reader.wrong(
                node,
                f"`{node.value}` has a brace that is no hole",
                "write `{/field}`, `{reply:/field}` or `{path}`",
            )
    return node.value
