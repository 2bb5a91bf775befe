r"""The one grammar of patterns: `*` within a segment, `**` across segments, everything else literal.

A pattern is parsed once into segments; the same objects validate it and enforce it. Nothing here is a regular
expression, and matching never backtracks over more than the last wildcard, so its cost is bounded by
segments x segments, whatever a manifest says.

A backslash makes the next character literal (`\*`). Other glob characters (`? [ ] { }`) have no meaning here; they are
refused unless escaped, since a rule that silently took them literally would not protect what its author thinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from ringfence.policy.problems import PatternError

SPECIAL: Final = "*?[]{}\\"
"""Characters that have to be escaped to be literal."""

_UNSUPPORTED: Final = frozenset("?[]{}")
_DOTS: Final = frozenset((".", ".."))


class Segment:
    """One compiled segment: literal parts with a `*` between each two of them.

    Attributes:
        parts: the literals; a single one means that there is no wildcard.
        literal: the text when there is no wildcard, else None.
    """

    __slots__ = ("literal", "parts")

    def __init__(self, parts: Sequence[str]) -> None:
        self.parts: Final = tuple(parts)
        self.literal: Final = parts[0] if len(parts) == 1 else None

    def matches(self, text: str) -> bool:
        """Whether the segment matches. A lone `*` needs at least one character; no wildcard matches `.` or `..`."""
        if self.literal is not None:
            return text == self.literal
        if not text or text in _DOTS:
            return False
        parts = self.parts
        first, last = parts[0], parts[-1]
        end = len(text) - len(last)
        if end < len(first) or not text.startswith(first) or not text.endswith(last):
            return False
        at = len(first)
        # Taking the leftmost place for every part leaves the most room for the rest, so no other choice can do better.
        for part in parts[1:-1]:
            found = text.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True

    def covers(self, other: Segment) -> bool:
        """Whether everything `other` matches is matched here. May say no where the truth is yes, never the reverse."""
        if other.literal is not None:
            return self.matches(other.literal)
        if self.literal is not None:
            return False
        # A star of `other` stands for any text, so here only a star may absorb it.
        return _star_covers(_tokens(self), _tokens(other))

    def render(self, escape: str = SPECIAL) -> str:
        """The segment as it is written in a pattern."""
        return "*".join(escape_literal(part, escape) for part in self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return f"Segment({self.render()!r})"


class Many:
    """`**`: any number of segments, none included."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Many()"


MANY: Final = Many()
Piece: TypeAlias = Segment | Many


def _tokens(segment: Segment) -> list[str | None]:
    tokens: list[str | None] = list(segment.parts[0])
    for part in segment.parts[1:]:
        tokens.append(None)
        tokens.extend(part)
    return tokens


def _star_covers(here: Sequence[str | None], there: Sequence[str | None]) -> bool:
    """Wildcard matching of one token list by another, where None in `there` is a symbol that only None absorbs."""
    at, over, star, mark = 0, 0, -1, 0
    while over < len(there):
        if at < len(here) and here[at] is None:
            star, mark = at, over
            at += 1
        elif at < len(here) and there[over] is not None and here[at] == there[over]:
            at += 1
            over += 1
        elif star >= 0:
            mark += 1
            at, over = star + 1, mark
        else:
            return False
    return all(token is None for token in here[at:])


def escape_literal(text: str, escape: str = SPECIAL) -> str:
    """Write a literal so that the grammar reads it back as itself."""
    if not any(char in escape for char in text):
        return text
    return "".join(f"\\{char}" if char in escape else char for char in text)


def parse_segment(text: str) -> Piece:
    """Compile one segment.

    Raises:
        PatternError: an empty segment, `**` next to other characters, an unsupported or unescaped glob character.
    """
    if not text:
        raise PatternError("the pattern has an empty segment", "write single slashes, and none at the end")
    if text == "**":
        return MANY
    parts = [""]
    chars = iter(text)
    for char in chars:
        if char == "*":
            parts.append("")
        elif char == "\\":
            following = next(chars, "")
            if not following or following not in SPECIAL:
                raise PatternError(
                    f"`\\{following}` is no escape", r"write `\\` for a backslash, or `\*` for a literal star"
                )
            parts[-1] += following
        elif char in _UNSUPPORTED:
            raise PatternError(
                f"`{char}` has no meaning in a pattern",
                f"only `*` and `**` are wildcards: write one rule for each name, or `\\{char}` for the character itself",
            )
        else:
            parts[-1] += char
    if "" in parts[1:-1]:
        raise PatternError(
            f"`**` has to be a whole segment, not a part of `{text}`", "write `*` within a segment"
        )
    return Segment(parts)


def match_pieces(pieces: Sequence[Piece], segments: Sequence[str]) -> bool:
    """Whether a compiled pattern matches a list of segments, all of it."""
    at, over, star, mark = 0, 0, -1, 0
    count = len(pieces)
    while over < len(segments):
        if at < count:
            piece = pieces[at]
            if isinstance(piece, Many):
                star, mark = at, over
                at += 1
                continue
            if piece.matches(segments[over]):
                at += 1
                over += 1
                continue
        if star < 0:
            return False
        # INVARIANT: only the last `**` is ever retried. What came before it took its leftmost place already.
        mark += 1
        at, over = star + 1, mark
    return all(isinstance(piece, Many) for piece in pieces[at:])


def cover_pieces(here: Sequence[Piece], there: Sequence[Piece]) -> bool:
    """Whether everything that `there` matches is matched by `here`. Sound, not complete."""
    at, over, star, mark = 0, 0, -1, 0
    while over < len(there):
        if at < len(here):
            piece, other = here[at], there[over]
            if isinstance(piece, Many):
                star, mark = at, over
                at += 1
                continue
            if isinstance(other, Segment) and piece.covers(other):
                at += 1
                over += 1
                continue
        if star < 0:
            return False
        mark += 1
        at, over = star + 1, mark
    return all(isinstance(piece, Many) for piece in here[at:])
