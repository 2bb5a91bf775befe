"""The first half of a rollback: the agent is stopped, its state says that it goes back, and the intent is recorded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Final

from ringfence.kernel import descent
from ringfence.kernel.core import Core
from ringfence.kernel.journal.types import Entry, Phase, Row
from ringfence.kernel.problems import conflict
from ringfence.kernel.processes import Processes
from ringfence.kernel.replay import OPERATOR_LANE
from ringfence.kernel.revocation import cancel
from ringfence.kernel.rollback_cuts import Cut
from ringfence.kernel.thread import Thread
from ringfence.syscalls.errors import Killed

SETTLE_S: Final = 30.0
"""How long a call that has begun its effect may take to finish before a rollback is refused."""

UNDER_WAY: Final = "a rollback that is under way"
"""What an agent waits for from before the intent is recorded until it rests; why it can't go on now may follow."""


def goes_back(thread: Thread) -> bool:
    """Whether a rollback of it is under way, as far as its state says: nobody may start it then."""
    return thread.going_back or (thread.state == "paused" and thread.waiting_for.startswith(UNDER_WAY))


def refuse_moved(thread: Thread, cut: Cut) -> None:
    """Refuse a cut that was found on another branch.

    Raises:
        Problem: the agent was rolled back meanwhile.
    """
    if thread.branch != cut.seen:
        # The same number may be another step there, or none.
        raise conflict(f"`{thread.id}` was rolled back meanwhile; this one was not begun: look again")


class Beginning:
    """Begins rollbacks of this kernel's agents."""

    def __init__(self, core: Core, processes: Processes) -> None:
        self._core = core
        self._processes = processes

    async def still(self, thread: Thread, cut: Cut) -> list[dict[str, Any]]:
        """End the program and its calls; returns the approvals that are voided by it.

        Raises:
            Problem: a call is still under way.
        """
        await self._processes.end_program(thread)
        waited = await descent.waiting(self._core, thread)
        await self.end_calls(thread)
        await self._core.store.withdraw_approvals(thread.key, cut.step, "the agent was rolled back")
        return waited

    @staticmethod
    async def end_calls(thread: Thread) -> None:
        """Cancel what has not begun its effect and await the rest.

        Raises:
            Problem: a call is still under way.

        INVARIANT: nothing is planned while a call is under way: what it still changes would stay, unseen.
        """
        reason = Killed("the operator rolled the agent back")
        await asyncio.gather(*(cancel(f, reason, SETTLE_S) for f in list(thread.flights.values())))
        for step, flight in sorted(thread.flights.items()):
            raise conflict(
                f"step {step} of `{thread.id}`, {flight.row.action}, is still under way; its program is ended and nothing "
                "was changed: try again when the step is done"
            )

    async def refused(self, lived: Sequence[Thread]) -> None:
        """Say of agents whose program was ended for a rollback that was then refused that they wait for an operator."""
        # Of several it may not have come to all.
        for thread in [one for one in lived if one.program is None]:
            await self._processes.set_state(
                thread, "paused", waiting_for="an operator, after a refused rollback"
            )

    async def announce(self, thread: Thread) -> None:
        """Say in its state that the agent goes back, before the intent says so."""
        # No longer at its end: so a kernel that starts after a crash takes the agent over and finishes this.
        thread.going_back = True
        await self._processes.set_state(thread, "paused", waiting_for=UNDER_WAY)

    async def intent(
        self, thread: Thread, cut: Cut, path: str | None, operator: str, group: dict[str, Any] | None = None
    ) -> int:
        """Record that the agent goes back; returns the rollback's own step.

        Raises:
            JournalUnavailable: the database can't commit; nobody knows whether it is recorded.
            Fenced: another kernel owns the agent.
        """
        await self._core.failpoints.reach("rollback:before_intent", thread.id)
        step = thread.take_step()
        arguments: dict[str, Any] = {
            "cut": cut.step,
            "parent": cut.parent,
            "path": path,
            "operator": operator,
        }
        if group is not None:
            arguments["group"] = group
        row = Row(
            chain=thread.key,
            phase=Phase.INTENT,
            step=step,
            branch=thread.branch,
            lane=OPERATOR_LANE,
            action="rollback",
            resource=f"step {cut.step}",
            effect="WRITE",
            verdict="allow",
            started_us=time.time_ns() // 1000,
            body=json.dumps({"arguments": arguments}).encode(),
        )
        await self._core.append(Entry(row=row))
        await self._core.failpoints.reach("rollback:after_intent", thread.id)
        return step
