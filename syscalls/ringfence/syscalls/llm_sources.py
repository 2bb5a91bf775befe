"""Where a picture, a file or a sound of a request comes from, if it does not stand in it: a URL, or a pointer of the program's.

A model's host fetches URLs by itself, so one is sent only where a rule lets the agent get it: what is fetched could carry out
anything. A pointer names an artifact or a file of the agent; the kernel reads it, where rules let the agent read it. No I/O.
"""

from __future__ import annotations

import binascii
import mimetypes
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, cast
from urllib.parse import quote, unquote

from ringfence.policy.canonical import bare_url, canonical_url
from ringfence.policy.problems import PatternError
from ringfence.syscalls.artifacts_put import check_name
from ringfence.syscalls.base import Question
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.llm_parts import ARTIFACTS, BINARY, is_taken
from ringfence.syscalls.words import shown

WORKSPACE: Final = "ringfence://workspace/"
"""What a pointer to a file begins with."""
SOURCES_MAX: Final = 256
"""URLs and pointers of one request."""
_LINKS: Final = frozenset({"image_url", "video_url", "audio_url", "file_url", "file_data"})
"""Fields that hold where something comes from, or an object whose `url` does, or a list of these."""
_KINDS: Final = ("image", "video", "audio")
"""Kinds of parts that some hosts take with a field of the same name, `url` or `source` in place of these."""
_PLACES: Final = ("file", "input_audio")
"""Objects of a part whose `url` or `data` is its content."""
_SCHEME: Final = re.compile(r"[\s\x00-\x20]*([A-Za-z][A-Za-z0-9+.-]*):")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_=\s-]*", re.ASCII)
_SHOWN_CHARS: Final = 200
_BEGINNINGS: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
)


class Pointer(NamedTuple):
    """What a program's pointer names: an artifact by its name, or a file by its path."""

    artifact: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        """The last part of it: what a file is called where a protocol wants a name."""
        return self.artifact or self.path.rpartition("/")[2]

    @property
    def text(self) -> str:
        """As a program would write it, each in one way."""
        if self.artifact:
            return ARTIFACTS + self.artifact
        return WORKSPACE + quote(self.path.removeprefix("/workspace/"), safe="/")


class Content(NamedTuple):
    """What a pointer stands for."""

    data: bytes
    media_type: str


class Paths(Protocol):
    """Finds out what a path of the workspace names."""

    def __call__(self, path: str) -> str:
        """The canonical path."""
        ...


_Act = Callable[[str], Content | str]
"""What becomes of one source: a content in its place, or another text."""


def questions(messages: list[Any], resolve: Paths) -> tuple[Question, ...]:
    """What rules have to allow so that the sources in a prompt may be sent; each once, in order.

    Raises:
        InvalidRequest: there are too many, or one is of a kind that nobody can judge.
    """
    asked: dict[Question, None] = {}
    seen = 0

    def ask(text: str) -> str:
        nonlocal seen
        seen += 1
        if seen > SOURCES_MAX:
            raise InvalidRequest(f"the request has more than {SOURCES_MAX} URLs and pointers; send fewer")
        found = pointer_of(text)
        if found is None:
            asked[Question(action="http.get", resource=_url(text))] = None
        elif found.artifact:
            asked[Question(action="artifacts.get", resource=found.artifact)] = None
        else:
            asked[Question(action="fs.read", resource=resolve(found.path))] = None
        return text

    _visit(messages, ask)
    return tuple(asked)


def pointers(messages: list[Any]) -> set[Pointer]:
    """What the program's pointers in a prompt name."""
    found: set[Pointer] = set()

    def note(text: str) -> str:
        one = pointer_of(text)
        if one is not None:
            found.add(one)
        return text

    _visit(messages, note)
    return found


def filled(messages: list[Any], contents: Mapping[Pointer, Content]) -> list[Any]:
    """A prompt with contents in place of the program's pointers, and each URL as it was judged.

    Raises:
        KeyError: a content is not there.
    """

    def fill(text: str) -> Content | str:
        found = pointer_of(text)
        return _url(text) if found is None else contents[found]

    return cast("list[Any]", _visit(messages, fill))


def pointer_of(text: str) -> Pointer | None:
    """What a source names that is a pointer; None: it is a URL of HTTP.

    Raises:
        InvalidRequest: it is neither.
    """
    found = _SCHEME.match(text)
    scheme = "" if found is None else found[1].lower()
    if scheme in ("http", "https"):
        return None
    if text.startswith(ARTIFACTS):
        return Pointer(artifact=check_name(text.removeprefix(ARTIFACTS)))
    if text.startswith(WORKSPACE) and len(text) > len(WORKSPACE):
        try:
            return Pointer(path=f"/workspace/{unquote(text.removeprefix(WORKSPACE), errors='strict')}")
        except UnicodeDecodeError:
            raise InvalidRequest(
                f"the pointer `{shown(text, _SHOWN_CHARS)}` has escapes that are no UTF-8; write the path's characters as they are"
            ) from None
    raise InvalidRequest(
        f"`{shown(text, _SHOWN_CHARS)}` is nothing that can be sent to a model: write the content as a `data:` URL, "
        f"`{ARTIFACTS}NAME` for an artifact, `{WORKSPACE}PATH` for a file, or an `https:` URL that a rule allows"
    )


def media_type_of(name: str, data: bytes, said: str) -> str:
    """What kind of content something is: as whoever kept it said, by how it begins, or by its name."""
    if said and said != BINARY:
        return said.partition(";")[0].strip()
    for beginning, kind in _BEGINNINGS:
        if data.startswith(beginning):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return mimetypes.guess_type(name, strict=True)[0] or BINARY


def _url(text: str) -> str:
    try:
        url = canonical_url(text)
    except PatternError as error:
        raise InvalidRequest(f"the URL `{shown(text, _SHOWN_CHARS)}` can't be judged: {error}") from None
    if bare_url(url) != url:
        raise InvalidRequest(
            f"the URL `{shown(text, _SHOWN_CHARS)}` can't be judged: some servers read it as another one; write it without `;` and "
            "without dots and spaces at the end of a segment"
        )
    return url


def _is_source(text: object) -> bool:
    r"""Whether a text says where something is, and does not hold it.

    INVARIANT: all that is neither base64 nor a `data:` URL does: readers of URLs leave out tabs and line breaks, and add what is
    missing, so `ht\tps://…` and `//…` may lead somewhere, too.
    """
    if not isinstance(text, str) or is_taken(text):
        return False
    found = _SCHEME.match(text)
    return _BASE64.fullmatch(text) is None if found is None else found[1].lower() != "data"


def has_sources(value: object) -> bool:
    """Whether a part of a request beside its prompt says where something comes from: nothing is put in its place there."""
    found = False

    def note(text: str) -> str:
        nonlocal found
        found = True
        return text

    _visit(value, note)
    return found


def _visit(value: Any, act: _Act, *, placed: bool = False) -> Any:
    """A prompt with what `act` makes of each source in it; parts without any come back as they are.

    `placed`: it is an object whose `url` or `data` is the content of a part.
    """
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return _same(items, [_visit(inner, act) for inner in items])
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    kind = fields.get("type")
    holds = placed or kind in _KINDS
    changed: dict[str, Any] = {}
    for key, inner in fields.items():
        if key == "input" and kind in ("tool_use", "server_tool_use"):
            changed[key] = inner  # what a model gave to a tool: nobody fetches it
        elif key in _LINKS:
            changed |= _link(key, inner, fields, act)
        elif holds and (key in ("url", kind) or (key == "source" and isinstance(inner, str))):
            changed[key] = _where(inner, act)
        elif placed and key == "data" and _is_source(inner):
            made = act(inner)
            changed[key] = inner if made is inner else _base64(made)
        elif key == "source" and isinstance(inner, dict):
            changed[key] = _source(cast("dict[str, Any]", inner), act)
        else:
            changed[key] = _visit(inner, act, placed=key in _PLACES)
    same = changed.keys() == fields.keys() and all(changed[key] is fields[key] for key in fields)
    return fields if same else changed


def _same(old: list[Any], made: list[Any]) -> list[Any]:
    return made if any(new is not was for new, was in zip(made, old, strict=True)) else old


def _where(held: Any, act: _Act) -> Any:
    """What says where something comes from, with its content in place of it: a text, an object with `url`, or a list of these."""
    if isinstance(held, list):
        items = cast("list[Any]", held)
        return _same(items, [_where(inner, act) for inner in items])
    if isinstance(held, dict):
        return _visit(held, act, placed=True)
    if not _is_source(held):
        return held
    made = act(held)
    return _data_url(made) if isinstance(made, Content) else made


def _link(key: str, held: Any, around: Mapping[str, Any], act: _Act) -> dict[str, Any]:
    """The field with its content in place of its source."""
    if key not in ("file_url", "file_data") or not _is_source(held):
        return {key: _where(held, act)}
    made = act(held)
    if not isinstance(made, Content):
        return {key: made}
    # Files are given by their bytes together with a name.
    found = pointer_of(held)
    named = {} if around.get("filename") or found is None else {"filename": found.name}
    return {"file_data": _data_url(made), **named}


def _source(held: dict[str, Any], act: _Act) -> dict[str, Any]:
    """Where an image or a document of the messages protocol comes from."""
    if not _is_source(held.get("url")):
        # A text stands in it; anything else may be base64, or a document that is made of parts.
        return held if held.get("type") == "text" else cast("dict[str, Any]", _visit(held, act, placed=True))
    made = act(held["url"])
    if made is held["url"]:
        return held
    if not isinstance(made, Content):
        return {**held, "url": made}
    if made.media_type.startswith("text/"):
        try:
            return {"type": "text", "media_type": "text/plain", "data": made.data.decode()}
        except UnicodeDecodeError:
            pass
    return {"type": "base64", "media_type": made.media_type, "data": _base64(made)}


def _base64(made: Content | str) -> str:
    return made if isinstance(made, str) else binascii.b2a_base64(made.data, newline=False).decode("ascii")


def _data_url(made: Content) -> str:
    return f"data:{made.media_type};base64,{_base64(made)}"
