"""Letters that look like ASCII ones: shown escaped to people where they could be taken for them."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_CYRILLIC: Final = "аеорсухіјѕһԁԛԝҽӏАВЕЗКМНОРСТУХІЈЅҮԌԜ"  # noqa: RUF001 - that is what it is about
_GREEK: Final = "αινορτυχγκΑΒΕΖΗΙΚΜΝΟΡΤΥΧ"
_MORE: Final = "ıȷɑɡɩɪʏʟʙᴄᴏᴠᴡᴢօսցհոՕՍꓲꓳ"
LOOKALIKES: Final = frozenset(_CYRILLIC + _GREEK + _MORE)
"""Letters of other scripts that many typefaces draw like ASCII letters."""

_WORD: Final = re.compile(r"[^\W_]+")
_PURE_MIN: Final = 2


def unmasked(text: str) -> str:
    r"""A text in which what could be taken for ASCII stands as an escape, such as `p\u0430ypal`.

    Words of another script stay: a letter is escaped where its word has ASCII letters too, or consists of nothing but such
    letters. Variants that only differ in their drawing, such as full-width ones, are always escaped.
    """
    if text.isascii():
        return text
    return _WORD.sub(lambda found: _word(found[0]), text)


def _word(word: str) -> str:
    if word.isascii():
        return word
    letters = [char for char in word if char.isalpha()]
    mixed = any(char.isascii() for char in letters)
    pure = len(letters) >= _PURE_MIN and all(char in LOOKALIKES for char in letters)
    return "".join(
        _escape(char) if (char in LOOKALIKES and (mixed or pure)) or _drawn(char) else char for char in word
    )


def _drawn(char: str) -> bool:
    """Whether a character is an ASCII letter or digit in another drawing."""
    plain = "" if char.isascii() else unicodedata.normalize("NFKC", char)
    return len(plain) == 1 and plain.isascii() and plain.isalnum()


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004 - what four digits hold
