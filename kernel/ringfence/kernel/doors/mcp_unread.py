"""What is said of a message that is none: the error of JSON-RPC for whoever waits for its answer."""

from __future__ import annotations

import json
from typing import Any, Final, cast

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600


def unreadable(data: bytes) -> bytes | None:
    """The answer to a message that the protocol does not know, as JSON; with its id where that can be found.

    Args:
        data: what came.

    Returns:
        None where nobody waits: of a notification, and of what was meant as an answer.
    """
    try:
        said: object = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return _error(None, PARSE_ERROR, "this is no JSON; send one message a line")
    if not isinstance(said, dict):
        return _error(None, INVALID_REQUEST, "a message is one JSON object; there are no batches")
    message = cast("dict[str, Any]", said)
    asked = message.get("id")
    known = asked if isinstance(asked, (int, str)) and not isinstance(asked, bool) else None
    if "result" in message or "error" in message or ("method" in message and "id" not in message):
        return None
    try:
        data.decode()
        json.dumps(message, ensure_ascii=False).encode()
    except (UnicodeError, RecursionError):
        return _error(known, PARSE_ERROR, "the message holds what is no text; send whole characters")
    return _error(known, INVALID_REQUEST, "this is no request of JSON-RPC 2.0")


def _error(asked: int | str | None, code: int, message: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": asked, "error": {"code": code, "message": message}}).encode()
