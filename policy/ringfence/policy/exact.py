"""Numbers as they are written: a comparison in binary fractions would let the next one above a bound through."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Final, Self

_SPELLED_OUT: Final = 40
"""Powers of ten up to which a number is written without an exponent."""


class Exact(float):
    """A number with a fraction or an exponent, as `json.loads(…, parse_float=Exact)` reads it: it keeps its text."""

    text: str

    def __new__(cls, text: str) -> Self:
        """Read it."""
        made = super().__new__(cls, text)
        made.text = text
        return made


def exact(value: object) -> Decimal | None:
    """A JSON number exactly; None: it is no number, not finite, or beyond all that can be compared."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = Decimal(
            value.text if isinstance(value, Exact) else value if isinstance(value, int) else repr(value)
        )
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def plain(value: Decimal) -> str:
    """A number for people and for comparison as text: equal numbers give equal texts."""
    if not value:
        return "0"
    if abs(value.adjusted()) > _SPELLED_OUT:
        sign, digits, exponent = value.as_tuple()
        kept = "".join(map(str, digits)).rstrip("0")
        return f"{'-' if sign else ''}{kept}e{int(exponent) + len(digits) - len(kept)}"
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
