"""One call in flight, as its body sees it (the `Call` protocol), with all that its journal rows need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.kernel.journal.types import Entry, EpochMoved, Phase, Row, StoredRow
from ringfence.kernel.waits import waiting
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Effect, Plan, Question, WaitKind
from ringfence.syscalls.errors import Denied, Fenced, Revoked, SyscallError

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.environment import AgentEnvironment
    from ringfence.kernel.rights import Judgement, Rights
    from ringfence.kernel.thread import Thread
    from ringfence.syscalls.table import Row as TableRow

NO_USES_LEFT = -1
"""What the store answers for a grant that gives no right any more."""

_NO_PLAN = Plan(resource="", questions=())


class Flight:
    """A call from its acceptance to its outcome."""

    __slots__ = (
        "_began",
        "_core",
        "_deadline",
        "answer",
        "arguments",
        "canonical",
        "digest",
        "effect",
        "effect_id",
        "effect_started",
        "ending",
        "epoch",
        "extra_grants",
        "extra_rules",
        "fate",
        "generation",
        "intent_written",
        "judgement",
        "lane",
        "lane_step",
        "plan",
        "point",
        "progress",
        "questions",
        "rerun",
        "reserved",
        "rights",
        "row",
        "started_us",
        "step",
        "task",
        "thread",
        "used",
    )

    def __init__(
        self,
        core: Core,
        thread: Thread,
        row: TableRow,
        *,
        arguments: Any,
        canonical: bytes,
        digest: bytes,
        lane: str,
        lane_step: int,
        step: int,
        deadline_s: float,
    ) -> None:
        self._core = core
        self.thread = thread
        self.row = row
        self.arguments = arguments
        self.canonical = canonical
        self.digest = digest
        self.lane = lane
        self.lane_step = lane_step
        self.step = step
        self._began = time.monotonic()
        self._deadline = self._began + deadline_s
        self.started_us = time.time_ns() // 1000
        self.plan = _NO_PLAN
        self.effect = row.effect
        self.effect_id = ""
        self.epoch: int = -1
        self.judgement: Judgement | None = None
        self.questions: list[Question] = []
        self.rights: Rights | None = None
        self.used: frozenset[str] = frozenset()
        self.reserved: tuple[str, ...] = ()
        self.rerun = False
        self.extra_rules: list[str] = []
        self.extra_grants: list[str] = []
        self.point: dict[str, Any] | None = None
        self.progress: bytes | None = None
        self.effect_started = False
        self.ending = False
        self.intent_written = False
        self.generation = thread.generation
        self.task: asyncio.Task[Any] | None = None
        self.fate: SyscallError | None = None
        self.answer: asyncio.Future[Any] | None = None

    # -- the Call protocol ----------------------------------------------------------------------------------------

    @property
    def env(self) -> AgentEnvironment:
        """What the kernel lends."""
        return self.thread.environment

    @property
    def deadline_s(self) -> float:
        """Seconds that the body may still take."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def age_s(self) -> float:
        """Seconds since this kernel took the call."""
        return time.monotonic() - self._began

    async def judge(self, questions: Sequence[Question]) -> Sequence[Verdict]:
        """Ask policy about more than the plan knew, in order; records the rules."""
        verdicts: list[Verdict] = []
        for question in questions:
            judgement = self.thread.rights.judge((question,), self.effect.name, self.used)
            self.questions.append(question)
            self.extra_rules.extend(r for r in judgement.decision.rules if r not in self.extra_rules)
            self.extra_grants.extend(g for g in judgement.grants if g not in self.extra_grants)
            verdicts.append(judgement.verdict)
        return verdicts

    async def require(self, questions: Sequence[Question]) -> None:
        """Judge, and raise `Denied` naming the first refusal."""
        for question, verdict in zip(questions, await self.judge(questions), strict=True):
            if verdict is not Verdict.ALLOW:
                judgement = self.thread.rights.judge((question,), self.effect.name, self.used)
                raise self.denial(judgement)

    async def record(self, progress: bytes) -> None:
        """Make progress durable in the journal before an effect counts."""
        while True:
            row = self.journal_row(Phase.PROGRESS)
            row.body = progress
            try:
                await self._core.append(Entry(row=row, epoch=self.epoch))
            except EpochMoved as moved:
                await self.look_again(await self.thread.refresh(moved.epoch))
            else:
                self.progress = progress
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
        if self._core.failpoints.enabled:
            await self._core.failpoints.reach(f"{self.row.action}:{name}", self.thread.id)

    async def check_live(self) -> None:
        """Look at the policy epoch and the lease once more, right before an effect."""
        lapsed = self._core.lease.expired
        # After an outage the lease may only be overdue; renewing it reads the epochs again.
        if self.thread.fenced or (lapsed and not await self._core.keep_lease()):
            raise Fenced(f"another kernel may own `{self.thread.id}` now; nothing was done")
        if self.fate is not None:
            raise self.fate
        rights = await self.thread.current_rights()
        while rights is not self.rights or self.owes_uses:
            await self.look_again(rights)
            rights = await self.thread.current_rights()
        if lapsed and self._core.lease.expired:
            raise Fenced(f"the lease over `{self.thread.id}` ran out again; nothing was done")
        # INVARIANT: nothing between here and the effect may suspend, or a revocation could slip in between.
        self.effect_started = True

    # -- rights and totals ----------------------------------------------------------------------------------------

    def decided(self, rights: Rights, judgement: Judgement) -> None:
        """Take over a decision."""
        self.rights, self.judgement, self.epoch = rights, judgement, rights.epoch

    async def look_again(self, rights: Rights) -> None:
        """Put everything this call asked so far to other rights than it was decided under.

        Raises:
            Revoked: they don't allow it.
        """
        judgement = rights.judge(tuple(self.questions), self.effect.name, self.used)
        if judgement.verdict is not Verdict.ALLOW:
            revoked = self.revoked(judgement)
            self.judgement = judgement
            raise revoked
        self.decided(rights, judgement)
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
            if await self._core.store.use_grant(grant) != NO_USES_LEFT:
                self.used |= {grant}
                continue
            rights = await self.thread.refresh(None)
            judgement = rights.judge(tuple(self.questions), self.effect.name, self.used)
            self.decided(rights, judgement)
            if judgement.verdict is not Verdict.ALLOW:
                raise self.denial(judgement)
            await self.use_grants()
            return

    def reserve(self, name: str) -> None:
        """Reserve one of a total for this call, once.

        Raises:
            BudgetExhausted: it is spent.
        """
        if name not in self.reserved:
            self.thread.budgets.reserve(name)
            self.reserved = (*self.reserved, name)

    def give_back(self) -> None:
        """Give back what was reserved: the call did not run."""
        for name in self.reserved:
            self.thread.budgets.release(name)
        self.reserved = ()

    # -- errors ---------------------------------------------------------------------------------------------------

    @property
    def audit_id(self) -> str:
        """Where people find this call again."""
        return f"{self.thread.id}/{self.step}"

    def denial(self, judgement: Judgement) -> SyscallError:
        """The error for a verdict that is not allow."""
        decision = judgement.decision
        rule = decision.rules[0] if decision.rules else ""
        if judgement.verdict is Verdict.ASK:
            text = f"{decision.reason}; this release has no approvals, so it is refused: make the rule `allow` in the manifest and submit it again"
            return Denied(text, rule=rule, audit_id=self.audit_id, verdict="ask")
        return Denied(decision.reason, rule=rule, audit_id=self.audit_id, verdict="deny")

    def revoked(self, judgement: Judgement) -> SyscallError:
        """The error for a right that was there when the call was decided and is gone now."""
        return Revoked(
            f"the permission for {self.row.action} on `{self.plan.resource}` was revoked; {judgement.decision.reason}",
            rule=judgement.decision.rules[0] if judgement.decision.rules else "",
            audit_id=self.audit_id,
            verdict="deny",
        )

    # -- rows -----------------------------------------------------------------------------------------------------

    def journal_row(self, phase: Phase) -> Row:
        """A row of this call without outcome and body."""
        return Row(
            chain=self.thread.key,
            phase=phase,
            step=self.step,
            branch=self.thread.branch,
            lane=self.lane,
            lane_step=self.lane_step,
            action=self.row.action,
            resource=self.plan.resource,
            effect=self.effect.name,
            verdict="" if self.judgement is None else self.judgement.verdict.value,
            digest=self.digest,
            effect_id=self.effect_id,
            started_us=self.started_us,
        )

    def explain(self) -> bytes:
        """The end of a body: the point, and what decided the call."""
        parts: list[bytes] = []
        if self.point is not None:
            parts.append(b'"point":' + msgspec.json.encode(self.point) + b",")
        if self.extra_rules or self.extra_grants:
            more = {"rules": self.extra_rules, "grants": self.extra_grants}
            parts.append(b'"while_running":' + msgspec.json.encode(more) + b",")
        if self.judgement is None:
            parts.append(b'"rules":[],"grants":[]}')
        else:
            parts.append(self.judgement.tail)
        return b"".join(parts)

    def outcome_row(self, outcome: str, payload: bytes) -> Row:
        """The outcome; `payload` is the rendered `"result":…,` or `"error":…,` part of its body."""
        row = self.journal_row(Phase.OUTCOME)
        row.outcome = outcome
        row.duration_us = time.time_ns() // 1000 - self.started_us
        head = b"{" if self.intent_written else b'{"arguments":' + self.canonical + b","
        row.body = b"".join((head, payload, self.explain()))
        return row

    def stored(self, row: Row) -> StoredRow:
        """The row as a replay would read it."""
        return StoredRow(
            chain=row.chain,
            pos=NEWEST,
            phase=row.phase,
            step=row.step,
            branch=row.branch,
            lane=row.lane,
            lane_step=row.lane_step,
            action=row.action,
            resource=row.resource,
            effect=row.effect,
            verdict=row.verdict,
            outcome=row.outcome,
            digest=row.digest,
            effect_id=row.effect_id,
            started_us=row.started_us,
            duration_us=row.duration_us,
            body=row.body,
            hash=b"",
        )


NEWEST = 1 << 62
"""Position of a row taken from memory: newer than any that was read."""
