"""Whether a call may run, under which rights, and what it takes for that: a turn of its rates, totals, uses of grants.

INVARIANT: a call uses up a limited grant once, however often it is decided again; what was not run gives its totals back.
"""

from __future__ import annotations

import asyncio
import time

from ringfence.kernel.carrying import PATIENCE_S, arguments_of, counted, lowered, weigh
from ringfence.kernel.core import Core
from ringfence.kernel.flight import Flight
from ringfence.kernel.journal.types import EpochMoved
from ringfence.kernel.outcomes import kept_as
from ringfence.kernel.pool_shares import Member
from ringfence.kernel.pool_words import waiting_text
from ringfence.kernel.replay import Unfinished
from ringfence.kernel.settled import reserved_amounts, used_grants
from ringfence.kernel.waits import CREDENTIAL
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Effect, NeedsApproval, Recovery
from ringfence.syscalls.errors import BudgetExhausted, NoSuchResource, SyscallError
from ringfence.syscalls.sleep import moved

WITH_DESTRUCTION = ("calls", "destructive")
WITHOUT = ("calls",)
MAY_DESTROY = frozenset({"exec.run", "workspace.commit"})
"""Actions that are known to destroy something only when they have run."""
LOOK_S = 0.5
"""How often a call that lacks a secret looks whether it was set."""


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
        if judgement.verdict is not Verdict.DENY and flight.plan.foreseen:
            foreseen = await flight.weigh(rights, flight.plan.foreseen)
            if foreseen.verdict is Verdict.DENY:
                judgement = foreseen
                flight.decided(rights, judgement)
        if judgement.verdict is Verdict.DENY:
            raise flight.denial(judgement)
        if flight.parts:
            # INVARIANT: they are kept before a row that is more than a refusal points to them.
            await _keep_parts(flight)
        if not flight.permits(judgement):
            raise NeedsApproval

    async def decide_again(self, flight: Flight, newer: EpochMoved) -> None:
        """The epoch moved between decision and commit: the call is judged under the policy in force.

        Raises:
            Revoked: it does not allow it any more.
        """
        await flight.look_again(await flight.thread.refresh(newer.epoch))

    @staticmethod
    def reserve(flight: Flight) -> None:
        """Reserve from the totals; `flight.give_back` undoes it."""
        for name in WITH_DESTRUCTION if flight.effect is Effect.DESTROY else WITHOUT:
            flight.reserve(name)
        for name, amount in flight.plan.reserve.items():
            flight.reserve(name, amount)
        if flight.load:
            flight.reserve("bytes", flight.load)

    async def load(self, flight: Flight) -> None:
        """Reserve the bytes of a call that has waited for what it carries.

        Raises:
            BudgetExhausted: there are not so many left.
            JournalUnavailable: the database, which knows the pools, is away.
        """
        if counted(flight.thread) and "bytes" not in flight.reserved:
            await self.fund(flight, waited=True)
            flight.reserve("bytes", flight.load)

    async def fund(self, flight: Flight, *, waited: bool = False) -> None:
        """See to it that `reserve` finds what it needs.

        Args:
            flight: which call.
            waited: whether one that waits for what it carries has come to that.

        Raises:
            QuotaExceeded: the prompt is too long.
            BudgetExhausted: a pool of many agents has not enough.
            JournalUnavailable: the database, which knows the pools, is away.
        """
        while True:
            if flight.plan.reserve:
                await self.make_room(flight)
            if (waited or not flight.row.waits) and counted(flight.thread):
                await weigh(flight)
            if flight.thread.pools is None or not await self._draw(flight, flight.thread.pools):
                return

    async def _draw(self, flight: Flight, member: Member) -> bool:
        """Have the shares of pools cover a call. Returns whether that took time."""
        pools, waited = self._core.pools, False
        patient = flight.thread.manifest.budgets.on_exhausted == "park"
        if flight.row.action in MAY_DESTROY and not flight.ahead and "destructive" not in flight.reserved:
            try:
                waited = await pools.ensure(member, {"destructive": 1.0}, deadline_s=0.0, patient=False)
                flight.ahead, flight.lacks = member.draw("destructive"), None
            except BudgetExhausted as error:
                flight.lacks = error
        each = WITH_DESTRUCTION if flight.effect is Effect.DESTROY else WITHOUT
        needs: dict[str, float] = {**dict.fromkeys(each, 1.0), **flight.plan.reserve}
        if flight.load:
            needs["bytes"] = flight.load
        wanted = {name: amount for name, amount in needs.items() if name not in flight.reserved}
        eager = flight.load > flight.least and "bytes" in wanted
        span = min(flight.deadline_s, PATIENCE_S) if eager else flight.deadline_s
        try:
            return await pools.ensure(member, wanted, deadline_s=span, patient=patient or eager) or waited
        except BudgetExhausted as error:
            if lowered(flight, error):
                return True
            facts = error.metadata
            member.asked = float(facts["asked"])
            small = member.asked > float(facts["limit"]) and float(facts["left"]) > 0
            # A call that asks for more than the whole pool has to ask for less: nobody is parked for it.
            flight.spent = "" if small else waiting_text(facts["budget"], facts["pool"], facts["reset"])
            raise

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
    async def plan(flight: Flight) -> None:
        """Plan it. Of an agent that works on tasks of others, a call that lacks an operator's secret waits for that.

        Raises:
            NoSuchResource: a resource is not there, or its secret was not set for as long as an approval may take.
        """
        thread, ends = flight.thread, time.monotonic() + flight.thread.manifest.approvals.expire_s
        family = flight.row.action.partition(".")[0]
        while True:
            try:
                return flight.make_plan()
            except NoSuchResource as error:
                lacks, left = error.metadata.get("unavailable", ""), ends - time.monotonic()
                # Nobody is told of a secret for the sake of what no rule allows.
                waits = lacks and thread.manifest.serve is not None and thread.environment.may_any(family)
                if not waits or left <= 0:
                    raise
            until_us = time.time_ns() // 1000 + int(left * 1e6)
            async with flight.waiting("credential", f"{CREDENTIAL}{lacks}", until_us):
                await _available(flight, lacks, left)

    @staticmethod
    async def wait(flight: Flight, seconds: float) -> None:
        """Wait for a rate; the agent is `waiting` meanwhile, unless somebody says something else about it."""
        budgets, action = flight.thread.budgets, flight.rated
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
        by_us = flight.thread.moved_us.get(intent.step, 0)
        if by_us and flight.progress is not None:
            flight.progress = moved(flight.progress, by_us)
        flight.effect_id = intent.effect_id
        flight.used = used_grants(intent)
        destroys = intent.effect == Effect.DESTROY.name
        flight.reserved = dict.fromkeys(WITH_DESTRUCTION if destroys else WITHOUT, 1.0)
        flight.reserved |= reserved_amounts(intent)
        if "bytes" in flight.reserved:
            flight.carried = arguments_of(flight)
        if flight.thread.pools is not None:
            flight.drawn = flight.thread.pools.attach(flight.reserved)
        flight.rerun = flight.row.recovery is Recovery.KEYED


async def _keep_parts(flight: Flight) -> None:
    """Make artifacts of what was taken out of the arguments.

    Raises:
        CallFailed: it can't be kept.
    """
    for name, part in list(flight.parts.items()):
        await flight.env.artifacts.keep_page(part.data, kept_as(name, part), flight.step)
        flight.parts.pop(name, None)


async def _available(flight: Flight, resource: str, within_s: float) -> None:
    """Wait until a call can be planned, or lacks something else; then it is planned by whoever asked."""
    ends = time.monotonic() + within_s
    while (left := ends - time.monotonic()) > 0:
        await asyncio.sleep(min(LOOK_S, left))
        try:
            flight.row.body.plan(flight.arguments, flight.thread.environment)
        except NoSuchResource as error:
            if error.metadata.get("unavailable") == resource:
                continue
        except SyscallError:
            pass  # it is told when it is planned
        return
