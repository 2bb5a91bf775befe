"""`sleep`: wait until a time that is recorded first, so that a restart waits only for what is left."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Final

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.now import rfc3339

DURATION_MAX_MS: Final = 366 * 24 * 3600 * 1000
# The machine may be suspended: the clock is looked at again at least this often.
_LOOK_S: Final = 60.0


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long, in milliseconds."""

    duration_ms: int = 0


class Result(msgspec.Struct, frozen=True):
    """When it woke, RFC 3339 UTC."""

    time: str


class _Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is recorded before the wait: wall clock to wake at, microseconds since the epoch."""

    wake_at_us: int


def moved(progress: bytes, by_us: int) -> bytes:
    """What a wait has on record, where the wall clock was set by so many microseconds while nobody kept it."""
    found = msgspec.json.decode(progress, type=_Progress)
    return msgspec.json.encode(_Progress(wake_at_us=found.wake_at_us + by_us))


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the duration.

    Raises:
        InvalidRequest: it is negative or longer than a year.
    """
    del env
    if not 0 <= arguments.duration_ms <= DURATION_MAX_MS:
        raise InvalidRequest(
            f"`duration_ms` is {arguments.duration_ms}; it has to lie between 0 and {DURATION_MAX_MS}"
        )
    return Plan(resource="", questions=(Question(action="sleep", resource=""),))


async def run(call: Call, arguments: Arguments) -> Result:
    """Wait for what is left of the time; ends at once when cancelled."""
    now_us, most_us = time.time_ns() // 1000, arguments.duration_ms * 1000
    wake_at_us = None
    if call.progress is not None:
        wake_at_us = msgspec.json.decode(call.progress, type=_Progress).wake_at_us
    # Where the wall clock was put back meanwhile nobody knows what is left: it takes as long as was asked from here on.
    if wake_at_us is None or wake_at_us > now_us + most_us:
        wake_at_us = now_us + most_us
        await call.record(msgspec.json.encode(_Progress(wake_at_us=wake_at_us)))
    # The wall clock counts the time this kernel was down. From here on a clock counts that nobody sets, and that goes on while
    # the machine is suspended.
    left_s = min(wake_at_us / 1e6 - time.time(), arguments.duration_ms / 1000)
    end = time.clock_gettime(time.CLOCK_BOOTTIME) + left_s
    until = rfc3339(datetime.fromtimestamp(wake_at_us / 1e6, UTC))
    async with call.waiting("timer", f"timer {until}", wake_at_us):
        while True:
            left_s = end - time.clock_gettime(time.CLOCK_BOOTTIME)
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, _LOOK_S))
    return Result(time=rfc3339(datetime.now(UTC)))
