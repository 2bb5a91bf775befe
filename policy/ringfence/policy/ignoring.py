"""What a program's repeated calls may differ in and still be taken for the same (`restart: {ignore: [...]}`).

INVARIANT: this is about recognising a call alone. What is decided, sent and recorded is the call as it was made.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, cast

import msgspec
from ringfence.policy.actions import OF_SERVERS
from ringfence.policy.manifest_types import Ignored
from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Node

KEYS: Final = ("action", "at", "pattern")
MODELS: Final = "llm.complete"
"""Action of an entry that names none."""
ENTRIES_MAX: Final = 64
PATTERN_CHARS_MAX: Final = 1000
POINTER: Final = r"(/([^~/]|~[01])*)+"
ACTION: Final = r"[a-z][a-z0-9_]*(\.[A-Za-z0-9_@-]+)+(\.\*)?"
ANY: Final = "*"
"""A part of a pointer that stands for every member."""
IGNORED: Final = "(…)"
"""Stands for what is ignored where people compare."""
_POINTER: Final = re.compile(POINTER)
_TOOLS: Final = re.compile(r"mcp\.[^.*]+\.\*")
_COMPILED_BYTES_MAX: Final = 1 << 20
STEPS_MAX: Final = 300
"""Steps of a compiled pattern. What a text takes grows with them: each byte may cost every step of every pattern."""
STEPS_ALL_MAX: Final = 1000
"""The same of all patterns of a manifest."""
SAID: Final = frozenset(
    [
        "path",
        "to",
        "url",
        "uri",
        "model",
        "resource",
        "database",
        "statement",
        "key",
        "name",
        "object",
        "prefix",
        "server",
        "tool",
        "prompt",
        "peer",
        "task",
    ]
)
"""Arguments that say what a call is about. INVARIANT: they always count: a call is never answered as one about another thing."""
_PROMPT: Final = frozenset({("messages",), ("messages", ANY), (ANY,)})
_encode: Final = msgspec.json.Encoder(order="sorted").encode

Spot = tuple[tuple[str, ...], Any]
"""Where in a value something is ignored, and the pattern of what; None: all that is there."""


class BadPattern(ValueError):
    """A text that is no pattern; its own text says why."""


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """A pattern that takes time in proportion to the text, whatever the two are: agents write the texts.

    Raises:
        BadPattern: it is none.
    """
    # Not at the start of everything: most agents have no patterns.
    re2: Any = importlib.import_module("re2")
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _COMPILED_BYTES_MAX
    try:
        found = re2.compile(pattern.encode(), options)
    except re2.error as error:
        said: object = error.args[0] if error.args else b""
        raise BadPattern(said.decode(errors="replace") if isinstance(said, bytes) else str(said)) from None
    if found.programsize > STEPS_MAX:
        raise BadPattern(
            f"it has {found.programsize} steps when compiled, and at most {STEPS_MAX} are taken; repeat fewer times, or write `+`"
        )
    if found.search(b"") is not None:
        raise BadPattern("it matches an empty text, so it is everywhere")
    return found


# -- the manifest -----------------------------------------------------------------------------------------------------


def read_ignore(reader: Reader, node: Node, what: str) -> tuple[Ignored, ...]:
    """What varies from one start to the next."""
    items = reader.items(node, what)
    if len(items) > ENTRIES_MAX:
        text = f"`{what}` has {len(items)} entries"
        reader.wrong(node, text, f"write at most {ENTRIES_MAX}; one pattern may have several parts, as `a|b`")
        return ()
    found = [_read_one(reader, item, f"{what}[{at}]") for at, item in enumerate(items)]
    entries = tuple(one for one in found if one is not None)
    steps = sum(compiled(one.pattern).programsize for one in entries if one.pattern)
    if steps > STEPS_ALL_MAX:
        text = f"the patterns of `{what}` have {steps} steps when compiled, and at most {STEPS_ALL_MAX} are taken together"
        reader.wrong(node, text, "repeat fewer times, write `+`, or leave some out")
    return entries


def _read_one(reader: Reader, node: Node, what: str) -> Ignored | None:
    known = len(reader.problems)
    fields = reader.mapping(node, what, KEYS)
    action, at, pattern = MODELS, "", ""
    if "action" in fields:
        action = reader.action(fields["action"][1], f"{what}.action")
        if "*" in action and _TOOLS.fullmatch(action) is None:
            fix = "name one, such as `fs.write`, or all tools of one MCP server: `mcp.NAME.*`"
            reader.wrong(fields["action"][1], f"`{action}` names no single action", fix)
    if "at" in fields:
        at = reader.text(fields["at"][1], f"{what}.at") or ""
        if at and _POINTER.fullmatch(at) is None:
            fix = "write a JSON pointer into the call's arguments, such as `/extra/metadata/user_id`; `*` is any member"
            reader.wrong(fields["at"][1], f"`{at}` is no JSON pointer", fix)
        elif at and (problem := _too_much(_parts(at), whole="pattern" not in fields)):
            reader.wrong(fields["at"][1], f"`{at}` can't be ignored: {problem}", "name what varies within it")
    if "pattern" in fields:
        pattern = reader.text(fields["pattern"][1], f"{what}.pattern") or ""
        if problem := _pattern_problem(pattern):
            fix = "write a regular expression in RE2's syntax, without look-around and back-references"
            reader.wrong(fields["pattern"][1], f"`{pattern[:80]}` can't be used: {problem}", fix)
    if len(reader.problems) > known:
        return None
    if not at and not pattern:
        reader.wrong(node, f"`{what}` names nothing to ignore", "write `at`, `pattern` or both")
        return None
    return Ignored(action=action, at=_parts(at), pattern=pattern, line=node.line, column=node.column)


def _pattern_problem(pattern: str) -> str:
    if len(pattern) > PATTERN_CHARS_MAX:
        return f"it has {len(pattern)} characters, and at most {PATTERN_CHARS_MAX} are taken"
    try:
        if pattern:
            compiled(pattern)
    except BadPattern as error:
        return " ".join(str(error).split())
    return ""


def _too_much(parts: tuple[str, ...], *, whole: bool) -> str:
    """Why a place may not be ignored; empty: it may."""
    if "**" in parts:
        return "`**` is no part of a JSON pointer; `*` is any one member"
    if parts[0] in SAID:
        return "it says what the call is about"
    if whole and parts in _PROMPT:
        return "nothing of what is asked would be left, so that any request had the answer of the first"
    return ""


def _parts(pointer: str) -> tuple[str, ...]:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


# -- calls ------------------------------------------------------------------------------------------------------------


class Ignoring:
    """What is ignored of one agent's calls.

    Args:
        entries: of its manifest.
    """

    def __init__(self, entries: Sequence[Ignored]) -> None:
        self._entries = entries

    def likeness(self, action: str, raw: bytes) -> bytes | None:
        """What is left of a call: the same bytes for calls that differ in nothing but what is ignored.

        Args:
            action: of the table.
            raw: its arguments as JSON.

        Returns:
            None where nothing of such calls is ignored, or they can't be read.
        """
        # Looked at by name first: most calls are of actions that no entry names.
        if not any(action == one.action or action in OF_SERVERS for one in self._entries):
            return None
        try:
            document: Any = msgspec.json.decode(raw)
            spots = self._spots(_named(action, document))
            return _encode(_image(document, spots)) if spots else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # it is refused where it is decoded

    def masked(self, action: str, raw: bytes) -> Any:
        """A call's arguments for people to compare: what is ignored in them is left out, of texts with a mark in its place.

        Raises:
            ValueError: they can't be read.
        """
        try:
            document: Any = msgspec.json.decode(raw)
            return _shown(_image(document, self._spots(_named(action, document))))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None

    def _spots(self, action: str) -> tuple[Spot, ...]:
        return tuple(
            (one.at, compiled(one.pattern) if one.pattern else None)
            for one in self._entries
            if one.action == action or (one.action.endswith(".*") and action.startswith(one.action[:-1]))
        )


def _named(action: str, document: Any) -> str:
    """The action that rules speak of: a call of a server's tool is that tool."""
    if action not in OF_SERVERS or not isinstance(document, dict):
        return action
    fields = cast("dict[str, Any]", document)
    return f"mcp.{fields.get('server')}.{OF_SERVERS[action] or fields.get('tool')}"


def _image(document: Any, spots: Sequence[Spot]) -> Any:
    """A call's arguments without what is ignored."""
    if not isinstance(document, dict):
        return _left(document, (), spots)
    members = cast("dict[str, Any]", document)
    said = {key: _left(value, (), ()) for key, value in members.items() if key in SAID}
    return {**_left({key: value for key, value in members.items() if key not in SAID}, (), spots), **said}


def _left(node: Any, patterns: tuple[Any, ...], spots: Iterable[Spot]) -> Any:
    """A value without what is ignored. INVARIANT: each kind of value has a form of its own, so no two that differ look alike."""
    spots = tuple(spots)
    patterns = (*patterns, *(pattern for at, pattern in spots if not at))
    if isinstance(node, str):
        return _kept(node, patterns) if patterns else ["s", node]
    if isinstance(node, dict):
        members = cast("dict[str, Any]", node)
        below = {key: tuple(_below(spots, key)) for key in members}
        return {
            key: _left(value, patterns, below[key])
            for key, value in members.items()
            if ((), None) not in below[key]
        }
    if isinstance(node, list):
        found: list[Any] = ["l"]
        for index, value in enumerate(cast("list[Any]", node)):
            inner = tuple(_below(spots, str(index)))
            found.append(["i"] if ((), None) in inner else _left(value, patterns, inner))
        return found
    return node


def _shown(image: Any) -> Any:
    """What `_left` made, as plain values again."""
    if isinstance(image, dict):
        return {key: _shown(value) for key, value in cast("dict[str, Any]", image).items()}
    if not isinstance(image, list):
        return image
    kind, *parts = cast("list[Any]", image)
    if kind == "l":
        return [_shown(part) for part in parts]
    return IGNORED.join(parts) if kind == "s" else IGNORED


def _below(spots: Iterable[Spot], key: str) -> Iterator[Spot]:
    for at, pattern in spots:
        if at and at[0] in (key, ANY):
            yield at[1:], pattern


def _kept(text: str, patterns: Iterable[Any]) -> list[str]:
    """The parts of a text between what patterns find in it; what touches or overlaps counts as one."""
    data = text.encode("utf-8", "surrogatepass")
    spans = sorted(match.span() for pattern in patterns for match in pattern.finditer(data))
    kept, end = ["s"], -1
    for start, stop in spans:
        if start > end:
            kept.append(_text(data[max(end, 0) : start]))
        end = max(end, stop)
    kept.append(_text(data[max(end, 0) :]))
    return kept


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
