"""Splits a POSIX shell script into words and operators, far enough to see which programs it names.

Not an interpreter: a word that depends on anything but its own text is *unknown*, and what can't be followed raises
`Unreadable`. Scripts inside substitutions are handed back to be read in turn.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

_OPERATORS: Final = (
    "&>>",
    "<<<",
    "<<-",
    ";;&",
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
KEEP_POSITION: Final = frozenset(
    ("if", "then", "elif", "else", "while", "until", "do", "{", "!", "time", "fi", "done", "}", "esac")
)
REPEATS: Final = frozenset(("while", "until", "for", "select", "function"))
UNFOLLOWED: Final = frozenset(("coproc",))
KEYWORDS: Final = KEEP_POSITION | REPEATS | UNFOLLOWED | {"case", "[["}
CASE_ENDS: Final = frozenset((";;", ";&", ";;&"))
ENDS_TO_DASH: Final = frozenset(("&>", "&>>"))
_SINGLE: Final = frozenset("\n;&|()<>")
REDIRECTIONS: Final = frozenset((">", "<", ">>", "<>", ">|", "&>", "&>>", ">&", "<&", "<<<"))
HERE_DOCUMENTS: Final = frozenset(("<<", "<<-"))
_NAME_START: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_NAME: Final = _NAME_START | frozenset("0123456789")
_PARAMETERS: Final = frozenset("0123456789@*#?$!-")
_GLOBS: Final = frozenset("*?[")
DUPLICATING: Final = frozenset((">&", "<&"))
# To bash `>&-` is complete, so `>&-rm` runs `rm`; lines joined by a backslash are one.
_CLOSED_AND_MORE: Final = re.compile(r"(?:\\\n)*-(?:\\\n)*[^\s;&|()<>]")
_VARIABLE: Final = re.compile(r"\{[A-Za-z_].*\}", re.ASCII)
# Two words beside each other are no arithmetic, so some shells run what stands there.
_TWO_WORDS: Final = re.compile(r"[\w}]\s+[\w$]", re.ASCII)
_ARITHMETIC: Final = re.compile(r"[\w\s$+\-*/%()<>=!&|^~?:,{}]*", re.ASCII)


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
        piped: whether it stands for a pipe to a command of its own, `<(…)` or `>(…)`.
        tilde: whether it begins with a `~` that a shell replaces.
    """

    text: str | None
    prefix: str
    quoted: bool
    scripts: tuple[str, ...] = ()
    piped: bool = False
    tilde: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HereText:
    """The texts of the here-documents that begin behind a line.

    Attributes:
        scripts: what is run to make them.
    """

    scripts: tuple[str, ...]


Words: TypeAlias = tuple[str | None, ...]
"""Words of a part; None stands for any number of words that can't be known."""

Token: TypeAlias = ShellWord | HereText | str


@dataclass(slots=True)
class _Word:
    text: list[str] = field(default_factory=list[str])
    prefix: str | None = None
    started: bool = False
    quoted: bool = False
    piped: bool = False
    special: set[str] = field(default_factory=set[str])
    scripts: list[str] = field(default_factory=list[str])

    def unknown(self) -> None:
        self.started = True
        if self.prefix is None:
            self.prefix = "".join(self.text)

    def names_descriptor(self) -> bool:
        """Whether it is no word but the number of a descriptor, where a redirection stands right behind it."""
        if self.quoted or self.prefix is not None:
            return False
        text = "".join(self.text)
        if _VARIABLE.fullmatch(text):
            raise Unreadable("`{NAME}` before a redirection is a word to some shells and none to others")
        return text.isascii() and text.isdigit()

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
            piped=self.piped,
            tilde="~" in self.special and (self.prefix or text).startswith("~"),
        )


class Lexer:
    """Reads one script. Raises `Unreadable` where quotes or substitutions don't end."""

    def __init__(self, script: str) -> None:
        self._script: Final = script
        self._at = 0
        self._opens = ""
        self._pending: list[tuple[str, bool, bool]] = []

    def tokens(self) -> Iterator[Token]:
        """Words and operators in order; a digit word right before a redirection is part of it and left out.

        Texts of here-documents follow the end of the line that opens them.
        """
        word = _Word()
        script = self._script
        while self._at < len(script):
            char = script[self._at]
            if char in " \t" or char in _SINGLE:
                operator = self._operator() if char in _SINGLE else ""
                if operator in {"<", ">"} and script.startswith("(", self._at):
                    self._process(word)
                    continue
                if word.started and not (operator[:1] in {"<", ">"} and word.names_descriptor()):
                    yield self._finished(word)
                word = _Word()
                if not operator:
                    self._at += 1
                    continue
                self._opens = operator if operator in HERE_DOCUMENTS else ""
                yield operator
                if operator == "\n" and self._pending:
                    yield self._here_documents()
            elif char == "#" and not word.started:
                end = script.find("\n", self._at)
                self._at = len(script) if end < 0 else end
            else:
                self._part(word, char)
        if word.started:
            yield self._finished(word)

    def expansions(self) -> list[str]:
        """What is run to make a text, such as that of a here-document, in which no word or quote means anything."""
        word = _Word()
        self._expanding(word, "")
        return word.scripts

    def _finished(self, word: _Word) -> ShellWord:
        found = word.finish()
        if self._opens:
            if found.text is None:
                raise Unreadable("the end of a here-document is not written out")
            self._pending.append((found.text, found.quoted, self._opens == "<<-"))
            self._opens = ""
        return found

    def _here_documents(self) -> HereText:
        scripts: list[str] = []
        for end, quoted, strips in self._pending:
            lines: list[str] = []
            while self._at < len(self._script):
                stop = self._script.find("\n", self._at)
                stop = len(self._script) if stop < 0 else stop
                line = self._script[self._at : stop]
                self._at = stop + 1
                if (line.lstrip("\t") if strips else line) == end:
                    break
                lines.append(line)
            if quoted:
                continue
            if any(line.endswith("\\") for line in lines):
                # The shell joins such lines before it looks for the end.
                raise Unreadable("a line of a here-document goes on in the next")
            scripts.extend(Lexer("\n".join(lines)).expansions())
        self._pending.clear()
        return HereText(scripts=tuple(scripts))

    def _operator(self) -> str:
        for operator in _OPERATORS:
            if self._script.startswith(operator, self._at):
                self._at += len(operator)
                if operator in DUPLICATING and _CLOSED_AND_MORE.match(self._script, self._at):
                    raise Unreadable(f"`{operator}-` with more right behind it is two words to some shells")
                return operator
        self._at += 1
        if self._script[self._at - 1] in "<>" and self._script.startswith("\\\n", self._at):
            raise Unreadable("an operator is split over two lines")
        return self._script[self._at - 1]

    def _process(self, word: _Word) -> None:
        word.unknown()
        word.piped = True
        word.scripts.append(self._inner_script())

    def _inner_script(self) -> str:
        inner = self._balanced("(", ")")
        if "<<" in inner.replace("<<<", "") and not inner.startswith("("):
            # Where its text ends decides where the bracket does.
            raise Unreadable("a here-document within `$(…)` is not followed")
        return inner

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
        self._expanding(word, '"')

    def _expanding(self, word: _Word, end: str) -> None:
        """Text in which only `$`, backticks and backslashes mean something, up to a quote or to the end of all."""
        while self._at < len(self._script):
            char = self._script[self._at]
            if char == end:
                self._at += 1
                return
            if char == "$":
                self._dollar(word, quoted=True)
            elif char == "`":
                self._backtick(word)
            elif char == "\\" and self._script[self._at + 1 : self._at + 2] in {"$", "`", '"', "\\", "\n"}:
                word.text.append(self._script[self._at + 1].replace("\n", ""))
                self._at += 2
            else:
                word.text.append(char)
                self._at += 1
        if end:
            raise Unreadable("a quote is not closed")

    def _dollar(self, word: _Word, *, quoted: bool = False) -> None:
        self._at += 1
        following = self._script[self._at : self._at + 1]
        if following == "(":
            inner = self._inner_script()
            if not _is_arithmetic(inner):
                word.scripts.append(inner)
        elif following == "{":
            self._braced(quoted=quoted)
        elif following == "'" and not quoted:
            # C-like escapes can spell any program, so the word counts as unknown.
            self._ansi()
        elif following and following in _NAME_START:
            while self._script[self._at : self._at + 1] in _NAME and self._at < len(self._script):
                self._at += 1
        elif following and following in _PARAMETERS:
            self._at += 1
        else:
            word.text.append("$")
            if not quoted and following == '"':
                # To bash a text that is to be translated, to dash a `$` and a text.
                word.unknown()
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
            if self._script.startswith("\\'", at):
                # A shell that doesn't know this form ends the text here.
                raise Unreadable("a quote within `$'…'` is not followed")
            at += 2 if self._script[at] == "\\" else 1
        if at >= len(self._script):
            raise Unreadable("a quote is not closed")
        self._at = at + 1

    def _braced(self, *, quoted: bool) -> None:
        inner = self._balanced("{", "}")
        if quoted and "'" in inner:
            # Within double quotes it is a letter like any other, and the bracket may end elsewhere.
            raise Unreadable("a quote within an expansion is not followed")
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


def _is_arithmetic(inner: str) -> bool:
    """Whether the inside of `$(…)` is that of `$((…))`, in which nothing is run."""
    if not (inner.startswith("(") and inner.endswith(")")) or "$(" in inner:
        return False
    return _ARITHMETIC.fullmatch(inner) is not None and _TWO_WORDS.search(inner) is None


def normal(word: str | None) -> str | None:
    """A path in the spelling that rules are likely to use."""
    return posixpath.normpath(word) if word is not None and "/" in word else word


def fill(words: Sequence[str | None], placeholder: str) -> Words:
    """Words where those that hold a placeholder are unknown."""
    return tuple(None if word is not None and placeholder in word else word for word in words)


def is_input(word: str | None) -> bool:
    """Whether a script's name may be that of an open descriptor."""
    return word is None or word == "-" or word.startswith(("/dev/", "/proc/"))
