"""Patterns of commands and what they are compared with: words, never a shell line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Final

from ringfence.policy.glob import MANY, Piece, Segment, match_pieces
from ringfence.policy.problems import PatternError
from ringfence.policy.shell import Reading
from ringfence.policy.shell_words import Words

_SHELL: Final = frozenset(";&|<>()$`#\n")
_UNSUPPORTED: Final = frozenset("?[]{}")
_MAX_WORDS: Final = 4096


class CommandSubject:
    """A command as policy sees it: its words, and the simple commands inside it that can be read."""

    __slots__ = ("_reading", "argv")

    def __init__(self, argv: tuple[str, ...]) -> None:
        if not argv or not argv[0] or len(argv) > _MAX_WORDS:
            raise PatternError(
                "the command is empty or has too many words", "give a program and its arguments"
            )
        if any("\0" in word for word in argv):
            raise PatternError("the command holds a NUL character", "remove it")
        self.argv: Final = argv
        self._reading: Reading | None = None

    @property
    def reading(self) -> Reading:
        """The commands found inside; read when a rule first wants to know."""
        if self._reading is None:
            self._reading = Reading(self.argv)
        return self._reading


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

    @property
    def written_out(self) -> bool:
        """Whether it names one command word for word."""
        return not self.rest and all(len(word.parts) == 1 for word in self.words)

    def permits(self, subject: object) -> bool:
        """Whether an allow rule applies: to the words as they are."""
        return isinstance(subject, CommandSubject) and self.matches(subject.argv)

    def forbids(self, subject: object) -> bool:
        """Whether a deny or ask rule applies: to the command, or to any other that is found inside it."""
        if not isinstance(subject, CommandSubject):
            return False
        return self.matches(subject.argv) or any(self._surely(part) for part in subject.reading.parts)

    def may_forbid(self, subject: CommandSubject) -> bool:
        """Whether a deny or ask rule may apply, since something in the command can't be known or followed."""
        return bool(subject.reading.opaque) or any(self._possibly(part) for part in subject.reading.parts)

    def _surely(self, part: Words) -> bool:
        if None not in part:
            return self.matches([word for word in part if word is not None])
        known = list(takewhile(lambda word: word is not None, part))
        return (
            self.rest
            and len(known) >= len(self.words)
            and self.matches([word for word in known if word is not None])
        )

    def _possibly(self, part: Words) -> bool:
        """Whether some choice of the unknown words matches: a walk over the sets of pattern words used up so far."""
        count = len(self.words)
        places = {0}
        for word in part:
            if word is None:
                places = set(range(min(places), count + 1)) if places else places
                continue
            places = {
                place if place == count else place + 1
                for place in places
                if (place == count and self.rest) or (place < count and self.words[place].matches(word))
            }
        return count in places

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


class _Splitter:
    """Splits a pattern into words, each a list of literals with a wildcard between. What is quoted is literal."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._chars = iter(pattern)
        self._word: list[str] | None = None
        self.words: list[list[str]] = []

    def split(self) -> list[list[str]]:
        for char in self._chars:
            if char in " \t":
                self._end()
                continue
            self._word = [""] if self._word is None else self._word
            if char in "'\"":
                self._quoted(self._word, char)
            elif char == "*":
                self._word.append("")
            elif char == "\\":
                following = next(self._chars, "")
                if not following:
                    raise PatternError(
                        "the command pattern ends in a backslash", r"write `\\` for a backslash"
                    )
                self._word[-1] += following
            else:
                _unquoted(char, self._pattern)
                self._word[-1] += char
        self._end()
        return self.words

    def _end(self) -> None:
        if self._word is not None:
            self.words.append(self._word)
        self._word = None

    def _quoted(self, word: list[str], quote: str) -> None:
        for char in self._chars:
            if char == quote:
                return
            if char == "\\" and quote == '"':
                following = next(self._chars, "")
                word[-1] += following if following in {'"', "\\"} else "\\" + following
            else:
                word[-1] += char
        raise PatternError(
            f"the command pattern `{self._pattern}` has an open quote", f"close it with `{quote}`"
        )


def compile_command(text: str) -> CommandPattern:
    """Compile a command pattern: words as a shell would split them, where `*` is one word and a last `*` any further ones.

    Raises:
        PatternError: no word, an open quote, shell operators outside quotes.
    """
    words = [Word(parts) for parts in _Splitter("*" if text == "**" else text).split()]
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
