"""Passes a streamed reply on while it comes, but for its end: that is said when the reply is recorded. No I/O.

INVARIANT: no secret goes through, not one torn over parts either. A text that ends as a secret begins stays behind until more
has come, and where one shows nothing more goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import msgspec
from ringfence.syscalls.hearing import Hearing
from ringfence.syscalls.llm_reply import decode, mapping, word
from ringfence.syscalls.redaction import Redactor

_NO_WORDS: Final = frozenset({"role", "type", "id", "index"})
_ENDS: Final = frozenset(
    {
        *("message_delta", "message_stop", "error"),
        *("response.completed", "response.incomplete", "response.failed"),
    }
)


class Live:
    """One reply that comes.

    Args:
        hearing: who hears it.
        hide: takes secrets out.
    """

    def __init__(self, hearing: Hearing, hide: Redactor) -> None:
        self._hearing = hearing
        self._hide = hide
        self._held: deque[tuple[bytes, str, bytes]] = deque()
        self._over = False

    def take(self, data: bytes) -> None:
        """Take the data of the next event."""
        document = None if self._over else decode(data)
        if document is None:
            return
        part, last = _split(document)
        if part is not None:
            shown = self._hide.value(part)
            unchanged = part is document and shown == document
            held = data if unchanged else msgspec.json.encode(shown)
            words = "".join(_words(part)).encode("utf-8", "replace")
            self._held.append((held, word(part.get("type")), words))
        waiting = b"".join(words for _, _, words in self._held)
        if self._hide.spans(waiting):
            self._over = True
            self._held.clear()
            self._hearing.spoil()
            return
        left, behind = len(waiting), 0 if last else self._hide.begins(waiting)
        while self._held and left - len(self._held[0][2]) >= behind:
            held, kind, words = self._held.popleft()
            left -= len(words)
            self._hearing.part(held, kind)
        self._over = last


def _split(document: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """What of an event goes on, and whether the end begins with it."""
    kind = document.get("type")
    if isinstance(kind, str):
        return (None, True) if kind in _ENDS else (None if kind == "ping" else document, False)
    choices: object = document.get("choices")
    if not isinstance(choices, list) or not choices:
        return None, bool(document.get("error"))
    choice = mapping(cast("list[Any]", choices)[0])
    if not choice.get("finish_reason"):
        return document, False
    delta = mapping(choice.get("delta"))
    if not any(value for key, value in delta.items() if key != "role"):
        return None, True
    return {**document, "choices": [{**choice, "finish_reason": None}]}, True


def _words(document: Mapping[str, Any]) -> Iterator[str]:
    """The texts that an event adds to the reply."""
    choices: object = document.get("choices")
    if isinstance(choices, list) and choices:
        yield from _leaves(mapping(cast("list[Any]", choices)[0]).get("delta"))
    else:
        yield from _leaves(document.get("delta"))


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, Any]", value).items():
            if key not in _NO_WORDS:
                yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _leaves(inner)
