"""What the bodies of the shared state have in common: how keys and values look."""

from __future__ import annotations

import unicodedata
from typing import Any, Final

from ringfence.policy.canonical import check_text
from ringfence.policy.problems import PatternError
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import InvalidRequest

KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 256 << 10
KEYS_MAX: Final = 256


def check_key(key: str) -> str:
    """Return a key as it is stored, or refuse it.

    A key is 1 to 512 bytes of UTF-8 in NFC without control or invisible characters. Slashes part it into
    components for policy, so no component is empty, `.` or `..`.

    Raises:
        InvalidRequest: the key is none.
    """
    size = len(key.encode())
    if not 1 <= size <= KEY_BYTES_MAX:
        raise InvalidRequest(f"a state key has 1 to {KEY_BYTES_MAX} bytes, this one has {size}; give another")
    try:
        check_text(key, "state key")
    except PatternError as error:
        raise InvalidRequest(str(error)) from None
    if not unicodedata.is_normalized("NFC", key):
        raise InvalidRequest(f"state key `{key}` is not in Unicode form NFC; normalise it")
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidRequest(f"state key `{key}` has an empty, `.` or `..` component; write it without")
    return key


def encode_value(key: str, value: Any) -> bytes:
    """Canonical JSON of a value, bounded.

    Raises:
        InvalidRequest: it is larger than 256 KiB.
    """
    encoded = canonical_json(value)
    if len(encoded) > VALUE_BYTES_MAX:
        raise InvalidRequest(
            f"the value of `{key}` has {len(encoded)} bytes; at most {VALUE_BYTES_MAX} are kept "
            "under one key, put larger ones into a file"
        )
    return encoded


def check_version(name: str, version: int | None) -> None:
    """Refuse a negative version.

    Raises:
        InvalidRequest: it is negative.
    """
    if version is not None and version < 0:
        raise InvalidRequest(
            f"`{name}` is {version}; versions count from 0, which means that there was no value"
        )
