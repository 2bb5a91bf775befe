"""Splits a POSIX shell script into words and operators, far enough to see which programs it names.

Not an interpreter: a word that depends on anything but its own text is *unknown*, and what can't be followed raises
`Unreadable`. Scripts inside substitutions are handed back to be read in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

_OPERATORS: Final = (
    "&>>",
    "<<<",
    "<<-",
    "&&",
    "||",
    ";;",
    ";&",
    "|&",
    ">>",
    "<>",
    ">|",
    "&>",
    ">&",
    "<&",
    "<<",
)
_SINGLE: Final = frozenset("\n;&|()<>")
REDIRECTIONS: Final = frozenset((">", "<", ">>", "<>", ">|", "&>", "&>>", ">&", "<&", "<<<"))
HERE_DOCUMENTS: Final = frozenset(("<<", "<<-"))
_NAME_START: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_NAME: Final = _NAME_START | frozenset("0123456789")
_PARAMETERS: Final = frozenset("0123456789@*#?$!-")
_GLOBS: Final = frozenset("*?[")


class Unreadable(Exception):
    """A script that can't be followed. `str()` says why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellWord:
    """One word.

    Attributes:
        text: None where it is unknown.
        prefix: its literal beginning, up to where it becomes unknown.
        quoted: whether any of it was quoted.
        scripts: what is run to make it.
    """

    text: str | None
    prefix: str
    quoted: bool
    scripts: tuple[str, ...] = ()


Token: TypeAlias = ShellWord | str


@dataclass(slots=True)
class _Word:
    text: list[str] = field(default_factory=list[str])
    prefix: str | None = None
    started: bool = False
    quoted: bool = False
    special: set[str] = field(default_factory=set[str])
    scripts: list[str] = field(default_factory=list[str])

    def unknown(self) -> None:
        self.started = True
        if self.prefix is None:
            self.prefix = "".join(self.text)

    def finish(self) -> ShellWord:
        text = "".join(self.text)
        if self.special & _GLOBS and text != "[":
            self.unknown()
        if "{" in self.special and ("," in text or ".." in text):
            self.unknown()
        return ShellWord(
            text=text if self.prefix is None else None,
            prefix=text if self.prefix is None else self.prefix,
            quoted=self.quoted,
            scripts=tuple(self.scripts),
        )


class Lexer:
    """Reads one script. Raises `Unreadable` where quotes or substitutions don't end."""

    def __init__(self, script: str) -> None:
        self._script: Final = script
        self._at = 0

    def tokens(self) -> Iterator[Token]:
        """Words and operators in order; a digit word right before a redirection is part of it and left out."""
        word = _Word()
        script = self._script
        while self._at < len(script):
            char = script[self._at]
            if char in " \t" or char in _SINGLE:
                operator = self._operator() if char in _SINGLE else ""
                if operator in {"<", ">"} and script.startswith("(", self._at):
                    self._process(word)
                    continue
                if word.started and not (operator[:1] in {"<", ">"} and "".join(word.text).isdigit()):
                    yield word.finish()
                word = _Word()
                if operator:
                    yield operator
                else:
                    self._at += 1
            elif char == "#" and not word.started:
                end = script.find("\n", self._at)
                self._at = len(script) if end < 0 else end
            else:
                self._part(word, char)
        if word.started:
            yield word.finish()

    def _operator(self) -> str:
        for operator in _OPERATORS:
            if self._script.startswith(operator, self._at):
                self._at += len(operator)
                return operator
        self._at += 1
        return self._script[self._at - 1]

    def _process(self, word: _Word) -> None:
        word.unknown()
        word.scripts.append(self._balanced("(", ")"))

    def _part(self, word: _Word, char: str) -> None:
        if char == "\\":
            following = self._script[self._at + 1 : self._at + 2]
            self._at += 2
            if following == "\n":
                return
            word.started = word.quoted = True
            word.text.append(following or "\\")
            return
        word.started = True
        if char == "'":
            word.quoted = True
            word.text.append(self._until("'"))
        elif char == '"':
            word.quoted = True
            self._double(word)
        elif char == "$":
            self._dollar(word)
        elif char == "`":
            self._backtick(word)
        else:
            word.special.add(char)
            word.text.append(char)
            self._at += 1

    def _until(self, quote: str) -> str:
        end = self._script.find(quote, self._at + 1)
        if end < 0:
            raise Unreadable("a quote is not closed")
        text = self._script[self._at + 1 : end]
        self._at = end + 1
        return text

    def _double(self, word: _Word) -> None:
        self._at += 1
        while self._at < len(self._script):
            char = self._script[self._at]
            if char == '"':
                self._at += 1
                return
            if char == "$":
                self._dollar(word)
            elif char == "`":
                self._backtick(word)
            elif char == "\\" and self._script[self._at + 1 : self._at + 2] in {"$", "`", '"', "\\", "\n"}:
                word.text.append(self._script[self._at + 1].replace("\n", ""))
                self._at += 2
            else:
                word.text.append(char)
                self._at += 1
        raise Unreadable("a quote is not closed")

    def _dollar(self, word: _Word) -> None:
        self._at += 1
        following = self._script[self._at : self._at + 1]
        if following == "(":
            word.scripts.append(self._balanced("(", ")"))
        elif following == "{":
            self._braced()
        elif following == "'":
            # C-like escapes can spell any program, so the word counts as unknown.
            self._ansi()
        elif following and following in _NAME_START:
            while self._script[self._at : self._at + 1] in _NAME and self._at < len(self._script):
                self._at += 1
        elif following and following in _PARAMETERS:
            self._at += 1
        elif following != '"':
            word.text.append("$")
            return
        else:
            return
        word.unknown()

    def _backtick(self, word: _Word) -> None:
        at, inner = self._at + 1, list[str]()
        while at < len(self._script) and self._script[at] != "`":
            if self._script[at] == "\\" and self._script[at + 1 : at + 2] in {"`", "\\", "$"}:
                at += 1
            inner.append(self._script[at : at + 1])
            at += 1
        if at >= len(self._script):
            raise Unreadable("a backtick is not closed")
        self._at = at + 1
        word.unknown()
        word.scripts.append("".join(inner))

    def _ansi(self) -> None:
        at = self._at + 1
        while at < len(self._script) and self._script[at] != "'":
            at += 2 if self._script[at] == "\\" else 1
        if at >= len(self._script):
            raise Unreadable("a quote is not closed")
        self._at = at + 1

    def _braced(self) -> None:
        inner = self._balanced("{", "}")
        if "$(" in inner or "`" in inner or "<(" in inner or ">(" in inner:
            raise Unreadable("an expansion runs a command")

    def _balanced(self, opening: str, closing: str) -> str:
        """The text up to the bracket that closes the one at the current place; quotes are respected."""
        start, depth, at = self._at + 1, 0, self._at
        while at < len(self._script):
            char = self._script[at]
            if char == "\\":
                at += 2
                continue
            if char in "'\"":
                at = self._skip_quote(at, char)
                continue
            depth += (char == opening) - (char == closing)
            at += 1
            if depth == 0:
                self._at = at
                return self._script[start : at - 1]
        raise Unreadable("a bracket is not closed")

    def _skip_quote(self, at: int, quote: str) -> int:
        at += 1
        while at < len(self._script) and self._script[at] != quote:
            at += 2 if self._script[at] == "\\" and quote == '"' else 1
        if at >= len(self._script):
            raise Unreadable("a quote is not closed")
        return at + 1
