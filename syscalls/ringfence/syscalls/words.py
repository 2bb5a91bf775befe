"""Words of others, as they may stand in an error: whoever wrote them may want to say something to a terminal."""

from __future__ import annotations

import unicodedata

SHOWN_CHARS_MAX = 300
"""Of what somebody else said, in one error."""


def shown(text: str, most: int = SHOWN_CHARS_MAX) -> str:
    """A text on one line, without control, format and surrogate characters, bounded."""
    flat = " ".join(text[: 8 * most].split())[:most]
    return "".join(c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in flat)
