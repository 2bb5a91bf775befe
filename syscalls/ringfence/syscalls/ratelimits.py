"""What an upstream's answers say about how often it may be asked: when to come back, and how many calls are left until then.

Understood are `Retry-After`, the fields `RateLimit` and `RateLimit-Policy` of the IETF in their present form and in the earlier one,
`RateLimit-Remaining` and `X-RateLimit-Remaining` with their `Reset`, with the suffixes that hosts of models use, and the sentences of errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, cast

import msgspec

FIRST_WAIT_S: Final = 1.0
"""How long an upstream is left alone that names no time; doubled with each attempt."""
WAIT_S_MAX: Final = 3600.0
"""Longest time that an upstream is left alone for one answer, whatever it names: a wrong number must not shut it off."""

TOO_MANY: Final = 429
UNAVAILABLE: Final = 503

_WORDS: Final = re.compile(
    r"(?:try again|retry|wait)[^.]{0,40}?\b(?:in|after|for)\s+((?:[\d.]+\s*(?:ms|s|m|h)[a-z]*\s*)+)",
    re.IGNORECASE,
)
_PART: Final = re.compile(r"([\d.]+)\s*(ms|s|m|h)", re.IGNORECASE)
_SPAN: Final = re.compile(r"(?:[\d.]+(?:ms|s|m|h))+", re.IGNORECASE)
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BODY_BYTES: Final = 64 << 10
_HEADER_CHARS: Final = 2048
_ITEM: Final = re.compile(
    r'\s*(?:"((?:[^"\\]|\\.)*)"|([A-Za-z*][\w.*-]*))((?:\s*;\s*[a-z][\w-]*=(?:"[^"]*"|:[^:]*:|[^;,\s]+))*)\s*(?:,|$)'
)
_PARAMETER: Final = re.compile(r";\s*([a-z][\w-]*)=([^;,\s]+)")
_EARLIER: Final = re.compile(r"\b(limit|remaining|reset)\s*=\s*([\d.]+)")
_PREFIXES: Final = ("ratelimit-", "x-ratelimit-", "x-rate-limit-")
_SUFFIXES: Final = ("", "-requests", "-tokens")
_EPOCH_S: Final = 1e9
"""A reset larger than this is a time, not a number of seconds."""
_EPOCH_MS: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """So many calls are left for so many seconds."""

    remaining: float
    reset_s: float


def quota_of(headers: Mapping[str, str]) -> Quota | None:
    """What is left of an upstream's own limit; None: it does not say.

    Of several limits the one counts that is used up for longest, else the one of which least is left.

    Args:
        headers: names in lower case.
    """
    found = [*_of_fields(headers), *_of_pairs(headers)]
    spent = [quota for quota in found if quota.remaining < 1]
    if spent:
        return max(spent, key=lambda quota: quota.reset_s)
    return min(found, key=lambda quota: quota.remaining, default=None)


def _of_fields(headers: Mapping[str, str]) -> list[Quota]:
    """`RateLimit: "burst";r=0;t=5, "day";r=10;t=900`, or `limit=10, remaining=0, reset=5`."""
    text = headers.get("ratelimit", "")[:_HEADER_CHARS]
    earlier = dict(_EARLIER.findall(text))
    if "remaining" in earlier:
        quota = _quota(earlier["remaining"], earlier.get("reset"), headers)
        return [] if quota is None else [quota]
    windows = {name: said.get("w") for name, said in _items(headers.get("ratelimit-policy", ""))}
    found = [
        _quota(said.get("r"), said.get("t") or windows.get(name), headers) for name, said in _items(text)
    ]
    return [quota for quota in found if quota is not None]


def _items(text: str) -> list[tuple[str, dict[str, str]]]:
    found = _ITEM.finditer(text[:_HEADER_CHARS])
    return [(item[1] or item[2] or "", dict(_PARAMETER.findall(item[3] or ""))) for item in found]


def _of_pairs(headers: Mapping[str, str]) -> list[Quota]:
    """`X-RateLimit-Remaining` and `X-RateLimit-Reset`, and their like."""
    found: list[Quota] = []
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            quota = _quota(
                headers.get(f"{prefix}remaining{suffix}"), headers.get(f"{prefix}reset{suffix}"), headers
            )
            # What is left of tokens is no number of calls; that none is left is.
            if quota is not None and (suffix != "-tokens" or quota.remaining < 1):
                found.append(quota)
    return found


def _quota(remaining: str | None, reset: str | None, headers: Mapping[str, str]) -> Quota | None:
    left, seconds = _number(remaining), _reset(reset, headers)
    if left is None or seconds is None or not 0 <= left < _EPOCH_MS:
        return None
    return Quota(remaining=left, reset_s=_bounded(seconds))


def _reset(text: str | None, headers: Mapping[str, str]) -> float | None:
    """Seconds, or a time as seconds or milliseconds since 1970, a date, or a span such as `6m0s`."""
    if text is None:
        return None
    number = _number(text)
    now = _date(headers.get("date", "")) or datetime.now(UTC)
    if number is not None and number >= _EPOCH_S:
        return number / (1000 if number >= _EPOCH_MS else 1) - now.timestamp()
    if number is not None:
        return number
    if _SPAN.fullmatch(text.strip()):
        return sum((_number(part) or 0.0) * _UNITS[unit.lower()] for part, unit in _PART.findall(text))
    until = _date(text)
    return None if until is None else (until - now).total_seconds()


def wait_of(status: int, headers: Mapping[str, str], body: bytes, attempt: int) -> float | None:
    """How long an answer asks to be left alone, in seconds; None: it does not.

    Args:
        status: of the answer.
        headers: names in lower case.
        body: looked at where no header says it.
        attempt: which of this call's it was, from 1; an upstream that names no time is given longer each time.
    """
    named = _from_headers(headers)
    if status == UNAVAILABLE and named is not None:
        return _bounded(named)
    if status != TOO_MANY:
        return None
    if named is None:
        named = _from_body(body)
    return _bounded(FIRST_WAIT_S * 2 ** (attempt - 1) if named is None else named)


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.05), WAIT_S_MAX) if seconds == seconds else FIRST_WAIT_S  # noqa: PLR0124 - NaN


def _from_headers(headers: Mapping[str, str]) -> float | None:
    millis = _number(headers.get("retry-after-ms"))
    if millis is not None:
        return millis / 1000
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    seconds = _number(text)
    if seconds is not None:
        return seconds
    until = _date(text)
    if until is None:
        return None
    # By the upstream's own clock where it tells it: its date says nothing about ours.
    return (until - (_date(headers.get("date", "")) or datetime.now(UTC))).total_seconds()


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError):
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _from_body(body: bytes) -> float | None:
    """The time that an error's fields or its sentence names, as hosts of models do."""
    try:
        document: Any = msgspec.json.decode(body[:_BODY_BYTES])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    fields: dict[str, Any] = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
    inner = fields.get("error")
    places = [fields, cast("dict[str, Any]", inner)] if isinstance(inner, dict) else [fields]
    for place in places:
        for key, unit in (("retry_after_ms", 0.001), ("retry_after", 1.0), ("retryAfter", 1.0)):
            found = _number(place.get(key))
            if found is not None:
                return found * unit
    for place in places:
        message = place.get("message")
        found = _WORDS.search(message) if isinstance(message, str) else None
        if found is not None:
            return sum((_number(n) or 0.0) * _UNITS[u.lower()] for n, u in _PART.findall(found.group(1)))
    return None
