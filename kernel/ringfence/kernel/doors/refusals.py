"""Errors of the kernel as hosts of models word them, so that a program's own client takes them for what they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from ringfence.syscalls.errors import SyscallError


class Kind(NamedTuple):
    """One kind of error.

    Attributes:
        anthropic: its type there.
        openai: its type there.
        code: and its code; empty: none.
        again: whether a client that makes the call again by itself may get another answer.
    """

    status: int
    anthropic: str
    openai: str
    code: str = ""
    again: bool = False


_INVALID: Final = "invalid_request_error"
_UNKNOWN: Final = Kind(500, "api_error", "server_error")
_UNAVAILABLE: Final = Kind(403, "permission_error", "permission_error", "permission_denied")
"""A host that can't be used, as for a key that is not set: clients that hear of 404 tell their user that there is no such model."""
_CONTEXT: Final = Kind(400, _INVALID, _INVALID, "context_length_exceeded")

KINDS: Final[Mapping[str, Kind]] = {
    "InvalidRequest": Kind(400, _INVALID, _INVALID),
    "BadCredential": Kind(401, "authentication_error", _INVALID, "invalid_api_key"),
    "Denied": Kind(403, "permission_error", "permission_error", "permission_denied"),
    "Revoked": Kind(403, "permission_error", "permission_error", "permission_denied"),
    "NoSuchResource": Kind(404, "not_found_error", _INVALID, "model_not_found"),
    "Conflict": Kind(409, _INVALID, _INVALID, "conflict"),
    "QuotaExceeded": Kind(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded", again=True),
    "BudgetExhausted": Kind(429, "rate_limit_error", "insufficient_quota", "insufficient_quota"),
    "CallFailed": Kind(502, "api_error", "server_error", again=True),
    "ReplyCut": Kind(502, "api_error", "server_error", again=True),
    "Deadline": Kind(504, "timeout_error", "server_error"),
    "JournalUnavailable": Kind(503, "overloaded_error", "server_error", again=True),
    "Fenced": Kind(503, "overloaded_error", "server_error", again=True),
    "Killed": Kind(503, "api_error", "server_error"),
}
"""By the reason of an error; the others are `500`."""

_BY_STATUS: Final[Mapping[int, Kind]] = {
    401: KINDS["BadCredential"],
    404: Kind(404, "not_found_error", _INVALID),
    405: Kind(405, _INVALID, _INVALID),
    413: Kind(413, "request_too_large", _INVALID),
    500: _UNKNOWN,
}
_SPENT_S: Final = 60
"""When to come back to a budget: an operator may have raised it."""
_JSON: Final = {"content-type": "application/json"}
_INTERNAL: Final = 500


def of_error(error: SyscallError, *, anthropic: bool) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers for an error of a call.

    What a host itself answered goes through as it is.
    """
    facts = error.metadata
    if error.reason == "CallFailed" and facts.get("status", "").isdigit():
        status = int(facts["status"])
        headers = {**_JSON, "x-should-retry": "true" if status >= _INTERNAL else "false"}
        if "body" in facts:
            return status, facts["body"].encode(), headers
        kind = _BY_STATUS.get(status, KINDS["CallFailed"])._replace(status=status)
        return status, _body(kind, error.message, facts, anthropic=anthropic), headers
    kind = KINDS.get(error.reason, _UNKNOWN)
    if facts.get("quota") == "context":
        kind = _CONTEXT
    if "unavailable" in facts:
        kind = _UNAVAILABLE
    if error.reason == "NoSuchResource" and "pointer" in facts:
        kind = _BY_STATUS[404]  # not the model's fault, which its code would say
    headers = {**_JSON, "x-should-retry": "true" if kind.again else "false"}
    if kind.status in (429, 503):
        headers["retry-after"] = str(_wait_s(error))
    told = {"reason": error.reason, **{name: value for name, value in facts.items() if name != "partial"}}
    return kind.status, _body(kind, error.message, told, anthropic=anthropic), headers


def of_status(status: int, message: str, *, anthropic: bool) -> tuple[bytes, dict[str, str]]:
    """Body and headers for an error of HTTP itself."""
    kind = _BY_STATUS.get(status, Kind(status, _INVALID, _INVALID))
    headers = {**_JSON, "x-should-retry": "false"}
    return _body(kind, message, {}, anthropic=anthropic), headers


def _wait_s(error: SyscallError) -> int:
    told = error.metadata.get("retry_after_ms", "")
    if told.isdigit():
        return max(1, math.ceil(int(told) / 1000))
    return _SPENT_S if error.reason == "BudgetExhausted" else 1


def _body(kind: Kind, message: str, facts: Mapping[str, str], *, anthropic: bool) -> bytes:
    more: dict[str, Any] = {"ringfence": dict(facts)} if facts else {}
    if anthropic:
        inner = {"type": kind.anthropic, "message": message, **more}
        return msgspec.json.encode({"type": "error", "error": inner})
    inner = {"message": message, "type": kind.openai, "param": None, "code": kind.code or None, **more}
    return msgspec.json.encode({"error": inner})
