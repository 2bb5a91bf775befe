"""What a person who approves a call approves with it, and what the body hears of them."""

from __future__ import annotations

import msgspec


class Pointed(msgspec.Struct, frozen=True, kw_only=True):
    """What one pointer names now.

    Attributes:
        pointer: as a canonical text.
        sha256: of the content, in hex.
        media_type: as whoever kept it said, or as found by the content.
        size_bytes: of the content.
        version: of the artifact; 0: it is a file.
    """

    pointer: str
    sha256: str
    media_type: str
    size_bytes: int
    version: int = 0

    @property
    def fingerprint(self) -> str:
        """Differs where anything else would be sent."""
        return f"{self.sha256} {self.media_type}"


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """Who approved, and what they said. Empty where nothing asked."""

    by: str = ""
    answer: str = ""
