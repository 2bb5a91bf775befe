"""Patterns of every kind of resource: paths, URLs, names, keys, tables and commands.

A pattern is compiled once by the code that validates it, and that same object decides. Each kind has a *subject*: a
resource taken apart and checked once for all the rules that look at it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from ringfence.policy.canonical import (
    WORKSPACE,
    bare_segment,
    canonical_host,
    canonical_path,
    canonical_port,
    canonical_query,
    canonical_url,
    check_label,
    check_text,
    decode_segment,
    encode_segment,
    split_url,
)
from ringfence.policy.commands import compile_command, match_command
from ringfence.policy.glob import MANY, Many, Piece, Segment, escape_literal, parse_segment
from ringfence.policy.patterns import (
    MANY_TEXT,
    AnyPattern,
    CommandPattern,
    CommandSubject,
    NamePattern,
    NameSubject,
    NoSubject,
    Pattern,
    Subject,
    TablePattern,
    TableSubject,
    TreePattern,
    TreeSubject,
    UrlPattern,
    UrlSubject,
)
from ringfence.policy.problems import PatternError
from ringfence.policy.types import Resource

__all__ = [
    "WORKSPACE",
    "AnyPattern",
    "CommandPattern",
    "CommandSubject",
    "NameSubject",
    "Pattern",
    "PatternError",
    "Subject",
    "canonical_path",
    "canonical_url",
    "compile_pattern",
    "literal_pattern",
    "match_command",
    "match_key",
    "match_name",
    "match_path",
    "match_table",
    "match_url",
    "match_url_path",
    "subject",
]

_DEFAULT_SCHEMA: Final = "public"


def _tree_pieces(text: str) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for part in text.split("/"):
        piece = parse_segment(part)
        if isinstance(piece, Segment) and piece.literal in {".", ".."}:
            raise PatternError(
                f"a pattern can't have a `{piece.literal}` segment", "write the path without it"
            )
        # Two `**` in a row say no more than one.
        if not (piece is MANY and pieces and pieces[-1] is MANY):
            pieces.append(piece)
    return tuple(pieces)


def _render_tree(pieces: tuple[Piece, ...]) -> str:
    return "/".join(MANY_TEXT if isinstance(piece, Many) else piece.render() for piece in pieces)


def compile_path(text: str) -> TreePattern:
    """Compile a path pattern: absolute, relative (below `/workspace`), or `**/x` (anywhere).

    Raises:
        PatternError: what the grammar refuses.
    """
    if text.startswith(("~", "!", "$")):
        raise PatternError(f"a path pattern can't begin with `{text[0]}`", "write `/workspace/...`")
    relative = text.removeprefix("./") if text != "./" else ""
    if relative in {"", ".", "/"}:
        raise PatternError(f"`{text}` is no path pattern", "write `/workspace/**` for all of the workspace")
    if relative.endswith("/"):
        raise PatternError(
            f"the pattern `{text}` ends in a slash",
            f"write `{text}**` for it and all beneath, or `{text.rstrip('/')}` for it alone",
        )
    if relative.startswith("/"):
        pieces = _tree_pieces(relative[1:])
        return TreePattern(pieces, "/" + _render_tree(pieces))
    pieces = _tree_pieces(relative)
    if isinstance(pieces[0], Many):
        return TreePattern(pieces, _render_tree(pieces))
    pieces = (Segment((WORKSPACE[1:],)), *pieces)
    return TreePattern(pieces, "/" + _render_tree(pieces))


def compile_key(text: str) -> TreePattern:
    """Compile a pattern of state or memory keys: segments separated by `/`, no leading slash.

    Raises:
        PatternError: what the grammar refuses.
    """
    pieces = _tree_pieces(text)
    return TreePattern(pieces, _render_tree(pieces))


def compile_name(text: str) -> NamePattern:
    """Compile a pattern of one name. `**` is the same as `*` here.

    Raises:
        PatternError: what the grammar refuses.
    """
    piece = Segment(("", "")) if text == MANY_TEXT else parse_segment(text)
    if isinstance(piece, Many):  # pragma: no cover - `**` was taken above
        raise PatternError("`**` has no meaning in a name", "write `*`")
    return NamePattern(piece, piece.render())


def compile_table(text: str) -> TablePattern:
    """Compile `database`, `database/table` or `database/schema.table`. A bare table is one of the schema `public`.

    Raises:
        PatternError: what the grammar refuses.
    """
    database_text, slash, table_text = text.partition("/")
    database = parse_segment("*" if text == MANY_TEXT else database_text)
    if isinstance(database, Many):
        raise PatternError("`**` is no database", "write `*` for any database")
    if not slash:
        table_text = MANY_TEXT
    if "/" in table_text:
        raise PatternError(f"`{table_text}` is no table", "write `table` or `schema.table`")
    tables = tuple(parse_segment(label) for label in table_text.split("."))
    if len(tables) == 1 and tables != (MANY,):
        tables = (Segment((_DEFAULT_SCHEMA,)), *tables)
    shown = [MANY_TEXT if isinstance(piece, Many) else piece.render() for piece in tables]
    if len(shown) > 1 and shown[0] == _DEFAULT_SCHEMA:
        shown = shown[1:]
    return TablePattern(database, tables, f"{database.render()}/{'.'.join(shown)}")


def _url_labels(host: str) -> tuple[Piece, ...]:
    if "*" not in host:
        return tuple(Segment((label,)) for label in _host_labels(canonical_host(host)))
    if not host.isascii():
        raise PatternError(
            "a host pattern with `*` has to be ASCII", "write international labels as `xn--...`"
        )
    labels: list[Piece] = []
    for label in host.lower().removesuffix(".").split("."):
        if label != MANY_TEXT:
            check_label(label, extra="*")
        labels.append(parse_segment(label))
    return tuple(labels)


def _host_labels(host: str) -> tuple[str, ...]:
    return (host,) if host.startswith("[") else tuple(host.split("."))


def _url_segment(text: str) -> Piece:
    if text == MANY_TEXT:
        return MANY
    if MANY_TEXT in text:
        raise PatternError(
            f"`**` has to be a whole segment, not a part of `{text}`", "write `*` within a segment"
        )
    for char in '?[]{}|^`<>"':
        if char in text:
            raise PatternError(
                f"`{char}` can't stand in a URL", "percent-encode it; only `*` and `**` are wildcards"
            )
    segment = Segment(tuple(decode_segment(part) for part in text.split("*")))
    if segment.literal is not None and segment.literal and not bare_segment(segment.literal):
        raise PatternError("a URL pattern can't have a `.` or `..` segment", "write the path without it")
    return segment


def _url_path(segments: tuple[str, ...]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for text in segments:
        piece = _url_segment(text)
        if not (piece is MANY and pieces and pieces[-1] is MANY):
            pieces.append(piece)
    return tuple(pieces)


def _render_url_piece(piece: Piece) -> str:
    if isinstance(piece, Many):
        return MANY_TEXT
    return "*".join(encode_segment(part).replace("*", "%2A") for part in piece.parts)


def compile_url(text: str) -> UrlPattern | AnyPattern:
    """Compile `scheme://host[:port]/path[?query]`, or `**` for any URL. A port `*` is any port.

    Raises:
        PatternError: what the grammar refuses.
    """
    if text == MANY_TEXT:
        return AnyPattern()
    parts = split_url(text)
    if "#" in text:
        raise PatternError(
            "a URL pattern can't have a fragment", "leave out `#` and what follows; it is never sent"
        )
    if parts.segments and not parts.segments[-1]:
        raise PatternError(
            f"the pattern `{text}` ends in a slash",
            f"write `{text}**` for it and all beneath, or `{text.rstrip('/')}` for it alone",
        )
    labels = _url_labels(parts.host)
    port = ":*" if parts.port == "*" else canonical_port(parts.scheme, parts.port)
    path = _url_path(parts.segments)
    query: tuple[Segment, ...] | None = None
    tail = ""
    if parts.query is not None:
        query = tuple(Segment(tuple(item.split("*"))) for item in canonical_query(parts.query).split("&"))
        tail = "?" + "&".join("*".join(item.parts) for item in query)
    host = ".".join(MANY_TEXT if isinstance(label, Many) else "*".join(label.parts) for label in labels)
    rendered = f"{parts.scheme}://{host}{port}/{'/'.join(map(_render_url_piece, path))}{tail}"
    return UrlPattern(scheme=parts.scheme, labels=labels, port=port, path=path, query=query, text=rendered)


_COMPILERS: Final[dict[str, Callable[[str], Pattern]]] = {
    "path": compile_path,
    "url": compile_url,
    "name": compile_name,
    "key": compile_key,
    "table": compile_table,
    "command": compile_command,
    "none": lambda _text: AnyPattern(),
    "any": lambda _text: AnyPattern(),
}


@lru_cache(maxsize=8192)
def compile_pattern(kind: str, text: str) -> Pattern:
    """Compile a pattern of a kind: `path`, `url`, `name`, `key`, `table`, `command`, `none` or `any`.

    Raises:
        PatternError: what the grammar refuses, with how to mend it.
    """
    check_text(text, "pattern")
    if not text:
        raise PatternError("the pattern is empty", "write what the rule is about, or `**` for all")
    return _COMPILERS[kind](_nfc(text))


def subject(kind: str, resource: Resource) -> Subject:
    """Take a resource apart for the rules of one kind.

    Raises:
        PatternError: the resource is not in its canonical form, or leaves the workspace.
    """
    if kind == "command":
        words = resource if isinstance(resource, tuple) else (resource,)
        return CommandSubject(tuple(map(_nfc, words)))
    if not isinstance(resource, str):
        raise PatternError(
            "a list of words is no resource of this action", "report this: the syscall's body is at fault"
        )
    if kind == "path":
        if canonical_path(resource) != resource:
            raise PatternError("the path is not in its canonical form", f"write `{canonical_path(resource)}`")
        if resource != WORKSPACE and not resource.startswith(WORKSPACE + "/"):
            raise PatternError("the path is outside `/workspace`", "name a path below `/workspace`")
        return TreeSubject(tuple(resource[1:].split("/")))
    if kind == "url":
        if canonical_url(resource) != resource:
            raise PatternError("the URL is not in its canonical form", f"write `{canonical_url(resource)}`")
        return _url_subject(resource)
    check_text(resource, "resource")
    # INVARIANT: patterns and resources are compared in NFC, so that no deny misses what looks the same.
    resource = _nfc(resource)
    if kind == "key":
        return TreeSubject(tuple(resource.split("/")))
    if kind == "table":
        return _table_subject(resource)
    return NameSubject(resource) if kind == "name" else NoSubject()


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _table_subject(resource: str) -> TableSubject:
    database, slash, table = resource.partition("/")
    if not slash:
        return TableSubject(database, None)
    labels = tuple(table.split("."))
    return TableSubject(database, labels if len(labels) > 1 else (_DEFAULT_SCHEMA, *labels))


def _url_subject(url: str) -> UrlSubject:
    parts = split_url(url)
    segments = tuple(decode_segment(segment) for segment in parts.segments)
    # INVARIANT: `/a/` is judged as `/a`, in allow and deny alike: most servers answer both with the same resource.
    segments = segments[:-1] if segments and not segments[-1] else segments
    bare = tuple(map(bare_segment, segments))
    return UrlSubject(
        parts.scheme,
        _host_labels(parts.host),
        canonical_port(parts.scheme, parts.port),
        segments,
        segments if bare == segments else bare,
        parts.query,
    )


def literal_pattern(kind: str, resource: Resource) -> str:
    """The narrowest pattern that matches a resource; a URL's query is left open.

    Raises:
        PatternError: no pattern but `**` matches it.
    """
    if isinstance(resource, tuple):
        return CommandPattern.of(resource).text
    if kind == "url":
        parts = split_url(canonical_url(resource))
        segments = tuple(item.replace("*", "%2A") for item in parts.segments if item)
        return f"{parts.scheme}://{parts.host}{canonical_port(parts.scheme, parts.port)}/{'/'.join(segments)}"
    return escape_literal(resource)


def match_path(pattern: str, path: str) -> bool:
    """Whether a path pattern matches a path, both brought to their canonical form; False for a path that has none."""
    compiled = compile_pattern("path", pattern)
    try:
        return compiled.permits(TreeSubject(tuple(canonical_path(path)[1:].split("/"))))
    except PatternError:
        return False


def match_url(pattern: str, url: str) -> bool:
    """Whether a URL pattern matches a URL, both brought to their canonical form; False for a URL that has none."""
    compiled = compile_pattern("url", pattern)
    try:
        return compiled.permits(_url_subject(canonical_url(url)))
    except PatternError:
        return False


def match_url_path(pattern: str, path: str) -> bool:
    """Whether the path pattern of a resource's `effects`, such as `/jobs/**`, matches the path of a canonical URL."""
    return match_url(f"http://a{pattern}", f"http://a{path}")


def match_key(pattern: str, key: str) -> bool:
    """Whether a key pattern matches a state or memory key."""
    return compile_pattern("key", pattern).permits(TreeSubject(tuple(key.split("/"))))


def match_name(pattern: str, name: str) -> bool:
    """Whether a name pattern matches a name."""
    return compile_pattern("name", pattern).permits(NameSubject(name))


def match_table(pattern: str, table: str) -> bool:
    """Whether `database[/table]` as a pattern matches `database/table`."""
    return compile_pattern("table", pattern).permits(_table_subject(table))
