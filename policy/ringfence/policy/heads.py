"""Which rules can match a resource at all, found by how their patterns begin.

A pattern begins with words that hold no wildcard, its *head*; a resource is a list of such words. No pattern matches a resource
that doesn't begin with its head, so for one resource only the rules with one of its beginnings have to be looked at, however
many others there are.

INVARIANT: a head is only ever a necessary condition. What it lets through is still matched exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ringfence.policy.glob import Many, Piece
from ringfence.policy.patterns import (
    NamePattern,
    NameSubject,
    Pattern,
    Subject,
    TablePattern,
    TableSubject,
    TreePattern,
    TreeSubject,
    UrlPattern,
    UrlSubject,
)

Words = tuple[str, ...]


def head_of(pattern: Pattern) -> Words:
    """The words that everything a pattern matches begins with; empty: it may match anything."""
    if isinstance(pattern, TreePattern):
        return _literals(pattern.pieces)
    if isinstance(pattern, UrlPattern):
        host = _literals(pattern.labels)
        if len(host) != len(pattern.labels):
            return (pattern.scheme,)
        # The port is left to the pattern: it may be any.
        return (pattern.scheme, ".".join(host), *_literals(pattern.path))
    if isinstance(pattern, NamePattern):
        return () if pattern.segment.literal is None else (pattern.segment.literal,)
    if isinstance(pattern, TablePattern):
        # Of the database alone: a statement that touches no table is matched by rules on tables too.
        return () if pattern.database.literal is None else (pattern.database.literal,)
    return ()


def words_of(subject: Subject) -> tuple[Words, ...]:
    """A resource as words to find heads by, in each of its readings; empty words: only patterns without a head are found."""
    if isinstance(subject, TreeSubject):
        return (subject.segments,)
    if isinstance(subject, UrlSubject):
        host = (subject.scheme, ".".join(subject.labels))
        found = ((*host, *subject.segments),)
        return found if subject.bare is subject.segments else (*found, (*host, *subject.bare))
    if isinstance(subject, NameSubject):
        return ((subject.name,),)
    return ((subject.database,),) if isinstance(subject, TableSubject) else ((),)


def _literals(pieces: Sequence[Piece]) -> Words:
    words: list[str] = []
    for piece in pieces:
        if isinstance(piece, Many) or piece.literal is None:
            break
        words.append(piece.literal)
    return tuple(words)


class Heads:
    """Numbers of rules by the heads of their patterns. Immutable."""

    __slots__ = ("_by_head", "_lengths")

    def __init__(self, patterns: Iterable[Iterable[Pattern]]) -> None:
        by_head: dict[Words, list[int]] = {}
        for number, mine in enumerate(patterns):
            for head in {head_of(pattern) for pattern in mine}:
                by_head.setdefault(head, []).append(number)
        self._by_head: Final = {head: tuple(numbers) for head, numbers in by_head.items()}
        self._lengths: Final = tuple(sorted({len(head) for head in by_head}))

    def of(self, subject: Subject) -> tuple[int, ...]:
        """Numbers of the rules that may match, in their order."""
        found: set[int] = set()
        for words in words_of(subject):
            for length in self._lengths:
                if length > len(words):
                    break
                found.update(self._by_head.get(words[:length], ()))
        return tuple(sorted(found))
