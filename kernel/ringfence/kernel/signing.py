"""Signatures of the Standard Webhooks scheme: HMAC-SHA256 over id, time and body, as `v1,BASE64`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

PREFIX: Final = "whsec_"
KEY_BYTES_MIN: Final = 24
KEY_BYTES_MAX: Final = 64
TOLERANCE_S: Final = 300
"""How far the time of a message may lie from now."""

SIGNATURES_MAX: Final = 8
"""Signatures of one message that are looked at: a sender that changes its key sends two."""

ID_CHARS_MAX: Final = 256


class BadKey(Exception):
    """A secret is no signing key. `str()` is one line; it never holds the value."""


class BadSignature(Exception):
    """A message is not proven to be from whoever has the key, or not from now. `str()` is one line."""


def key_of(text: bytes, name: str) -> bytes:
    """Read a signing key in the form that the scheme gives it.

    Args:
        text: `whsec_` and base64 of 24 to 64 bytes.
        name: of the secret, for the message.

    Raises:
        BadKey: it is none.
    """
    said = text.decode("ascii", "replace").strip()
    try:
        key = base64.b64decode(said.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not said.startswith(PREFIX) or not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise BadKey(
            f"secret `{name}` is no signing key: it has to be `{PREFIX}` and base64 of {KEY_BYTES_MIN} to {KEY_BYTES_MAX} random bytes; "
            f"make one: printf '{PREFIX}%s' \"$(head -c 32 /dev/urandom | base64)\" | ringfence secrets set {name}"
        )
    return key


def sign(key: bytes, message: str, timestamp: int, body: bytes) -> str:
    """The signature of one message.

    Args:
        key: as `key_of` reads it.
        message: its id.
        timestamp: seconds since the epoch.
        body: as it is sent.
    """
    signed = f"{message}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def verify(key: bytes, message: str, timestamp: str, signatures: str, body: bytes, *, now: float) -> None:
    """Check that a message is from whoever has the key, and from now.

    Args:
        key: as `key_of` reads it.
        message: the header `webhook-id`.
        timestamp: the header `webhook-timestamp`.
        signatures: the header `webhook-signature`: one or more, separated by blanks.
        body: as it came.
        now: seconds since the epoch.

    Raises:
        BadSignature: no signature is right, or the time is more than `TOLERANCE_S` away.
    """
    if not 0 < len(message) <= ID_CHARS_MAX or not message.isascii() or not message.isprintable():
        raise BadSignature("the header `webhook-id` is missing or no id")
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):  # noqa: PLR2004 - digits of a time
        raise BadSignature("the header `webhook-timestamp` is missing or no time in seconds")
    wanted = sign(key, message, int(timestamp), body).encode()
    # INVARIANT: every signature is compared in full, so that the time an answer takes says nothing about the right one.
    found = [hmac.compare_digest(wanted, given.encode()) for given in signatures.split(" ")[:SIGNATURES_MAX]]
    if not any(found):
        raise BadSignature("no signature of this message is right")
    # Looked at last: only whoever has the key learns how the clock stands.
    if abs(now - int(timestamp)) > TOLERANCE_S:
        raise BadSignature(
            f"the message is from more than {TOLERANCE_S // 60} minutes ago or ahead; check the clocks, and sign it anew"
        )
