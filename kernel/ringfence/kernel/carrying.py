"""How many bytes a call carries: counted only for agents that a limit of them holds, reserved before it runs.

A call carries its arguments and its answer. Reserved are the arguments and the largest answer that it can have, or what is left
where it can do with less; what that is lowered to holds for the body, and for what the agent gets.

INVARIANT: no answer is given out that was not reserved.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final

from ringfence.kernel.pool_words import waiting_text
from ringfence.syscalls.errors import BudgetExhausted
from ringfence.syscalls.payload import SMALL, Room, content_bytes

if TYPE_CHECKING:
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.flight_state import FlightState
    from ringfence.kernel.pools import Pools
    from ringfence.kernel.thread import Thread

PATIENCE_S: Final = 5.0
"""How long a call that could do with what is left waits for calls under way, which mostly use less than they hold."""


def counted(thread: Thread) -> bool:
    """Whether anything limits the bytes of an agent's calls."""
    return thread.budgets.metered or (thread.pools is not None and thread.pools.metered)


def arguments_of(flight: Flight) -> int:
    """Bytes of a call's arguments, with what was taken out of them."""
    aside = flight.row.body.aside(flight, flight.arguments) if flight.row.takes_out else 0
    return content_bytes(flight.arguments, len(flight.canonical)) + aside


def room_of(flight: Flight) -> Room:
    """How large the answer of a planned call may be."""
    room = getattr(flight.row.body, "room", None)
    return SMALL if room is None else room(flight, flight.arguments)


async def weigh(flight: Flight) -> None:
    """Find out what to reserve, and wait where calls under way hold what is lacking. Suspends only to wait."""
    if "bytes" in flight.reserved:
        return
    flight.carried = arguments_of(flight)
    room, budgets = room_of(flight), flight.thread.budgets
    least = flight.carried + room.least
    # What a pool could not give is not asked of it again.
    most = min(flight.carried + room.most, flight.load or math.inf)
    flight.least = least
    until = time.monotonic() + (PATIENCE_S if budgets.left("bytes") >= least else flight.deadline_s)
    while True:
        left = budgets.left("bytes")
        hopeless = budgets.left("bytes", when_settled=True) < least
        span = until - time.monotonic()
        if left >= most or hopeless or span <= 0 or left == budgets.left("bytes", when_settled=True):
            flight.load = int(max(least, min(most, left)))
            return
        try:
            async with asyncio.timeout(min(span, flight.deadline_s)):
                await budgets.freed.wait()
        except TimeoutError:
            until = 0.0


def lowered(flight: Flight, error: BudgetExhausted) -> bool:
    """Ask a pool that has too few bytes for what it has left, at last for what the call can't do without. False: it did."""
    if error.metadata.get("budget") != "bytes" or "pool" not in error.metadata:
        return False
    if flight.load <= flight.least:
        return False
    flight.load = max(flight.least, min(int(float(error.metadata["left"])), flight.load - 1))
    return True


async def afford(flight: FlightState, pools: Pools, size: int) -> None:
    """See to it that an answer of so many bytes is reserved.

    Raises:
        BudgetExhausted: there is not so much left.
        JournalUnavailable: the database, which knows the pools, is away.
    """
    lacking = flight.carried + size - flight.reserved["bytes"]
    if lacking <= 0:
        return
    member = flight.thread.pools
    if member is not None and flight.thread.budgets.fits("bytes", lacking):
        try:
            await pools.ensure(member, {"bytes": lacking}, deadline_s=0.0, patient=False)
        except BudgetExhausted as error:
            facts = error.metadata
            member.asked = float(facts["asked"])
            small = flight.carried + size > float(facts["limit"])
            flight.spent = "" if small else waiting_text("bytes", facts["pool"], facts["reset"])
            raise
    flight.reserve_more("bytes", lacking)
