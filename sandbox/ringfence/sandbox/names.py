"""Names of workspace paths: what a request may spell, and the one spelling that policy sees."""

from __future__ import annotations

import os
import unicodedata
from functools import lru_cache

WORKSPACE = "/workspace"
"""Where every workspace is seen, whatever its directory on this host."""
LONGEST_PATH = 4096
"""Most bytes of a requested path."""
LONGEST_NAME = 255
"""Most bytes of one name in it."""

_REFUSED = frozenset({"Cc", "Cf", "Zl", "Zp"})


class BadNameError(ValueError):
    """A requested path that can't be meant; the message is the user's line."""


def shown(path: str) -> str:
    """Make a path fit for one line of text: undecodable bytes and control characters are escaped."""
    return path.encode("utf-8", "backslashreplace").decode() if path.isprintable() else ascii(path)[1:-1]


def other_form(path: str) -> str:
    """The refusal of a name that stands on the disk in another form than requests and rules are compared in."""
    escaped = ascii(path)[1:-1]  # as it is, it would look like the name in NFC
    return f"`{escaped}` stands on the disk in another Unicode form than NFC, so no rule can name it; the operator renames it there"


def _check_unicode(path: str) -> str:
    for character in path:
        if unicodedata.category(character) in _REFUSED:
            raise BadNameError(
                f"path `{shown(path)}` holds the invisible character U+{ord(character):04X}; remove it"
            )
    try:
        again = os.fsdecode(os.fsencode(path))
    except UnicodeEncodeError:
        raise BadNameError(f"path `{shown(path)}` is not valid Unicode; give its name as UTF-8") from None
    if again != path:
        # Escaped bytes that together are valid UTF-8 would be a second spelling of the same name.
        raise BadNameError(f"path `{shown(path)}` spells UTF-8 as escaped bytes; give the plain characters")
    return unicodedata.normalize("NFC", path)


@lru_cache(maxsize=8192)
def normalise(path: str) -> str:
    """Turn a requested path into its lexical form below `/workspace`, links not looked at.

    Args:
        path: absolute below /workspace, or relative to it.

    Returns:
        `/workspace` or `/workspace/a/b`: NFC, no `.`, no empty components.

    Raises:
        BadNameError: empty, outside, `..`, invisible or undecodable characters, too long.
    """
    if not path:
        raise BadNameError("path is empty; give one below /workspace")
    if not (path.isascii() and path.isprintable()):
        path = _check_unicode(path)
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise BadNameError(f"path `{path}` holds `..`; give it without")
    if path[0] == "/":
        if not parts or parts[0] != "workspace":
            raise BadNameError(f"path `{path}` is outside /workspace; give one below it")
        del parts[0]
    lexical = "/".join([WORKSPACE, *parts])
    if len(lexical) > LONGEST_NAME:
        if len(os.fsencode(lexical)) > LONGEST_PATH:
            raise BadNameError(f"path is longer than {LONGEST_PATH} bytes; give a shorter one")
        for part in parts:
            if len(os.fsencode(part)) > LONGEST_NAME:
                raise BadNameError(f"name `{part[:40]}…` is longer than {LONGEST_NAME} bytes; shorten it")
    return lexical


@lru_cache(maxsize=8192)
def relative(canonical: str) -> bytes:
    """Turn a canonical path into the bytes that are opened beneath the root; `.` for the root itself.

    Raises:
        BadNameError: it is not one: every caller but a bug hands in what `canonical` or a walk gave.
    """
    if canonical == WORKSPACE:
        return b"."
    if not canonical.startswith("/workspace/"):
        raise BadNameError(f"path `{shown(canonical)}` is outside /workspace; give one below it")
    parts = canonical[11:].split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in canonical:
        raise BadNameError(f"path `{shown(canonical)}` is not canonical; resolve it first")
    return os.fsencode(canonical[11:])


def parent(canonical: str) -> str:
    """Give the directory of a canonical path other than `/workspace`."""
    return canonical.rpartition("/")[0]


def ancestors(canonical: str) -> list[str]:
    """Give the directories above a canonical path below `/workspace`, outermost first."""
    parts = canonical[11:].split("/")[:-1] if canonical != WORKSPACE else []
    return ["/".join([WORKSPACE, *parts[: count + 1]]) for count in range(len(parts))]


def beneath(path: str, top: str) -> bool:
    """Whether `path` is `top` or lies beneath it, by whole components."""
    return path == top or path.startswith(top + "/")
