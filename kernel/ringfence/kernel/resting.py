"""What an agent without a process keeps in memory: little more than what its row says.

Its rights and its environment are folded: what they are made from stays, and they are made again as soon as anybody asks.
Calls that only wait for a time or for a message are let go: they end without an outcome, as those of a dead kernel do, and
the program makes them again when it is started. A timer or its mailbox wakes it.

INVARIANT: what is let go has begun no effect, holds nothing but totals that its intent has on record, and is judged as if it
were under way: whoever takes its right away hears of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from ringfence.kernel.thread import FINAL_STATES
from ringfence.kernel.weighing import known_at_once
from ringfence.policy.types import Verdict
from ringfence.sandbox.shared_points import SharedSnapshots
from ringfence.syscalls.base import Effect, Question, WaitKind

if TYPE_CHECKING:
    from ringfence.kernel.environment import AgentEnvironment
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.rights import Given, Rights
    from ringfence.kernel.thread import Thread
    from ringfence.sandbox.usage import Usage
    from ringfence.sandbox.workspace import Workspace

RESTING: Final = FINAL_STATES | {"sleeping", "parked", "paused"}
"""States of agents without a process for whom nothing is done as long as nobody asks."""
RECEIVE: Final = "messages.receive"


# -- calls ------------------------------------------------------------------------------------------------------------


class LetGo(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits and that nobody keeps.

    Attributes:
        questions: what it asks policy.
    """

    step: int
    kind: WaitKind
    action: str
    resource: str
    effect: Effect
    questions: tuple[Question, ...]


def let_go(thread: Thread) -> list[Flight] | None:
    """Cancel all calls of an agent that is asleep, so that they end without an outcome.

    Returns:
        The calls; None where one of them has to be kept, so that nothing was done.
    """
    flights = list(thread.flights.values())
    if not flights or thread.pools is not None or not all(_may_go(flight) for flight in flights):
        return None
    thread.let_go = tuple(
        LetGo(
            step=flight.step,
            kind=thread.waits[flight.step].kind,
            action=flight.row.action,
            resource=flight.plan.resource,
            effect=flight.effect,
            questions=tuple(flight.questions),
        )
        for flight in flights
    )
    for flight in flights:
        flight.let_go = True
        if flight.intent_written:
            # As of a dead kernel's, what its intent reserved stays taken until it has an outcome.
            thread.unsettled.add((flight.lane, flight.lane_step))
        else:
            flight.give_back()
        if flight.task is not None:
            flight.task.cancel()
    return flights


def _may_go(flight: Flight) -> bool:
    """Whether a call is the same when it is made anew later."""
    wait = flight.thread.waits.get(flight.step)
    if wait is None or flight.ending or flight.approval is not None or flight.fate is not None:
        return False
    if wait.kind == "timer":
        return flight.intent_written and flight.progress is not None
    # One that waits for some time only is measured from its beginning.
    return (
        wait.kind == "message"
        and flight.row.action == RECEIVE
        and wait.until_us is None
        and not flight.used
        and not flight.env.mailbox.stirred
    )


def waits_for(thread: Thread, kind: WaitKind) -> bool:
    """Whether a call that was let go waits for something."""
    return any(call.kind == kind for call in thread.let_go)


def clock_set(thread: Thread, by: timedelta) -> None:
    """The wall clock was set: lengths of time that wait on go on to be as long."""
    by_us = round(by / timedelta(microseconds=1))
    steps = [call.step for call in thread.let_go if call.kind == "timer"]
    # One that is kept counts by a steady clock; should it be let go later, what it has on record is as old.
    steps += [step for step, wait in thread.waits.items() if wait.kind == "timer"]
    if steps:
        moved = {step: thread.moved_us.get(step, 0) + by_us for step in steps}
        thread.moved_us = MappingProxyType({**thread.moved_us, **moved})


def clock_counted(thread: Thread, step: int) -> None:
    """A call recorded anew how long it waits: by the clock of now."""
    if step in thread.moved_us:
        thread.moved_us = MappingProxyType({s: by for s, by in thread.moved_us.items() if s != step})


def denied(thread: Thread, rights: Rights) -> list[dict[str, Any]]:
    """Calls that were let go and that rights no longer allow, as `revocation.apply_epoch` reports them.

    Their agent has to be woken: they are refused as soon as its program makes them again.
    """
    if thread.state in FINAL_STATES:
        return []
    return [
        {"step": call.step, "action": call.action, "resource": call.resource, "fate": "cancelled"}
        for call in thread.let_go
        if call.questions and rights.judge(call.questions, call.effect.name).verdict is Verdict.DENY
    ]


# -- rights and environment -------------------------------------------------------------------------------------------


class Remake(Protocol):
    """Makes an environment again: `Ownership.environment` with what is the agent's."""

    def __call__(self, *, rights: Rights, workspace: Workspace) -> AgentEnvironment:
        """The environment."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What an agent's rights and environment are made from.

    Attributes:
        rights: what they follow from.
        workspace: its descriptor says whether the directory is the one that it was.
        used: how much the workspace holds, where that is known, and `masks` what commands must not see of it.
        held: the environment of before, as long as anybody has it.
    """

    rights: Given
    workspace: Workspace
    used: Usage | None
    masks: set[str] | None
    remake: Remake
    held: Callable[[], AgentEnvironment | None]

    def under(self, rights: Rights) -> Folded:
        """The same under other rights."""
        return replace(self, rights=rights.given, masks=None)

    def unfold(self, thread: Thread) -> tuple[Rights, AgentEnvironment]:
        """Rights and environment."""
        rights = self.rights.make()
        environment = self.held()
        if environment is None:
            environment = self.remake(rights=rights, workspace=self.workspace)
            environment.carry_on(self.used, self.masks)
            belong(thread, environment)
        else:
            environment.rights_changed(rights)
        return rights, environment


def belong(thread: Thread, environment: AgentEnvironment) -> None:
    """Make an environment that of a thread."""
    environment.nursery.thread = thread
    environment.known = lambda: known_at_once(thread)


def fold(thread: Thread, *, mine: bool = False) -> None:
    """Fold rights and environment of an agent that rests; nothing where it does not, or where they hold what is nowhere else.

    Args:
        thread: whose.
        mine: whether the caller holds `thread.operation`.
    """
    if thread.folded is not None or thread.program is not None or thread.flights:
        return
    if thread.operation.locked() and not mine:
        return
    if not (thread.asleep or thread.state in RESTING):
        return
    environment = thread.environment
    if environment.busy or environment.remake is None or environment.direct is not None:
        return
    if isinstance(environment.snapshots, SharedSnapshots):
        return
    thread.fold(
        Folded(
            rights=thread.rights.given,
            workspace=environment.workspace,
            used=environment.meter.known,
            masks=environment.masks,
            remake=environment.remake,
            held=weakref.ref(environment),
        )
    )
