"""Patterns of commands and what they are compared with: words, never a shell line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from ringfence.policy.glob import MANY, Piece, Segment, match_pieces
from ringfence.policy.problems import PatternError

_SHELL: Final = frozenset(";&|<>()$`#\n")
_UNSUPPORTED: Final = frozenset("?[]{}")
_MAX_WORDS: Final = 4096


class CommandSubject:
    """A command as policy sees it: its words, and the simple commands inside it that can be read."""

    __slots__ = ("argv",)

    def __init__(self, argv: tuple[str, ...]) -> None:
        if not argv or not argv[0] or len(argv) > _MAX_WORDS:
            raise PatternError(
                "the command is empty or has too many words", "give a program and its arguments"
            )
        if any("\0" in word for word in argv):
            raise PatternError("the command holds a NUL character", "remove it")
        self.argv: Final = argv


class Word:
    """One word of a command pattern.

    Attributes:
        parts: literals with a wildcard between each two of them.
        whole: whether the word is a lone `*` and so matches any word.
    """

    __slots__ = ("_pieces", "parts", "whole")

    def __init__(self, parts: Sequence[str]) -> None:
        self.parts: Final = tuple(parts)
        self.whole: Final = self.parts == ("", "")
        self._pieces: Final = () if self.whole or len(self.parts) == 1 else _word_pieces(self.parts)

    def matches(self, word: str) -> bool:
        """Whether it matches one word; wildcards don't cross `/` and match no `.` or `..` between slashes."""
        if self.whole:
            return True
        if len(self.parts) == 1:
            return word == self.parts[0]
        segments = word.split("/")
        if MANY in self._pieces and (".." in segments or "." in segments):
            return False
        return match_pieces(self._pieces, segments)

    def covers(self, other: Word) -> bool:
        """Whether everything the other matches is matched here. Sound, not complete."""
        return (
            self.whole
            or self.parts == other.parts
            or (len(other.parts) == 1 and self.matches(other.parts[0]))
        )

    def render(self) -> str:
        """The word as it is written in a pattern."""
        if self.parts == ("",):
            return "''"
        return "*".join(shlex.quote(part) if part else "" for part in self.parts)


def _word_pieces(parts: Sequence[str]) -> tuple[Piece, ...]:
    segments: list[list[str]] = [[""]]
    for index, part in enumerate(parts):
        if index:
            segments[-1].append("")
        first, *rest = part.split("/")
        segments[-1][-1] += first
        segments.extend([text] for text in rest)
    pieces: list[Piece] = []
    for segment in segments:
        if segment == ["", "", ""]:
            if not (pieces and pieces[-1] is MANY):
                pieces.append(MANY)
        elif "" in segment[1:-1]:
            raise PatternError("`**` has to be a whole segment between slashes", "write `*` within a segment")
        else:
            pieces.append(Segment(segment))
    return tuple(pieces)


class CommandPattern:
    """A pattern of a command's words.

    Attributes:
        words: patterns of the leading words.
        rest: whether any further words may follow.
        text: canonical text.
    """

    __slots__ = ("rest", "text", "words")

    def __init__(self, words: Sequence[Word], *, rest: bool) -> None:
        self.words: Final = tuple(words)
        self.rest: Final = rest
        shown = [word.render() for word in words]
        self.text: Final = " ".join([*shown, "*"] if rest else shown)

    @classmethod
    def of(cls, argv: Sequence[str]) -> CommandPattern:
        """The pattern that matches exactly these words."""
        return cls([Word((word,)) for word in argv], rest=False)

    def permits(self, subject: object) -> bool:
        """Whether an allow rule applies: to the words as they are."""
        return isinstance(subject, CommandSubject) and self.matches(subject.argv)

    forbids = permits

    def matches(self, argv: Sequence[str]) -> bool:
        """Whether the words match."""
        count = len(self.words)
        if len(argv) < count or (len(argv) > count and not self.rest):
            return False
        return all(word.matches(text) for word, text in zip(self.words, argv, strict=False))

    def covers(self, other: object) -> bool:
        """Whether everything the other matches is matched here. Sound, not complete."""
        if not isinstance(other, CommandPattern):
            return False
        if len(other.words) < len(self.words) or (
            not self.rest and (other.rest or len(other.words) > len(self.words))
        ):
            return False
        return all(mine.covers(theirs) for mine, theirs in zip(self.words, other.words, strict=False))


def _unquoted(char: str, pattern: str) -> None:
    if char in _SHELL:
        raise PatternError(
            f"`{char}` in the command pattern `{pattern}` is not run by a shell",
            "write the words of one command, and quote a character that a word really holds",
        )
    if char in _UNSUPPORTED:
        raise PatternError(
            f"`{char}` has no meaning in a command pattern", f"quote it: `'{char}'`; only `*` is a wildcard"
        )


def _split(pattern: str) -> list[list[str]]:
    """Split into words, each a list of literals with a wildcard between. What is quoted or escaped is literal."""
    words: list[list[str]] = []
    word: list[str] | None = None
    quote = ""
    chars = iter(pattern)
    for char in chars:
        if quote:
            assert word is not None  # noqa: S101
            if char == quote:
                quote = ""
                continue
            if char == "\\" and quote == '"':
                following = next(chars, "")
                char = following if following in {'"', "\\"} else "\\" + following  # noqa: PLW2901
            word[-1] += char
            continue
        if char in " \t":
            if word is not None:
                words.append(word)
            word = None
            continue
        word = [""] if word is None else word
        if char in "'\"":
            quote = char
        elif char == "*":
            word.append("")
        elif char == "\\":
            following = next(chars, "")
            if not following:
                raise PatternError("the command pattern ends in a backslash", r"write `\\` for a backslash")
            word[-1] += following
        else:
            _unquoted(char, pattern)
            word[-1] += char
    if quote:
        raise PatternError(f"the command pattern `{pattern}` has an open quote", f"close it with `{quote}`")
    if word is not None:
        words.append(word)
    return words


def compile_command(text: str) -> CommandPattern:
    """Compile a command pattern: words as a shell would split them, where `*` is one word and a last `*` any further ones.

    Raises:
        PatternError: no word, an open quote, shell operators outside quotes.
    """
    words = [Word(parts) for parts in _split("*" if text == "**" else text)]
    if not words:
        raise PatternError(
            "the command pattern has no word", "write a program, such as `git status`, or `*` for any"
        )
    rest = words[-1].whole
    words = words[:-1] if rest else words
    if words and words[0].parts == ("",):
        raise PatternError("the command pattern's program is empty", "write a program, such as `git status`")
    return CommandPattern(words, rest=rest)


@lru_cache(maxsize=1024)
def _cached(pattern: str) -> CommandPattern:
    return compile_command(pattern)


def match_command(pattern: str, argv: Sequence[str]) -> bool:
    """Whether a command pattern matches the words of a command as they are."""
    return _cached(pattern).matches(tuple(argv))
