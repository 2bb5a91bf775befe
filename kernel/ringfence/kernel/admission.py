"""Whether a call may run, under which rights, and what it takes for that: a turn of its rates, totals, uses of grants.

INVARIANT: a call uses up a limited grant once, however often it is decided again; what was not run gives its totals back.
"""

from __future__ import annotations

import asyncio
import time

from ringfence.kernel.core import Core
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import EpochMoved
from ringfence.kernel.replay import Unfinished
from ringfence.kernel.settled import reserved_amounts, used_grants
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Effect, NeedsApproval, Recovery

WITH_DESTRUCTION = ("calls", "destructive")
WITHOUT = ("calls",)


class Admission:
    """Decides and admits calls."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def decide(self, flight: Flight) -> None:
        """Put what the plan asks to policy.

        Raises:
            Denied: a rule denies it, or nothing allows it.
            NeedsApproval: a rule asks, and nobody has approved it yet.
        """
        rights = await flight.thread.current_rights()
        judgement = await flight.weigh(rights, flight.plan.questions)
        flight.decided(rights, judgement)
        if judgement.verdict is Verdict.DENY:
            raise flight.denial(judgement)
        if not flight.permits(judgement):
            raise NeedsApproval

    async def decide_again(self, flight: Flight, moved: EpochMoved) -> None:
        """The epoch moved between decision and commit: the call is judged under the policy in force.

        Raises:
            Revoked: it does not allow it any more.
        """
        await flight.look_again(await flight.thread.refresh(moved.epoch))

    @staticmethod
    def reserve(flight: Flight) -> None:
        """Reserve from the totals; `flight.give_back` undoes it."""
        for name in WITH_DESTRUCTION if flight.effect is Effect.DESTROY else WITHOUT:
            flight.reserve(name)
        for name, amount in flight.plan.reserve.items():
            flight.reserve(name, amount)

    @staticmethod
    async def make_room(flight: Flight) -> None:
        """Hold the prompt against its window, and wait where only calls under way are in the way of a total.

        An agent that would be parked waits for them first: most settle for less than they reserved.

        Raises:
            QuotaExceeded: the prompt is too long, and can't be made to fit.
        """
        if flight.row.measures:
            await flight.measure()
        budgets, wanted = flight.thread.budgets, flight.plan.reserve
        if flight.thread.manifest.budgets.on_exhausted != "park":
            return
        while True:
            asked = {n: a for n, a in wanted.items() if n not in flight.reserved and not budgets.fits(n, a)}
            if not asked or not all(budgets.fits(n, a, when_settled=True) for n, a in asked.items()):
                return
            try:
                async with asyncio.timeout(flight.deadline_s):
                    await budgets.freed.wait()
            except TimeoutError:
                return

    @staticmethod
    async def wait(flight: Flight, seconds: float) -> None:
        """Wait for a rate; the agent is `waiting` meanwhile, unless somebody says something else about it."""
        budgets, action = flight.thread.budgets, flight.row.action
        while seconds > 0:
            until_us = time.time_ns() // 1000 + int(seconds * 1e6)
            async with flight.waiting("rate", f"rate {budgets.slowest(action)}", until_us):
                try:
                    async with asyncio.timeout(seconds):
                        await budgets.relimited.wait()
                except TimeoutError:
                    return
            # The limits are others now, so the turn is taken anew.
            seconds = budgets.rate_wait(action, flight.deadline_s)

    @staticmethod
    def resume(flight: Flight, unfinished: Unfinished) -> None:
        """Go on under the intent of a dead kernel: what it had taken for the call is not taken again."""
        intent = unfinished.intent
        flight.again, flight.progress = True, unfinished.progress
        flight.effect_id = intent.effect_id
        flight.used = used_grants(intent)
        destroys = intent.effect == Effect.DESTROY.name
        flight.reserved = dict.fromkeys(WITH_DESTRUCTION if destroys else WITHOUT, 1.0)
        flight.reserved |= reserved_amounts(intent)
        flight.rerun = flight.row.recovery is Recovery.KEYED and not destroys
