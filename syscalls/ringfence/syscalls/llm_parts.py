"""Binary parts of a request to a model: they are taken out of what is recorded, and a pointer stands in their place. No I/O.

Clients send pictures, files and sound as base64 within JSON, and the same ones again with every turn. Each becomes an artifact
by the hash of its content; the pointer says which, and how long it is. What kind it is still stands beside it, where the client
wrote it.

INVARIANT: what is put back is what was taken out, character by character. Only base64 in its one canonical form is taken, and
a text that itself reads like a pointer is taken too, so that every pointer in a recorded request was written here.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

ARTIFACTS: Final = "ringfence://artifacts/"
"""What a pointer to an artifact begins with."""
SENT: Final = re.compile(r"sent\.[0-9a-f]{64}", re.ASCII)
"""Names of artifacts that keep what was sent: only the kernel gives them."""
LEAST_CHARS: Final = 4096
"""Shorter ones stay where they are."""
BINARY: Final = "application/octet-stream"
_TEXT: Final = "text/plain; charset=utf-8"
_HEAD: Final = re.compile(r"data:[^,\s]{0,200};base64,")
_TAKEN: Final = re.compile(
    r"(?P<head>data:[^,\s]{0,200};base64,)?ringfence://artifacts/(?P<name>sent\.[0-9a-f]{64})"
    r"\?(?P<kind>base64|text)=(?P<size>[0-9]{1,9})",
    re.ASCII,
)
_TAKEN_CHARS_MAX: Final = 400
_MEDIA_TYPE: Final = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,63}/[A-Za-z0-9!#$&^_.+-]{1,63}", re.ASCII)
_BEGINNING: Final = re.compile(r"[A-Za-z0-9+/]{64}", re.ASCII)
_FORMAT: Final = re.compile(r"[a-z0-9]{1,16}", re.ASCII)


class Part(NamedTuple):
    """What was taken out: the content of one artifact."""

    data: bytes
    media_type: str


class Kept(NamedTuple):
    """Where a part is kept."""

    name: str
    size_bytes: int

    @property
    def ref(self) -> str:
        """SHA-256 of its content."""
        return self.name.removeprefix("sent.")


def take(value: Any, parts: dict[str, Part]) -> Any:
    """A JSON value with pointers in place of its binary parts; these go to `parts`, by the names of their artifacts.

    The value that is given stays as it is; where nothing is taken, it comes back itself.
    """
    return _take(value, parts, "")


def _take(value: Any, parts: dict[str, Part], media_type: str) -> Any:
    if isinstance(value, str):
        return _taken(value, parts, media_type)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        told = _told(fields)
        changed = {key: _take(inner, parts, told) for key, inner in fields.items()}
        return changed if any(changed[key] is not fields[key] for key in fields) else fields
    if isinstance(value, list):
        items = cast("list[Any]", value)
        made = [_take(inner, parts, "") for inner in items]
        return made if any(new is not old for new, old in zip(made, items, strict=True)) else items
    return value


def _told(fields: Mapping[str, Any]) -> str:
    """What kind of content a part says that it holds; empty: it doesn't."""
    said, sound = fields.get("media_type"), fields.get("format")
    if isinstance(said, str) and _MEDIA_TYPE.fullmatch(said):
        return said
    return f"audio/{sound}" if isinstance(sound, str) and _FORMAT.fullmatch(sound) else ""


def _taken(text: str, parts: dict[str, Part], media_type: str) -> str:
    if len(text) < LEAST_CHARS:
        if len(text) > _TAKEN_CHARS_MAX or _TAKEN.fullmatch(text) is None:
            return text
        return _pointer("", text.encode(), _TEXT, "text", parts)
    head = _HEAD.match(text)
    start = 0 if head is None else head.end()
    data = _decoded(text, start)
    if data is None:
        return text
    said = text[5:start].partition(";")[0]
    kind = said if _MEDIA_TYPE.fullmatch(said) else media_type or BINARY
    return _pointer(text[:start], data, kind, "base64", parts)


def _decoded(text: str, start: int) -> bytes | None:
    """The bytes of base64 that is the only one for them; None: it is none."""
    if len(text) - start < LEAST_CHARS or _BEGINNING.match(text, start) is None:
        return None
    try:
        coded = text[start:].encode("ascii")
        data = binascii.a2b_base64(coded, strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return data if binascii.b2a_base64(data, newline=False) == coded else None


def _pointer(head: str, data: bytes, media_type: str, kind: str, parts: dict[str, Part]) -> str:
    name = f"sent.{hashlib.sha256(data).hexdigest()}"
    parts.setdefault(name, Part(data, media_type))
    return f"{head}{ARTIFACTS}{name}?{kind}={len(data)}"


def is_taken(text: str) -> bool:
    """Whether a text in a recorded request stands for what was taken out there."""
    return len(text) <= _TAKEN_CHARS_MAX and _TAKEN.fullmatch(text) is not None


def _pointers(value: Any) -> Iterator[re.Match[str]]:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            if len(one) <= _TAKEN_CHARS_MAX and (found := _TAKEN.fullmatch(one)):
                yield found
        elif isinstance(one, dict):
            pending.extend(cast("dict[str, Any]", one).values())
        elif isinstance(one, list):
            pending.extend(cast("list[Any]", one))


def kept(value: Any) -> set[Kept]:
    """What was taken out of a recorded value."""
    return {Kept(found["name"], int(found["size"])) for found in _pointers(value)}


def extent(value: Any) -> int:
    """By how many characters a recorded value is shorter than it was."""
    return sum(
        (_coded(int(found["size"])) if found["kind"] == "base64" else int(found["size"]))
        + len(found["head"] or "")
        - len(found[0])
        for found in _pointers(value)
    )


def _coded(size: int) -> int:
    """Characters of so many bytes in base64."""
    return 4 * ((size + 2) // 3)


def put_back(value: Any, contents: Mapping[str, bytes]) -> Any:
    """A recorded value as it was before `take`; the one that is given stays as it is.

    Args:
        value: with pointers.
        contents: of the artifacts that they name.

    Raises:
        KeyError: one of them is not there.
    """
    if isinstance(value, str):
        found = _TAKEN.fullmatch(value) if len(value) <= _TAKEN_CHARS_MAX else None
        if found is None:
            return value
        data = contents[found["name"]]
        if found["kind"] == "text":
            return data.decode()
        return (found["head"] or "") + binascii.b2a_base64(data, newline=False).decode("ascii")
    if isinstance(value, dict):
        return {key: put_back(inner, contents) for key, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [put_back(inner, contents) for inner in cast("list[Any]", value)]
    return value
