"""Compiled patterns, one class for each kind of resource, and the subjects that they are compared with.

An allow rule asks `permits`, a deny or ask rule asks `forbids`: the two differ where a resource has parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from ringfence.policy.canonical import bare_segment
from ringfence.policy.commands import CommandPattern, CommandSubject
from ringfence.policy.glob import MANY, Many, Piece, Segment, cover_pieces, match_pieces

MANY_TEXT: Final = "**"


@dataclass(frozen=True, slots=True)
class TreeSubject:
    """A path or a key, by segments."""

    segments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UrlSubject:
    """A canonical URL, its path decoded and without a trailing slash.

    Attributes:
        bare: the path as servers read it that drop parameters of segments, and dots and spaces at their ends.
    """

    scheme: str
    labels: tuple[str, ...]
    port: str
    segments: tuple[str, ...]
    bare: tuple[str, ...]
    query: str | None


@dataclass(frozen=True, slots=True)
class NameSubject:
    """One name."""

    name: str


@dataclass(frozen=True, slots=True)
class TableSubject:
    """A table, or a database alone when `labels` is None."""

    database: str
    labels: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class NoSubject:
    """An action that is done to nothing in particular."""


Subject: TypeAlias = TreeSubject | UrlSubject | NameSubject | TableSubject | CommandSubject | NoSubject


class AnyPattern:
    """`**` where the kind of the resource doesn't matter: matches all."""

    text: Final = MANY_TEXT

    def permits(self, _subject: object) -> bool:
        """Whether an allow rule applies."""
        return True

    def forbids(self, _subject: object) -> bool:
        """Whether a deny or ask rule applies."""
        return True

    def covers(self, _other: object) -> bool:
        """Whether everything the other matches is matched here."""
        return True


class TreePattern:
    """A pattern of segments, for paths and keys."""

    __slots__ = ("pieces", "text")

    def __init__(self, pieces: tuple[Piece, ...], text: str) -> None:
        self.pieces: Final = pieces
        self.text: Final = text

    def permits(self, subject: object) -> bool:
        """Whether an allow rule applies."""
        return isinstance(subject, TreeSubject) and match_pieces(self.pieces, subject.segments)

    forbids = permits

    def covers(self, other: object) -> bool:
        """Whether everything the other matches is matched here."""
        return isinstance(other, TreePattern) and cover_pieces(self.pieces, other.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlPattern:
    """A pattern of scheme, host labels, port, path segments and, in allow rules, query parameters.

    Attributes:
        port: `:8080`, `:*` for any, or empty for the scheme's own.
        query: one pattern for each parameter, in order; None where the query is ignored.
    """

    scheme: str
    labels: tuple[Piece, ...]
    port: str
    path: tuple[Piece, ...]
    query: tuple[Segment, ...] | None
    text: str

    def permits(self, subject: object) -> bool:
        """Whether an allow rule applies: in both readings of the path, unless it spells out what one of them drops."""
        if not isinstance(subject, UrlSubject) or not self._is_at(subject):
            return False
        if not match_pieces(self.path, subject.segments):
            return False
        return subject.bare is subject.segments or self._spells_out() or match_pieces(self.path, subject.bare)

    def forbids(self, subject: object) -> bool:
        """Whether a deny or ask rule applies: in either reading of the path."""
        # INVARIANT: whichever way a server reads `/pay;x`, a deny of `/pay` holds.
        if not isinstance(subject, UrlSubject) or not self._is_at(subject):
            return False
        return match_pieces(self.path, subject.segments) or (
            subject.bare is not subject.segments and match_pieces(self.path, subject.bare)
        )

    def _is_at(self, subject: UrlSubject) -> bool:
        return (
            subject.scheme == self.scheme
            and self.port in {subject.port, ":*"}
            and match_pieces(self.labels, subject.labels)
            and self._permits_query(subject.query)
        )

    def _spells_out(self) -> bool:
        """Whether its author wrote what servers may drop, and so knows that this one doesn't."""
        literals = (None if isinstance(piece, Many) else piece.literal for piece in self.path)
        return any(literal is not None and bare_segment(literal) != literal for literal in literals)

    def _permits_query(self, query: str | None) -> bool:
        if self.query is None:
            return True
        if query is None:
            return False
        parameters = query.split("&")
        return len(parameters) == len(self.query) and all(
            pattern.matches(parameter) for pattern, parameter in zip(self.query, parameters, strict=True)
        )

    def covers(self, other: object) -> bool:
        """Whether everything the other matches is matched here."""
        return (
            isinstance(other, UrlPattern)
            and self.scheme == other.scheme
            and self.port in {other.port, ":*"}
            and cover_pieces(self.labels, other.labels)
            and cover_pieces(self.path, other.path)
            and (self.query is None or self.query == other.query)
        )


class NamePattern:
    """A pattern of one name; `*` stands for any characters in it."""

    __slots__ = ("segment", "text")

    def __init__(self, segment: Segment, text: str) -> None:
        self.segment: Final = segment
        self.text: Final = text

    def permits(self, subject: object) -> bool:
        """Whether an allow rule applies."""
        return isinstance(subject, NameSubject) and self.segment.matches(subject.name)

    forbids = permits

    def covers(self, other: object) -> bool:
        """Whether everything the other matches is matched here."""
        return isinstance(other, NamePattern) and self.segment.covers(other.segment)


class TablePattern:
    """A pattern of a database and its tables, `database/table`, or `database/**` for all of it."""

    __slots__ = ("database", "tables", "text")

    def __init__(self, database: Segment, tables: tuple[Piece, ...], text: str) -> None:
        self.database: Final = database
        self.tables: Final = tables
        self.text: Final = text

    def permits(self, subject: object) -> bool:
        """Whether an allow rule applies; a statement without a table is allowed by any rule on the database."""
        if not isinstance(subject, TableSubject) or not self.database.matches(subject.database):
            return False
        return subject.labels is None or match_pieces(self.tables, subject.labels)

    def forbids(self, subject: object) -> bool:
        """Whether a deny or ask rule applies; to the database itself only where the rule is about all of it."""
        if not isinstance(subject, TableSubject) or not self.database.matches(subject.database):
            return False
        if subject.labels is None:
            return self.tables == (MANY,)
        return match_pieces(self.tables, subject.labels)

    def covers(self, other: object) -> bool:
        """Whether everything the other matches is matched here."""
        return (
            isinstance(other, TablePattern)
            and self.database.covers(other.database)
            and cover_pieces(self.tables, other.tables)
        )


Pattern: TypeAlias = AnyPattern | TreePattern | UrlPattern | NamePattern | TablePattern | CommandPattern
