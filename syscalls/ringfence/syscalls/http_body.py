"""What is said of a request's body by the kernel: only what no target can read as something else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from ringfence.policy.exact import Exact
from ringfence.policy.hearsay import folded

_JSON_TYPE: Final = re.compile(r"(application|text)/([a-z0-9!#$&^_.-]+\+)?json")
_UTF8: Final = re.compile(r"charset\s*=\s*(\"utf-?8\"|utf-?8)")


class NotPlain(ValueError):
    """The body can be read in two ways, or in none."""


def json_of(body: bytes, headers: Mapping[str, str]) -> Any:
    """A request's body as JSON values.

    Args:
        body: as it is sent.
        headers: the agent's own.

    Raises:
        NotPlain: it is no JSON, its headers say something else, or it has a name twice, whatever its case.
    """
    if not _says_json(headers):
        raise NotPlain
    try:
        return json.loads(body, object_pairs_hook=_once, parse_float=Exact)
    except (ValueError, RecursionError):
        raise NotPlain from None


def _says_json(headers: Mapping[str, str]) -> bool:
    """Whether headers leave no other reading of a body than JSON in UTF-8: a target may go by what they say."""
    # INVARIANT: what is valid JSON can be a form, or text in another encoding, with other values in it.
    sent = {name.lower(): value.strip().lower() for name, value in headers.items()}
    kind, *parameters = (part.strip() for part in sent.get("content-type", "application/json").split(";"))
    return (
        _JSON_TYPE.fullmatch(kind) is not None
        and all(_UTF8.fullmatch(one) or not one.startswith("charset") for one in parameters)
        and sent.get("content-encoding", "identity") == "identity"
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers of JSON differ in which of two names counts, and in whether their case does.
    if len({folded(name) for name, _ in pairs}) != len(pairs):
        raise NotPlain
    return dict(pairs)
