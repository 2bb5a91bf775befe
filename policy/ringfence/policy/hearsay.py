"""Where a word among a call's arguments comes from: from those whom the operator trusts, or only from hearsay.

An agent that was talked into something gets from a stranger what it sends, where, and to whom. What it was asked to do it has from
its input. So a destination that stands neither there nor in a field that a resource vouches for is hearsay.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from ringfence.policy.exact import exact, plain
from ringfence.policy.facts import Facts, Told

SOURCES: Final = ("input", "answers")
"""Who vouches: the agent's input, and fields of answers that the operator named under `vouches`, whatever they are called."""

VOUCHER: Final = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
"""What an operator may call some of these fields, so that a condition takes them alone."""

_SHOWN: Final = 80
_BODY: Final = "json"
_JOINS: Final = frozenset("_@+-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearsay:
    """Something in one of these fields is vouched for by none of these sources.

    Attributes:
        fields: JSON pointers among the arguments; of lists and objects every value in them, and every name of a field.
        vouched_by: of `SOURCES`, and names that the operator gave to fields of answers.
        names: names of fields that the target's own form has there, which say nothing.
    """

    fields: tuple[str, ...]
    vouched_by: tuple[str, ...] = SOURCES
    names: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Its form in a file."""
        named = self.fields[0] if len(self.fields) == 1 else f"[{', '.join(self.fields)}]"
        more = "" if self.vouched_by == SOURCES else f", vouched_by: [{', '.join(self.vouched_by)}]"
        if self.names:
            more += f", names: [{', '.join(map(json.dumps, self.names))}]"
        return f"hearsay: {{fields: {named}{more}}}" if more else f"hearsay: {named}"

    def holds(self, facts: Facts) -> str:
        """Why it holds, for people; empty: it doesn't."""
        arguments = facts.arguments
        if facts.told is None or not isinstance(arguments, Mapping):
            return "what the thread was told can't be known now"
        given = cast("Mapping[str, object]", arguments)
        for name in self.fields:
            # INVARIANT: a body that can't be read may hold anything; a field that isn't there holds nothing.
            parts = name.split("/")[1:]
            if folded(parts[0]) == _BODY and _BODY not in given:
                return "the body of the request can't be read"
            for value in _at(given, parts):
                for one in words_in(value):
                    if not self._vouched(one, facts.told):
                        return f"`{name}` holds `{_shown(one)}`, which {self._nobody} names"
                # INVARIANT: a name is a text like any other: `{"to": {"eve@example.com": 1}}` sends it to Eve.
                for one in _names_in(value):
                    if folded(one) not in map(folded, self.names) and not self._vouched(one, facts.told):
                        why = f"`{name}` holds a field named `{_shown(one)}`, which {self._nobody} names"
                        return f"{why}, nor the condition under `names`"
        return ""

    @property
    def _nobody(self) -> str:
        phrases = {"input": "the agent's input", "answers": "an answer that is vouched for"}
        shown = [phrases.get(one, f"an answer that is vouched for as `{one}`") for one in self.vouched_by]
        return f"neither {' nor '.join(shown)}" if len(shown) > 1 else f"not {shown[0]}"

    def _vouched(self, word: str, told: Told) -> bool:
        plain = folded(word)
        if "answers" in self.vouched_by and plain in told.values:
            return True
        if any(plain in told.named.get(one, ()) for one in self.vouched_by):
            return True
        return "input" in self.vouched_by and stands_in(plain, folded(told.input))


def _at(value: object, parts: Sequence[str]) -> Iterator[object]:
    """Everything at a JSON pointer, whatever the case of its names: some readers of JSON don't tell them apart."""
    if not parts:
        yield value
        return
    name = folded(parts[0].replace("~1", "/").replace("~0", "~"))
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            if folded(key) == name:
                yield from _at(inner, parts[1:])
    elif isinstance(value, list):
        listed = cast("list[object]", value)
        if name.isascii() and name.isdigit() and int(name) < len(listed):
            yield from _at(listed[int(name)], parts[1:])


def _names_in(value: object) -> Iterator[str]:
    """Every name of a field in a JSON value."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            if key:
                yield key
            yield from _names_in(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from _names_in(inner)


def words_in(value: object) -> Iterator[str]:
    """Every text and number in a JSON value; names of fields and truth values are none."""
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, Mapping):
        for inner in cast("Mapping[str, object]", value).values():
            yield from words_in(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from words_in(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        # INVARIANT: all of its digits count: two accounts may differ in the last one.
        number = exact(value)
        yield str(value) if number is None else plain(number)


def folded(text: str) -> str:
    """A text as it is compared: NFC, without case."""
    return unicodedata.normalize("NFC", text).casefold()


def stands_in(word: str, text: str) -> bool:
    """Whether a word stands in a text by itself, and not as a part of a longer one."""
    at = text.find(word)
    while at >= 0:
        if not _goes_on(text, at - 1, -1) and not _goes_on(text, at + len(word), 1):
            return True
        at = text.find(word, at + 1)
    return False


def _goes_on(text: str, at: int, step: int) -> bool:
    """Whether a word goes on at a place: a letter, a digit, what joins them; or a dot with more of it behind."""
    if not 0 <= at < len(text):
        return False
    if text[at] == ".":
        after = at + step
        return 0 <= after < len(text) and (text[after].isalnum() or text[after] in _JOINS)
    return text[at].isalnum() or text[at] in _JOINS


def _shown(word: str) -> str:
    clean = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in word[: _SHOWN + 1])
    return clean if len(clean) <= _SHOWN else f"{clean[:_SHOWN]}..."
