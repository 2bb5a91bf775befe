"""Parking for a spent total: the refused call is not answered, and nothing that the program asks for after it runs.

The program is ended first (`Processes`). When an operator has raised the limit it goes on by replay, and what was refused
or held is decided afresh.

INVARIANT: from the moment at which a call is refused and its agent is to be parked, no other call of that start begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import msgspec
from ringfence.kernel.launch import room_again
from ringfence.kernel.settled import Answer
from ringfence.syscalls.errors import BudgetExhausted, Fenced, SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.processes import Processes
    from ringfence.kernel.thread import Thread


DIVERGENCE: Final = "a divergence"
"""What an agent waits for whose program made another call than its journal has."""
TOLD_BYTES_MAX: Final = 16 << 10
"""Most bytes of that call's arguments that are kept for the operator."""


def parks(flight: Flight, error: SyscallError) -> str:
    """What the agent of a failed call is to be parked for; empty: its program hears of it."""
    wanted = flight.thread.manifest.budgets.on_exhausted == "park"
    return flight.spent if wanted and isinstance(error, BudgetExhausted) else ""


async def held(thread: Thread) -> bool:
    """Hold a new call while it is decided whether its agent is parked. True: it is, so the call is not to run."""
    while (decided := thread.parking) is not None:
        if await asyncio.shield(decided):
            return True
    return False


def unanswered() -> Answer:
    """The answer of a call that was held: nobody is told."""
    text = "the agent is parked; nothing was done, and the call is made again when it goes on"
    return Answer(step=0, failure=Fenced(text), withheld=True)


async def park(flight: Flight, why: str, fail: Callable[[], Awaitable[Answer]]) -> Answer:
    """Record a refusal for which the agent is parked, and hold its other calls from here on.

    Args:
        flight: what was refused.
        why: what the agent waits for.
        fail: records it.

    Returns:
        An answer that is withheld; what `fail` answered where the refusal could not be recorded, so that nobody is parked.
    """
    thread = flight.thread
    present = flight.generation == thread.generation
    # A call whose intent or approval is recorded has to be recorded to its end.
    bare = not flight.intent_written and flight.approval is None
    if present and bare and await held(thread):
        # Another lane was first, and one refusal is enough.
        flight.give_back()
        thread.consumed_effects.discard(flight.effect_id)
        return unanswered()
    decided: asyncio.Future[bool] | None = None
    if present and thread.parking is None:
        decided = thread.parking = asyncio.get_running_loop().create_future()
    refused = False
    try:
        answer = await fail()
        refused = answer.step != 0 and isinstance(answer.failure, BudgetExhausted)
    finally:
        if decided is not None:
            if not refused and thread.parking is decided:
                thread.parking = None
            decided.set_result(refused)
    return msgspec.structs.replace(answer, park=why, withheld=True) if refused else answer


def parker(
    processes: Processes, thread: Thread, spawn: Callable[[Coroutine[Any, Any, None]], object]
) -> Callable[[Thread, Answer], Coroutine[Any, Any, None]]:
    """What parks the agent for a call of this start; one of an earlier start comes too late."""
    asked_by = (thread.generation, thread.branch)

    async def park(thread: Thread, answer: Answer) -> None:
        spawn(_park(processes, thread, answer, asked_by))

    return park


async def _park(processes: Processes, thread: Thread, answer: Answer, asked_by: tuple[int, int]) -> None:
    # The program ends before it can tell anyone: what it was told is kept for the operator.
    error = "" if answer.failure is None else answer.failure.message
    async with thread.operation:
        if (thread.generation, thread.branch) != asked_by or thread.state == "killed":
            return  # an operator was faster: it is ended, rolled back or started again
        await processes.end_program(thread)
        if room_again(thread, answer):
            await processes.start_or_fail(thread)
            return
        await processes.settle(thread, "parked", waiting_for=answer.park, error=error)
