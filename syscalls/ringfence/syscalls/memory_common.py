"""What the bodies of the memory have in common: spaces, tags and languages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.state_common import check_key

OWN: Final = "own"
"""How rules call the agent's own space."""
TAGS_MAX: Final = 32
TAG_BYTES_MAX: Final = 128
LANGUAGES: Final = frozenset(
    [
        "simple",
        "arabic",
        "armenian",
        "basque",
        "catalan",
        "danish",
        "dutch",
        "english",
        "finnish",
        "french",
        "german",
        "greek",
        "hindi",
        "hungarian",
        "indonesian",
        "irish",
        "italian",
        "lithuanian",
        "nepali",
        "norwegian",
        "portuguese",
        "romanian",
        "russian",
        "serbian",
        "spanish",
        "swedish",
        "tamil",
        "turkish",
        "yiddish",
    ]
)


def check_space(space: str) -> str:
    """Return the space as rules call it.

    Raises:
        InvalidRequest: it is no key.
    """
    return OWN if space in ("", OWN) else check_key(space)


def stored_space(space: str) -> str:
    """Return the space as it is stored: empty for the agent's own."""
    return "" if space == OWN else space


def check_language(language: str) -> str:
    """Return the language, `simple` for none.

    Raises:
        InvalidRequest: it isn't known.
    """
    if language and language not in LANGUAGES:
        raise InvalidRequest(f"no language `{language[:64]}`; there are: {', '.join(sorted(LANGUAGES))}")
    return language or "simple"


def check_tags(tags: Sequence[str]) -> None:
    """Check tags.

    Raises:
        InvalidRequest: too many, an empty or a long one.
    """
    if len(tags) > TAGS_MAX:
        raise InvalidRequest(f"there are {len(tags)} tags; at most {TAGS_MAX} are kept")
    for tag in tags:
        size = len(tag.encode())
        if not 1 <= size <= TAG_BYTES_MAX:
            raise InvalidRequest(f"a tag has 1 to {TAG_BYTES_MAX} bytes, `{tag[:40]}` has {size}")
