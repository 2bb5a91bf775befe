"""URIs of a server's resources. Only the server knows what one means, so one is refused that it might read as another than rules do."""

from __future__ import annotations

import re
from typing import Final

URI_CHARS_MAX: Final = 4096
"""Longest URI of a resource."""

_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*:[!#-;=?-\[\]_a-z~\u0080-\U0010ffff]+")
_TEMPLATE: Final = re.compile(r"\{[^{}]*\}")
_PLAIN: Final = re.compile(r"%(2[dDeE]|3[0-9]|4[1-9a-fA-F]|5[0-9aA]|5[fF]|6[1-9a-fA-F]|7[0-9aA]|7[eE])")
_ESCAPED: Final = re.compile(r"%(2[fF]|5[cC]|25|[01][0-9a-fA-F]|7[fF])")
_PARTS: Final = re.compile(r"[/?#&=;:]")


def unusable(uri: str) -> str:
    """Why a URI can't be used, with what to write instead; empty: it can."""
    if len(uri) > URI_CHARS_MAX:
        return f"it is longer than {URI_CHARS_MAX} characters"
    if _URI.fullmatch(uri) is None:
        return "write a scheme in small letters, a colon, and what a URI may have; escape anything else, as `%20`"
    # INVARIANT: no rule about a URI is got around by another spelling of it that is known to mean the same.
    if _PLAIN.search(uri) is not None:
        return "it has escapes of letters, digits or `-._~`; write these as they are"
    if _ESCAPED.search(uri) is not None:
        return "it has escapes of `/`, `\\\\`, `%` or control characters, which a server may read as it likes"
    if any(part in (".", "..") for part in _PARTS.split(uri)):
        return "it has a part `.` or `..`; write where it leads"
    return ""


def unusable_template(template: str) -> str:
    """The same of a template of URIs, whose variables stand for what is to come."""
    return unusable(_TEMPLATE.sub("x", template))
