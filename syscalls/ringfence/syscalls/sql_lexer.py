"""Splits a statement into tokens exactly as PostgreSQL does, with standard_conforming_strings on.

A parser that reads a quote or a comment in another way than the database can be led past any check. So
statements are first cut here by the database's own rules; comments go, spellings that only obscure are
refused, and everything later (the structural parser, the checks, the text that is sent) works on the same
cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ringfence.syscalls.errors import InvalidRequest

STATEMENT_BYTES_MAX: Final = 64 << 10
NAME_BYTES_MAX: Final = 63
"""PostgreSQL cuts longer names, so that two spellings would mean one table."""

Kind: TypeAlias = Literal["word", "quoted", "string", "number", "param", "op", "punct"]

_SPACE: Final = re.compile(r"[ \t\n\r\f\v]+")
_LINE_COMMENT: Final = re.compile(r"--[^\n\r]*")
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")
_NUMBER: Final = re.compile(r"\.?[0-9][0-9A-Za-z_.]*")
_PARAM: Final = re.compile(r"\$[0-9]+")
_DOLLAR: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)?\$")
_PLAIN: Final = re.compile(r"'(?:[^']|'')*'")
_ESCAPED: Final = re.compile(r"'(?:[^'\\]|''|\\.)*'", re.DOTALL)
_QUOTED: Final = re.compile(r'"(?:[^"]|"")+"')
_OPERATOR: Final = frozenset("+-*/<>=~!@#%^&|`?")
_PUNCTUATION: Final = frozenset("()[],;:.")
_PLACEHOLDER: Final = re.compile(r"%(.?)", re.DOTALL)
_HARMLESS_STRING: Final = re.compile(r"'[A-Za-z0-9 _:.,+-]*'")


@dataclass(frozen=True, slots=True)
class Token:
    """One token.

    Attributes:
        kind: what it is.
        value: a word in lower case, a quoted name without its quotes, otherwise the text.
        start: offset in the normal text.
        end: offset behind it.
        depth: parentheses and brackets that it lies within.
    """

    kind: Kind
    value: str
    start: int
    end: int
    depth: int

    def is_word(self, *words: str) -> bool:
        """Whether it is one of some unquoted words."""
        return self.kind == "word" and self.value in words

    @property
    def is_name(self) -> bool:
        """Whether it can be a name: a word or a quoted name."""
        return self.kind in ("word", "quoted")


@dataclass(frozen=True, slots=True)
class Lexed:
    """A statement in its normal text: without comments and trailing semicolon, parameters as `$1`."""

    text: str
    tokens: tuple[Token, ...]

    def skeleton(self) -> str:
        """The text with all strings and parameters rewritten whose spelling another parser may read otherwise."""
        parts: list[str] = []
        at = 0
        for token in self.tokens:
            if token.kind == "string" and not _HARMLESS_STRING.fullmatch(self.text[token.start : token.end]):
                parts += [self.text[at : token.start], "'x'"]
                at = token.end
            elif token.kind == "param":
                # Between blanks: the parser reads the `$1,$` of `$1,$2` as the start of a dollar quote.
                parts += [self.text[at : token.start], f" {token.value} "]
                at = token.end
        return "".join(parts) + self.text[at:]


def lex(statement: str, parameter_count: int) -> Lexed:
    """Cut a statement into tokens.

    Args:
        statement: with `%s` for parameters. As everywhere in Python, `%%` stands for one `%` where there are
            parameters, and `%` for itself where there are none.
        parameter_count: how many parameters the call has.

    Raises:
        InvalidRequest: several statements, unbalanced brackets or quotes, a wrong number of parameters, or a
            spelling that is refused.
    """
    if len(statement.encode()) > STATEMENT_BYTES_MAX:
        raise InvalidRequest(f"the statement is longer than {STATEMENT_BYTES_MAX} bytes; make it shorter")
    text = _number_parameters(statement, parameter_count) if parameter_count else statement
    lexed = _Lexer(text).run()
    used = [token.value for token in lexed.tokens if token.kind == "param"]
    # INVARIANT: every `$n` came from a `%s`, in order, and none hides in a string or comment.
    if used != [f"${number}" for number in range(1, parameter_count + 1)]:
        raise InvalidRequest(
            f"the statement uses {len(used)} parameters, {parameter_count} are given; write `%s` once for each, "
            "outside of quotes and comments"
        )
    return lexed


def _number_parameters(statement: str, count: int) -> str:
    numbers = iter(range(1, count + 1))

    def replace(match: re.Match[str]) -> str:
        if match[1] == "s":
            return f"${next(numbers, 0)}"
        if match[1] == "%":
            return "%"
        raise InvalidRequest(
            "the statement has a lone `%`; write `%s` for a parameter and `%%` for a percent sign"
        )

    return _PLACEHOLDER.sub(replace, statement)


class _Lexer:
    """One pass over a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._out: list[str] = []
        self._size = 0
        self._tokens: list[Token] = []
        self._open: list[str] = []

    def run(self) -> Lexed:
        while self._at < len(self._text):
            if not self._skip():
                self._take()
        if self._open:
            raise InvalidRequest(f"the statement has a `{self._open[-1]}` that is not closed; close it")
        while self._tokens and self._tokens[-1].value == ";" and self._tokens[-1].kind == "punct":
            self._tokens.pop()
        if any(token.kind == "punct" and token.value == ";" for token in self._tokens):
            raise InvalidRequest("several statements in one call are refused; make one call for each")
        if not self._tokens:
            raise InvalidRequest("the statement is empty; write one SQL statement")
        return Lexed("".join(self._out)[: self._tokens[-1].end], tuple(self._tokens))

    def _skip(self) -> bool:
        """Pass over white space and comments; they become one space or, as strings may depend on it, one newline."""
        start = self._at
        while self._at < len(self._text):
            match = _SPACE.match(self._text, self._at) or _LINE_COMMENT.match(self._text, self._at)
            if match:
                self._at = match.end()
            elif self._text.startswith("/*", self._at):
                self._block_comment()
            else:
                break
        if self._at == start:
            return False
        passed = self._text[start : self._at]
        self._emit("\n" if "\n" in passed or "\r" in passed else " ")
        return True

    def _block_comment(self) -> None:
        depth = 0
        while True:
            opened = self._text.find("/*", self._at)
            closed = self._text.find("*/", self._at)
            if closed < 0:
                raise InvalidRequest("the statement has a comment that is not closed; end it with `*/`")
            if 0 <= opened < closed:
                depth += 1
                self._at = opened + 2
                continue
            depth -= 1
            self._at = closed + 2
            if depth == 0:
                return

    def _take(self) -> None:
        char = self._text[self._at]
        if char == "'":
            self._match("string", _PLAIN, "a string")
        elif char == '"':
            self._quoted()
        elif char == "$":
            self._dollar()
        elif char.isascii() and (char.isalpha() or char == "_"):
            self._word()
        elif char.isascii() and (
            char.isdigit() or (char == "." and self._text[self._at + 1 : self._at + 2].isdigit())
        ):
            self._match("number", _NUMBER, "a number")
        elif char in _OPERATOR:
            self._operator()
        elif char in _PUNCTUATION:
            self._punctuation(char)
        else:
            raise InvalidRequest(
                f"the statement has the character {char!a} outside of quotes; "
                "put names in double quotes and texts into parameters"
            )

    def _match(self, kind: Kind, pattern: re.Pattern[str], what: str) -> None:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise InvalidRequest(f"the statement has {what} that is not closed; close it, or use a parameter")
        self._add(kind, match[0], match[0])

    def _quoted(self) -> None:
        match = _QUOTED.match(self._text, self._at)
        if match is None:
            raise InvalidRequest("the statement has an empty quoted name, or one that is not closed; mend it")
        self._add("quoted", match[0][1:-1].replace('""', '"'), match[0])

    def _dollar(self) -> None:
        param = _PARAM.match(self._text, self._at)
        if param:
            self._add("param", param[0], param[0])
            return
        tag = _DOLLAR.match(self._text, self._at)
        end = -1 if tag is None else self._text.find(tag[0], tag.end())
        if tag is None or end < 0:
            raise InvalidRequest(
                "the statement has a `$` that begins neither a parameter nor a closed string; write parameters as `%s`"
            )
        body = self._text[self._at : end + len(tag[0])]
        self._add("string", body, body)

    def _word(self) -> None:
        match = _WORD.match(self._text, self._at)
        word = match[0] if match else ""
        end = self._at + len(word)
        following = self._text[end : end + 1]
        if following == "'" and word.lower() in ("e", "b", "x", "n"):
            self._prefixed(word)
        elif word.lower() == "u" and self._text[end : end + 2] in ("&'", '&"'):
            raise InvalidRequest("`U&` strings and names are refused; write the characters themselves")
        else:
            self._add("word", word.lower(), word)

    def _prefixed(self, prefix: str) -> None:
        pattern = _ESCAPED if prefix.lower() == "e" else _PLAIN
        match = pattern.match(self._text, self._at + len(prefix))
        if match is None:
            raise InvalidRequest(
                "the statement has a string that is not closed; close it, or use a parameter"
            )
        self._add("string", prefix + match[0], prefix + match[0])

    def _operator(self) -> None:
        end = self._at
        while end < len(self._text) and self._text[end] in _OPERATOR:
            if end > self._at and self._text.startswith(("--", "/*"), end):
                break
            end += 1
        text = self._text[self._at : end]
        self._add("op", text, text)

    def _punctuation(self, char: str) -> None:
        if char in ")]":
            wanted = "(" if char == ")" else "["
            if not self._open or self._open.pop() != wanted:
                raise InvalidRequest(f"the statement has a `{char}` too many; remove it")
        self._add("punct", char, char)
        if char in "([":
            self._open.append(char)

    def _add(self, kind: Kind, value: str, text: str) -> None:
        if kind in ("word", "quoted") and len(value.encode()) > NAME_BYTES_MAX:
            raise InvalidRequest(
                f"`{value[:20]}…` is longer than {NAME_BYTES_MAX} bytes, which no name may be; shorten it"
            )
        self._tokens.append(Token(kind, value, self._size, self._size + len(text), len(self._open)))
        self._emit(text)
        self._at += len(text)

    def _emit(self, text: str) -> None:
        self._out.append(text)
        self._size += len(text)
