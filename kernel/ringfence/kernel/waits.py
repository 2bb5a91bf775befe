"""What an agent waits for, and what that makes of its state.

A call that waits says so (`Flight.waiting`). When every call in flight waits, and no other lane of the program works, the
agent is shown as `parked` (for a person), `sleeping` (for time, a message or a task elsewhere) or `waiting` (for a rate).

INVARIANT: a state that somebody else set, as `paused`, `killed` or `unknown`, is never overwritten here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from ringfence.syscalls.base import WaitKind

if TYPE_CHECKING:
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.thread import Thread

STATE_OF: Final[dict[WaitKind, str]] = {
    "approval": "parked",
    "budget": "parked",
    "timer": "sleeping",
    "message": "sleeping",
    "task": "sleeping",
    "rate": "waiting",
    "credential": "waiting",
}
CREDENTIAL: Final = "credential of "
"""How the text of a wait for a secret of a resource begins; the resource's name follows."""

_FIRST: Final = ("parked", "sleeping", "waiting")
_announcing: set[asyncio.Task[None]] = set()


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One call's wait.

    Attributes:
        kind: what for.
        text: the same for people, as `waiting_for` shows it.
        until_us: when it ends by itself, wall clock in microseconds since the epoch; None: it doesn't.
    """

    kind: WaitKind
    text: str
    until_us: int | None = None


@asynccontextmanager
async def waiting(
    flight: Flight, kind: WaitKind, text: str, until_us: int | None = None
) -> AsyncGenerator[None]:
    """Say that a call waits, for as long as the block is entered. Blocks of one call may be nested: the inner one counts."""
    thread, step = flight.thread, flight.step
    outer = thread.waits.get(step)
    wait = thread.waits[step] = Wait(kind=kind, text=text, until_us=until_us)
    show(thread)
    for told in thread.hear_waits:
        told(flight, wait)
    try:
        yield
    finally:
        if outer is None:
            thread.waits.pop(step, None)
        else:
            thread.waits[step] = outer
        show(thread, over=True)


def blocked(thread: Thread) -> bool:
    """Whether every call in flight waits, and every lane that the program reported has one."""
    waits = len(thread.waits)
    return waits > 0 and waits >= len(thread.flights) and waits >= thread.live_lanes


def foremost(thread: Thread) -> Wait:
    """The wait that the agent's state is about: a person's before a timer's, then the one that ends first."""

    def order(wait: Wait) -> tuple[bool, int, bool, int]:
        first = _FIRST.index(STATE_OF[wait.kind])
        return wait.kind != "credential", first, wait.until_us is None, wait.until_us or 0

    return min(thread.waits.values(), key=order)


def wake_at_us(thread: Thread) -> int | None:
    """When the first wait ends by itself; None where none does."""
    return min((w.until_us for w in thread.waits.values() if w.until_us is not None), default=None)


def show(thread: Thread, *, over: bool = False) -> None:
    """Bring the agent's state in line with its waits.

    Args:
        thread: whose waits, calls or lanes have changed.
        over: a wait has ended, or a call that had waited.
    """
    rests = blocked(thread)
    if not thread.asleep:
        _show_state(thread, rests)
    if thread.on_rest is not None and (over or not thread.asleep):
        # Of an agent that is asleep, calls may come up again one by one: only what ends wakes it.
        thread.on_rest(thread, rests)


def _show_state(thread: Thread, rests: bool) -> None:
    mine = bool(thread.shown) and (thread.state, thread.waiting_for) == thread.shown
    if thread.state != "running" and not mine:
        thread.shown = None
        return
    before = thread.state
    if rests:
        wait = foremost(thread)
        thread.state, thread.waiting_for = thread.shown = STATE_OF[wait.kind], wait.text
    elif mine:
        thread.state, thread.waiting_for, thread.shown = "running", "", None
    if thread.state != before and "parked" in (thread.state, before):
        task = asyncio.get_running_loop().create_task(thread.announce())
        _announcing.add(task)
        task.add_done_callback(_announcing.discard)
