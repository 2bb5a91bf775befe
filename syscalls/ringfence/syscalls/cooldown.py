"""One cool-down for each upstream, shared by all agents of this process.

An upstream that answers 429, or 503 with a time to come back, is left alone by everyone until then. After that the
calls that waited start one after the other, each a little later than the one before, so that the first can find out
whether the storm is over before the rest is sent into it.

INVARIANT: nothing is sent to an upstream while it cools. What has to wait longer than its deadline is refused at once.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from ringfence.syscalls.errors import QuotaExceeded

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call

ATTEMPTS_MAX: Final = 4
"""How often one call is sent at most."""
HOLD_S_MAX: Final = 60.0
"""Longest wait for an upstream; a call that would wait longer is refused with the time to come back."""
SPACING_S: Final = 0.25
"""Between the starts of two calls that waited for the same upstream."""
FIRST_WAIT_S: Final = 1.0
"""How long an upstream is left alone that names no time; doubled with each attempt."""
WAIT_S_MAX: Final = 3600.0
"""Longest time that an upstream is left alone for one answer, whatever it names: a wrong number must not shut it off."""

TOO_MANY: Final = 429
UNAVAILABLE: Final = 503

_jitter: Final = random.SystemRandom().random
_WORDS: Final = re.compile(
    r"(?:try again|retry|wait)[^.]{0,40}?\b(?:in|after|for)\s+((?:[\d.]+\s*(?:ms|s|m|h)[a-z]*\s*)+)",
    re.IGNORECASE,
)
_PART: Final = re.compile(r"([\d.]+)\s*(ms|s|m|h)", re.IGNORECASE)
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BODY_BYTES: Final = 64 << 10


class Cooldown:
    """When one upstream may be asked again."""

    __slots__ = ("_clock", "_free_at", "_name", "_storms", "_until")

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._until = 0.0
        self._free_at = 0.0
        self._storms = 0

    @property
    def left_s(self) -> float:
        """Seconds for which nothing may be sent; 0: it is not cooling."""
        return max(0.0, self._until - self._clock())

    def told(self, wait_s: float) -> None:
        """The upstream wants to be left alone."""
        self._storms += 1
        self._until = max(self._until, self._clock() + wait_s)
        self._free_at = self._until

    def turn_s(self) -> float:
        """Take a turn after the cool-down. Returns seconds until it comes; 0: at once."""
        now = self._clock()
        at = max(self._until, self._free_at)
        if now >= at:
            return 0.0
        self._free_at = at + SPACING_S
        return at - now + _jitter() * SPACING_S / 2

    async def wait(self, call: Call) -> None:
        """Wait until this call may be sent.

        Raises:
            QuotaExceeded: that would take longer than its deadline, or than anyone is held.
        """
        while True:
            storms, wait_s = self._storms, self.turn_s()
            if wait_s <= 0:
                return
            if wait_s > min(call.deadline_s, HOLD_S_MAX):
                raise self.exceeded(0)
            until_us = time.time_ns() // 1000 + int(wait_s * 1e6)
            async with call.waiting("rate", f"upstream `{self._name}`", until_us):
                await asyncio.sleep(wait_s)
            if storms == self._storms:
                return

    def exceeded(self, attempts: int) -> QuotaExceeded:
        """What an agent is told when it can't be held any longer."""
        left = self.left_s
        tried = f" after {attempts} attempts" if attempts else ""
        return QuotaExceeded(
            f"`{self._name}` asks its callers to wait{tried} and is left alone for {left:.1f} s more; "
            "try again then; a restart of the kernel forgets it",
            resource=self._name,
            retry_after_ms=str(int(left * 1000) + 1),
            attempts=str(attempts),
        )


_cooldowns: Final[dict[tuple[str, str], Cooldown]] = {}


def cooldown_of(name: str, base: str) -> Cooldown:
    """The cool-down of a declared resource: the same for every agent."""
    found = _cooldowns.get((name, base))
    if found is None:
        found = _cooldowns[name, base] = Cooldown(name)
    return found


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
