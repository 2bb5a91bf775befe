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
    if call.progress is not None:
        wake_at_us = msgspec.json.decode(call.progress, type=_Progress).wake_at_us
    else:
        wake_at_us = time.time_ns() // 1000 + arguments.duration_ms * 1000
        await call.record(msgspec.json.encode(_Progress(wake_at_us=wake_at_us)))
    # The wall clock counts the time this kernel was down. From here on a clock counts that nobody sets, and that goes on while
    # the machine is suspended; it bounds the wait where somebody set the wall clock back meanwhile.
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
