"""YAML without its traps: a tree of positions and plain values, built from the parser's events.

Anchors, aliases, tags, merge keys, directives, several documents, duplicate keys and deep nesting are refused, so no text
can grow when it is read. Plain scalars follow the YAML 1.2 core schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ringfence.policy.problems import ManifestError, Problem
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

MAX_BYTES: Final = 256 << 10
_MAX_DEPTH: Final = 24
_MAX_NODES: Final = 20_000
_MAX_DIGITS: Final = 18
_INTEGER: Final = re.compile(r"[-+]?[0-9]+", re.ASCII)
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?", re.ASCII)
_WORDS: Final = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One value. `value` is its meaning, `text` how it is written."""

    line: int
    column: int
    text: str
    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A sequence."""

    line: int
    column: int
    items: list[Node] = field(default_factory=list["Node"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A mapping, its keys unique and in the order of the file."""

    line: int
    column: int
    entries: list[tuple[Scalar, Node]] = field(default_factory=list["tuple[Scalar, Node]"])


Node: TypeAlias = Scalar | Items | Table


def kind(node: Node) -> str:
    """What a node is, in words for people."""
    if isinstance(node, Items):
        return "a list"
    if isinstance(node, Table):
        return "a mapping"
    if isinstance(node.value, bool):
        return "true or false"
    if isinstance(node.value, str):
        return "text"
    return "empty" if node.value is None else "a number"


def parse_yaml(text: str, source: str) -> Node:
    """Read one document.

    Raises:
        ManifestError: what the strict form refuses; syntax errors end the reading, the others are collected.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise _refuse(source, 1, 1, f"the file has {size} bytes", f"at most {MAX_BYTES} are accepted")
    builder = _Builder(source)
    # Its stubs leave most types open, hence Any here and for the events.
    parser: Any = YAML(typ="safe", pure=True)
    try:
        events: Iterator[Any] = parser.parse(text)
        for event in events:
            builder.take(event)
    except ManifestError:
        raise
    except MarkedYAMLError as error:
        raise _syntax(source, error) from error
    except YAMLError as error:
        # The reader's own error has no mark, only the character's place in the text.
        at = int(getattr(error, "position", 0) or 0)
        before = text[:at]
        line, column = before.count("\n") + 1, at - (before.rfind("\n") + 1) + 1
        raise _refuse(
            source, line, column, "the file holds a character that YAML does not allow", "remove it"
        ) from error
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _refuse(source, 1, 1, "the file can't be read as YAML", "check its syntax") from error
    if builder.problems:
        raise ManifestError(builder.problems, source)
    if builder.root is None:
        raise _refuse(source, 1, 1, "the file is empty", "write `apiVersion: ringfence/v1` and what follows")
    return builder.root


def _refuse(source: str, line: int, column: int, message: str, fix: str) -> ManifestError:
    return ManifestError([Problem(line=line, column=column, message=message, fix=fix)], source)


def _syntax(source: str, error: Any) -> ManifestError:
    mark: Any = error.problem_mark or error.context_mark
    line, column = (int(mark.line) + 1, int(mark.column) + 1) if mark is not None else (1, 1)
    problem = " ".join(str(error.problem or error.context or "syntax error").split())
    return _refuse(
        source, line, column, f"not valid YAML: {problem}", "check indentation, quotes and brackets"
    )


def resolve(text: str) -> str | int | float | bool | None:
    """The meaning of a plain scalar in the YAML 1.2 core schema, without its octal, hexadecimal and special numbers."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    if _FLOAT.fullmatch(text) and len(text) <= 2 * _MAX_DIGITS:
        return float(text)
    return text


class _Builder:
    """Builds the tree from events and keeps what is wrong with it."""

    def __init__(self, source: str) -> None:
        self.root: Node | None = None
        self.problems: list[Problem] = []
        self._source = source
        self._stack: list[Items | Table] = []
        self._keys: list[Scalar | None] = []
        self._seen: list[dict[str, int]] = []
        self._documents = 0
        self._nodes = 0

    def take(self, event: Any) -> None:
        """Take one event of the parser."""
        line, column = int(event.start_mark.line) + 1, int(event.start_mark.column) + 1
        if isinstance(event, DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise _refuse(
                    self._source, line, column, "the file holds a second document", "keep one for each file"
                )
            if getattr(event, "version", None) or getattr(event, "tags", None):
                self._problem(line, column, "a `%` directive is not accepted", "remove it")
        elif isinstance(event, MappingEndEvent | SequenceEndEvent):
            self._close()
        elif isinstance(event, AliasEvent):
            self._problem(
                line, column, "an alias (`*name`) is not accepted", "write the value out, or quote the text"
            )
            self._add(Scalar(line=line, column=column, text="", value=None))
        elif isinstance(event, ScalarEvent | MappingStartEvent | SequenceStartEvent):
            self._start(event, line, column)

    def _start(self, event: Any, line: int, column: int) -> None:
        self._nodes += 1
        if self._nodes > _MAX_NODES or len(self._stack) >= _MAX_DEPTH:
            raise _refuse(
                self._source,
                line,
                column,
                "the file is nested too deeply or has too many values",
                "simplify it",
            )
        if event.anchor is not None:
            self._problem(
                line, column, "an anchor (`&name`) is not accepted", "write the value out, or quote the text"
            )
        if event.tag is not None:
            self._problem(line, column, f"the tag `{event.tag}` is not accepted", "remove it")
        if not isinstance(event, MappingStartEvent | SequenceStartEvent):
            text = str(event.value)
            plain = event.style is None
            self._add(Scalar(line=line, column=column, text=text, value=resolve(text) if plain else text))
            return
        node = (
            Table(line=line, column=column)
            if isinstance(event, MappingStartEvent)
            else Items(line=line, column=column)
        )
        self._add(node)
        self._stack.append(node)
        self._keys.append(None)
        self._seen.append({})

    def _close(self) -> None:
        self._stack.pop()
        self._keys.pop()
        self._seen.pop()

    def _add(self, node: Node) -> None:
        if not self._stack:
            self.root = node
            return
        parent = self._stack[-1]
        if isinstance(parent, Items):
            parent.items.append(node)
            return
        key = self._keys[-1]
        if key is None:
            self._keys[-1] = self._key(node)
        else:
            parent.entries.append((key, node))
            self._keys[-1] = None

    def _key(self, node: Node) -> Scalar:
        if not isinstance(node, Scalar):
            raise _refuse(
                self._source,
                node.line,
                node.column,
                f"{kind(node)} can't be a key",
                "write a plain word as the key",
            )
        if node.text == "<<":
            self._problem(node.line, node.column, "a merge key (`<<`) is not accepted", "write the keys out")
        seen = self._seen[-1]
        if node.text in seen:
            first = seen[node.text]
            self._problem(
                node.line,
                node.column,
                f"the key `{node.text}` is there twice",
                f"keep one; the first is on line {first}",
            )
        seen.setdefault(node.text, node.line)
        return node

    def _problem(self, line: int, column: int, message: str, fix: str) -> None:
        self.problems.append(Problem(line=line, column=column, message=message, fix=fix))
