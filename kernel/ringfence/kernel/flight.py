"""One call in flight, as its body sees it (the `Call` protocol), with all that its journal rows need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ringfence.kernel.asking import PROGRAM, Asked, storable
from ringfence.kernel.divergence import strayed
from ringfence.kernel.flight_state import FlightState
from ringfence.kernel.journal.types import ApprovalRecord, Entry, EpochMoved, Phase
from ringfence.kernel.pointing import hold_to_approvals
from ringfence.kernel.resting import clock_counted
from ringfence.kernel.rights import DOUBTFUL, STRAYED, asked_anyway
from ringfence.kernel.waits import waiting
from ringfence.kernel.weighing import Rows, facts_for
from ringfence.policy.conditions import Created
from ringfence.policy.types import Verdict
from ringfence.syscalls.approving import Confirmed
from ringfence.syscalls.base import Effect, NeedsApproval, Plan, Question, WaitKind, Window
from ringfence.syscalls.codec import decode_arguments
from ringfence.syscalls.errors import Denied, Fenced, Revoked, Stale, SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.environment import AgentEnvironment
    from ringfence.kernel.rights import Judgement, Rights
    from ringfence.policy.conditions import Condition
    from ringfence.policy.facts import Facts
    from ringfence.syscalls.hearing import Hearing
    from ringfence.syscalls.sql_target.records import Touched


def _asks_what_it_made(item: Condition) -> bool:
    return any(isinstance(test, Created) for test in item.tests)


NO_USES_LEFT = -1
"""What the store answers for a grant that gives no right any more."""


class Flight(FlightState, eq=False):
    """A call from its acceptance to its outcome."""

    # -- the Call protocol ----------------------------------------------------------------------------------------

    @property
    def env(self) -> AgentEnvironment:
        """What the kernel lends."""
        return self.thread.environment

    @property
    def deadline_s(self) -> float:
        """Seconds that the body may still take."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def age_s(self) -> float:
        """Seconds since this kernel took the call."""
        return time.monotonic() - self.began

    @property
    def hearing(self) -> Hearing | None:
        """Who hears what it brings before it is recorded."""
        return self.thread.doors.parts.get((self.lane, self.lane_step))

    async def judge(self, questions: Sequence[Question]) -> Sequence[Verdict]:
        """Ask policy about more than the plan knew, in order; records the rules."""
        return [judgement.verdict for judgement in await self._judgements(questions)]

    async def _judgements(self, questions: Sequence[Question]) -> list[Judgement]:
        rights = self.thread.rights
        found: list[Judgement] = []
        facts = await self._facts(rights, questions)
        for nr, question in enumerate(questions):
            known = None if facts is None else (facts[nr],)
            judgement = rights.judge((question,), self.effect.name, self.used, known)
            self.questions.append(question)
            self.extra_rules.extend(r for r in judgement.decision.rules if r not in self.extra_rules)
            self.extra_grants.extend(g for g in judgement.grants if g not in self.extra_grants)
            found.append(judgement)
        return found

    async def require(self, questions: Sequence[Question]) -> None:
        """Judge, and raise `Denied` naming the first refusal.

        Raises:
            NeedsApproval: nothing is refused, and something asks: the body is made again when a person has approved.
        """
        asks = False
        for judgement in await self._judgements(questions):
            if judgement.verdict is Verdict.ALLOW:
                continue
            if judgement.verdict is Verdict.DENY:
                raise self.denial(judgement)
            asks = asks or not self.permits(judgement)
        if asks:
            raise NeedsApproval

    async def confirm(
        self, questions: Sequence[Question], *, question: str = "", detail: Mapping[str, Any] | None = None
    ) -> Confirmed:
        """Judge, and wait here for a person where something asks, or where the program does."""
        self.questions.extend(q for q in questions if q not in self.questions)
        asked = Asked(question=storable(question), detail=detail or {})
        record = await self.core.approvals.park(self, asked)
        if record is None:
            return Confirmed()
        return Confirmed(by=record.decided_by or "", answer=record.reason)

    async def record(self, progress: bytes) -> None:
        """Make progress durable in the journal before an effect counts."""
        while True:
            row = self.journal_row(Phase.PROGRESS)
            row.body = progress
            try:
                await self.core.append(Entry(row=row, epoch=self.epoch))
            except EpochMoved as moved:
                await self.look_again(await self.thread.refresh(moved.epoch))
            else:
                self.progress = progress
                clock_counted(self.thread, self.step)
                return

    def add_point(self, covers: Sequence[str], kind: str, size_bytes: int) -> None:
        """Declare that a verified rollback point named after this step is durable."""
        self.point = {
            "id": f"p{self.step}",
            "kind": kind,
            "covers": list(covers),
            "size_bytes": size_bytes,
            "verified": True,
        }

    def raise_effect(self, effect: Effect) -> None:
        """Raise the effect found while running; checks the `destructive` budget."""
        if effect.value > self.effect.value:
            if effect is Effect.DESTROY:
                self.reserve("destructive")
            self.effect = effect

    def waiting(
        self, kind: WaitKind, text: str, until_us: int | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Say that this call waits while the block is entered."""
        return waiting(self, kind, text, until_us)

    async def failpoint(self, name: str) -> None:
        """A named place where fault tests kill the kernel."""
        if self.core.failpoints.enabled:
            await self.core.failpoints.reach(f"{self.row.action}:{name}", self.thread.id)

    async def check_live(self) -> None:
        """Look at the policy epoch and the lease once more, right before an effect."""
        lapsed = self.core.lease.expired
        # After an outage the lease may only be overdue; renewing it reads the epochs again.
        if self.thread.fenced or (lapsed and not await self.core.keep_lease()):
            raise Fenced(
                f"another kernel may own `{self.thread.id}` now; nothing was done, and it is made again where the agent runs on"
            )
        if self.fate is not None:
            raise self.fate
        if self.rows.later:
            # INVARIANT: what was put off until the rows are known is never let through without them.
            self.rows = Rows()
        rights = await self.thread.current_rights()
        # Facts may have become others since it was decided: what it rests on is looked at once more.
        looked = not rights.conditions_on(self.questions)
        while rights is not self.rights or self.owes_uses or not looked:
            await self.look_again(rights)
            looked = True
            rights = await self.thread.current_rights()
        if lapsed and self.core.lease.expired:
            raise Fenced(
                f"the lease over `{self.thread.id}` ran out again; nothing was done, make the call again"
            )
        # INVARIANT: nothing between here and the effect may suspend, or a revocation could slip in between.
        self.effect_started = True

    # -- approvals ------------------------------------------------------------------------------------------------

    def permits(self, judgement: Judgement) -> bool:
        """Whether the call may run: everything is allowed, or a person has approved all that asks."""
        if judgement.verdict is Verdict.ALLOW:
            return True
        return judgement.verdict is Verdict.ASK and judgement.asking <= self.approved

    async def judge_again(self) -> Judgement:
        """Put everything this call asked so far to the rights in force."""
        rights = await self.thread.current_rights()
        judgement = await self.weigh(rights, self.questions)
        self.decided(rights, judgement)
        return judgement

    def asks(self, judgement: Judgement, asked: Asked | None) -> frozenset[tuple[Any, ...]]:
        """What still asks for a person: rules, and the program itself."""
        own: frozenset[tuple[Any, ...]] = frozenset()
        if asked is not None and asked.question:
            own = frozenset({(PROGRAM, self.row.action, asked.question)})
        return (judgement.asking | own) - self.approved

    def approve(self, asks: frozenset[tuple[Any, ...]], record: ApprovalRecord) -> None:
        """Take over what a person approved."""
        self.approved |= asks
        self.approval, self.waits_for = record, None
        # The time that a person took is not the call's.
        self.deadline = time.monotonic() + self.span_s

    async def _still_approved(self) -> None:
        """Forget an approval of longer than once that was taken back meanwhile."""
        record = self.approval
        if record is None or record.good_until is None or record.step == self.step:
            return
        now = await self.core.store.approval(record.key)
        if now is None or now.good_until is None or now.good_until <= datetime.now(UTC):
            self.approved, self.approval = frozenset(), None

    def replace_arguments(self, raw: bytes) -> None:
        """Run with the arguments that an operator put in place of the agent's. The digest stays that of the agent's."""
        if raw == self.canonical:
            return
        self.arguments, self.canonical, _ = decode_arguments(self.row, raw)
        self.make_plan()

    def make_plan(self) -> None:
        """Plan the call: what it asks, and the effect it will have."""
        self.planned(self.row.body.plan(self.arguments, self.thread.environment))

    def planned(self, plan: Plan) -> None:
        """Take over what the call is about to do."""
        self.plan = plan
        self.questions = list(plan.questions)
        if plan.effect is not None:
            self.effect = plan.effect

    async def locate(self) -> None:
        """Plan the call again where what its arguments name had to be looked up."""
        plan = await self.row.body.locate(self.arguments, self.thread.environment)
        if plan is not None:
            self.planned(plan)

    async def measure(self) -> None:
        """Plan an allowed call again with what it takes, within what a model may be sent."""
        budgets = self.thread.budgets
        page = self.thread.manifest.budgets.context_on_overflow == "page"
        window = Window(max_tokens=budgets.context_max_tokens, page=page)
        self.plan = await self.row.body.measure(self, self.arguments, window)
        await hold_to_approvals(self)

    # -- rights and totals ----------------------------------------------------------------------------------------

    async def weigh(self, rights: Rights, questions: Sequence[Question]) -> Judgement:
        """Put questions to rights, with the facts that their conditions ask about.

        Raises:
            Unavailable: the database is away, which holds the facts.
        """
        facts = await self._facts(rights, questions)
        judgement = rights.judge(tuple(questions), self.effect.name, self.used, facts)
        # INVARIANT: what destroys and has no way back never runs by a rule alone.
        if self.plan.no_return and self.effect is Effect.DESTROY:
            judgement = asked_anyway(judgement, self.plan.no_return, self.plan.questions[0])
        if another_way := self._strayed():
            judgement = asked_anyway(judgement, another_way, self.plan.questions[0], STRAYED)
        doubt = self.plan.doubt
        if doubt is not None and (why := await doubt.why()):
            judgement = asked_anyway(judgement, why, self.plan.questions[0], DOUBTFUL, doubt.about)
        return judgement

    def _strayed(self) -> str:
        """Why what can't be made up for is asked: its program takes another way than it took before; empty: it doesn't."""
        if not self.plan.questions:
            return ""
        if self.waits_for is not None and any(ask[0] == STRAYED for ask in self.waits_for.asks):
            # What an earlier kernel asked about stays asked, whatever the program has come to since.
            return "the program took another way after a restart than before"
        lasting = self.effect in (Effect.DESTROY, Effect.EXTERNAL)
        return strayed(self.thread, self.lane) if lasting else ""

    async def _facts(self, rights: Rights, questions: Sequence[Question]) -> tuple[Facts, ...] | None:
        conditions = rights.conditions_on(questions)
        if not conditions:
            return None
        rows = self._rows(conditions)
        facts = await facts_for(self.core, self.thread, rights, questions, self.canonical, rows)
        fresh = [item for item in conditions if item.fresh_s is not None]
        reads = facts[0].reads or ()
        self.watched = self.thread.history.state_versions(
            read.resource for read in reads if any(item.concerns(read) for item in fresh)
        )
        return facts

    def _rows(self, conditions: Sequence[Condition]) -> Rows:
        """What is known of the rows that the call changes."""
        if self.rows.later and self.waits_for is not None:
            asked = {ask[0] for ask in self.waits_for.asks}
            if any(item.id in asked and _asks_what_it_made(item) for item in conditions):
                # An earlier kernel found that out, and asked: only the body can find out more.
                self.rows = Rows(made=False)
        return self.rows

    @property
    def asks_what_it_made(self) -> bool:
        """Whether a condition in force asks if the thread made what the call changes."""
        return self.rights is not None and any(
            _asks_what_it_made(item) for item in self.rights.conditions_on(self.questions)
        )

    async def judge_made(self, touched: Touched) -> None:
        """Say which rows the call is about to change, and judge it by whether the thread made all of them."""
        history = self.thread.history
        await history.catch_up(self.core, self.thread)
        made = await asyncio.to_thread(history.rows.holds, self.env.snapshots, touched)
        self.rows = Rows(made=made)
        await self.look_again(await self.thread.current_rights())

    def decided(self, rights: Rights, judgement: Judgement) -> None:
        """Take over a decision."""
        self.rights, self.judgement, self.epoch = rights, judgement, rights.epoch

    async def look_again(self, rights: Rights) -> None:
        """Put everything this call asked so far to other rights than it was decided under.

        Raises:
            Revoked: they don't allow it.
            NeedsApproval: they ask.
        """
        judgement = await self.weigh(rights, self.questions)
        await self._still_approved()
        if judgement.verdict is Verdict.DENY:
            revoked = self.revoked(judgement)
            self.judgement = judgement
            raise revoked
        self.decided(rights, judgement)
        if not self.permits(judgement):
            raise NeedsApproval
        if self.owes_uses:
            await self.use_grants()

    def _owed(self) -> list[str]:
        if self.rights is None or self.judgement is None:
            return []
        limited = self.rights.limited
        return [
            g for g in (*self.judgement.grants, *self.extra_grants) if g in limited and g not in self.used
        ]

    @property
    def owes_uses(self) -> bool:
        """Whether the call rests on a limited grant that it has not used up yet."""
        return self.rights is not None and bool(self.rights.limited) and bool(self._owed())

    async def use_grants(self) -> None:
        """Use up the limited grants that the call rests on, each once.

        Raises:
            Denied: another call took the last use, and nothing else allows it.
        """
        for grant in self._owed():
            if await self.core.store.use_grant(grant) != NO_USES_LEFT:
                self.used |= {grant}
                continue
            rights = await self.thread.refresh(None)
            judgement = await self.weigh(rights, self.questions)
            self.decided(rights, judgement)
            if judgement.verdict is Verdict.DENY:
                raise self.denial(judgement)
            if not self.permits(judgement):
                raise NeedsApproval
            await self.use_grants()
            return

    # -- errors ---------------------------------------------------------------------------------------------------

    def denial(self, judgement: Judgement) -> SyscallError:
        """The error for a deny."""
        decision = judgement.decision
        rule = decision.rules[0] if decision.rules else ""
        if decision.stale:
            return Stale(decision.reason, rule=rule, audit_id=self.audit_id, verdict="deny")
        return Denied(decision.reason, rule=rule, audit_id=self.audit_id, verdict="deny")

    def revoked(self, judgement: Judgement) -> SyscallError:
        """The error for a right that was there when the call was decided and is gone now."""
        if judgement.decision.facts:
            # Nobody took anything away: the facts are others.
            return self.denial(judgement)
        return Revoked(
            f"the permission for {self.row.action} on `{self.plan.resource}` was revoked; {judgement.decision.reason}",
            rule=judgement.decision.rules[0] if judgement.decision.rules else "",
            audit_id=self.audit_id,
            verdict="deny",
        )
