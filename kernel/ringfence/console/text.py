"""Makes text that agents chose harmless: their output is hostile to whoever reads it on a terminal."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from rich.cells import cell_len
from ringfence.policy.lookalikes import unmasked

_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_JSON_UNSAFE = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_ELLIPSIS = "…"
_BYTE_MAX = 0xFF
_UNIT_MAX = 0xFFFF
"""Above it JSON writes two surrogates."""


def safe(text: object) -> str:
    r"""Make a text one line that can't move the cursor, hide or reorder anything.

    Words of every script stay. What has no visible form becomes an escape such as `\x1b`, `\n` or `\u202e`, and so does a letter
    that can be taken for another, such as a Cyrillic one in a Latin word.
    """
    line = str(text)
    if line.isascii() and line.isprintable():
        return line
    return "".join(char if char.isprintable() else _escape(char) for char in unmasked(line))


def safe_block(text: str) -> str:
    """Make several lines harmless: line ends and tabs stay, colours are dropped, the rest as `safe`."""
    plain = _SGR.sub("", text).replace("\r\n", "\n")
    return "".join(char if char.isprintable() or char in "\n\t" else _escape(char) for char in plain)


class SafeDecoder:
    """Turns a stream of bytes into harmless text, a chunk at a time; a character may be split over chunks."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """Decode a chunk. An escape sequence or line end cut at its end waits for the next one."""
        text = self._held + self._decoder.decode(data, final)
        self._held = ""
        cut = _open_end(text)
        if not final and cut < len(text):
            text, self._held = text[:cut], text[cut:]
        return safe_block(text)


def to_json(document: Any, *, indent: int | None = None) -> str:
    """Write a document as JSON. Characters without a visible form become JSON escapes: it stays the same."""
    text = json.dumps(document, ensure_ascii=False, indent=indent)
    return _JSON_UNSAFE.sub(_json_escape, text)


def width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return cell_len(text)


def shorten(text: str, columns: int) -> str:
    """Cut the middle out of a text that is too wide: of a path, its two ends say most."""
    if width(text) <= columns:
        return text
    if columns <= 1:
        return _ELLIPSIS[:columns]
    tail_columns = (columns - 1) * 2 // 3
    head, tail = "", ""
    for char in reversed(text):
        if width(tail) + cell_len(char) > tail_columns:
            break
        tail = char + tail
    for char in text:
        if width(head) + cell_len(char) > columns - 1 - width(tail):
            break
        head += char
    return head + _ELLIPSIS + tail


def cut(text: str, columns: int) -> str:
    """Cut the end off a text that is too wide: of a sentence, its beginning says most."""
    if width(text) <= columns:
        return text
    while text and width(text) > columns - 1:
        text = text[:-1]
    return text + _ELLIPSIS


def pad(text: str, columns: int, *, right: bool = False) -> str:
    """Fill a text with spaces up to a width."""
    fill = " " * max(0, columns - width(text))
    return fill + text if right else text + fill


def _open_end(text: str) -> int:
    start = text.rfind("\x1b", max(0, len(text) - 32))
    if start >= 0 and re.fullmatch(r"\x1b(\[[0-9;:]*)?", text[start:]):
        return start
    return len(text) - 1 if text.endswith("\r") else len(text)


def _escape(char: str) -> str:
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    if named:
        return named
    code = ord(char)
    if code <= _BYTE_MAX:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= _UNIT_MAX else f"\\U{code:08x}"


def _json_escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code <= _UNIT_MAX:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
