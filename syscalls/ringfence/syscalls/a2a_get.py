"""`a2a.get`: read a task that a declared agent elsewhere was given, or wait for it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import msgspec
from ringfence.syscalls import a2a_common as common
from ringfence.syscalls.a2a_common import RESTS, Result
from ringfence.syscalls.errors import CallFailed, InvalidRequest

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env, Plan

__all__ = ["Arguments", "Result", "plan", "room", "run"]

room = common.room

WAIT_MS_MAX: Final = 24 * 3600 * 1000
"""Longest wait of one call."""

_FIRST_S: Final = 0.25
_GROWS: Final = 1.5
_LAST_S: Final = 10.0
_AGAIN: Final = frozenset({"no", "maybe"})


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whose task, which, and how long to wait."""

    peer: str = ""
    task: str = ""
    wait_ms: int = 0


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the agent.

    Raises:
        InvalidRequest: no id of a task, or no time to wait.
        NoSuchResource: no such agent, or it is unavailable.
    """
    if not 0 <= arguments.wait_ms <= WAIT_MS_MAX:
        raise InvalidRequest(f"`wait_ms` is {arguments.wait_ms}; it has to lie between 0 and {WAIT_MS_MAX}")
    return common.about_task("a2a.get", arguments.peer, arguments.task, env)


async def run(call: Call, arguments: Arguments) -> Result:
    """Ask now and then, each time on a connection of its own, until the task rests or the time is over.

    Raises:
        CallFailed: it has no such task, or can't be reached when the time is over.
    """
    peer = call.plan.data.resource.name
    card = await call.env.cards.taken(peer)
    if not arguments.wait_ms:
        return await _ask(call, card.taken, arguments.task)
    ends_us = await until_us(call, arguments)
    # Said to be waiting, it stands in nobody's way: who pauses, stops or kills does not wait for it, and its program need not live.
    async with call.waiting("task", f"the task {arguments.task} of {peer}", ends_us):
        return await _wait(call, card.taken, arguments.task, ends_us)


async def until_us(call: Call, arguments: Arguments) -> int:
    """When the wait ends, wall clock in microseconds since the epoch: the same for who goes on with it after a crash."""
    now_us = time.time_ns() // 1000
    if call.progress is None:
        ends_us = now_us + arguments.wait_ms * 1000
        await call.record(msgspec.json.encode({"until_us": ends_us}))
        return ends_us
    # A clock that was put back meanwhile makes it no longer than it was.
    return min(msgspec.json.decode(call.progress)["until_us"], now_us + arguments.wait_ms * 1000)


async def _wait(call: Call, card: bytes, task: str, ends_us: int) -> Result:
    ends = time.monotonic() + max(0, ends_us - time.time_ns() // 1000) / 1_000_000
    pause = _FIRST_S
    while True:
        left = ends - time.monotonic()
        try:
            found = await _ask(call, card, task)
        except CallFailed as error:
            # It only reads: while there is time, one that is away is asked again.
            if left <= 0 or error.metadata.get("sent") not in _AGAIN:
                raise
        else:
            if left <= 0 or found.state in RESTS:
                return found
        await asyncio.sleep(max(0.0, min(pause, ends - time.monotonic())))
        pause = min(pause * _GROWS, _LAST_S)


async def _ask(call: Call, card: bytes, task: str) -> Result:
    # It changes nothing, so it never counts as begun: whoever kills or revokes cancels it, wherever it stands.
    return await common.exchange(call, card, lambda peer: peer.get(task), before=_nothing)


async def _nothing() -> None:
    """Nothing is looked at once more: a call that has lost its right is cancelled, and its answer withheld."""
