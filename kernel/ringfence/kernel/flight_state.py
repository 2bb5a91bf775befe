"""What is known of one call in flight, and the journal rows it makes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec
from ringfence.kernel import carrying
from ringfence.kernel.asking import evidence
from ringfence.kernel.facts import PATHS_MAX, WHOLE, Facts, Marks, bounded
from ringfence.kernel.journal.types import ApprovalRecord, Phase, Row, StoredRow
from ringfence.kernel.places import NEWEST
from ringfence.kernel.spending import Spending
from ringfence.kernel.weighing import Rows
from ringfence.policy.actions import OF_SERVERS
from ringfence.syscalls.base import Effect, Plan, Question
from ringfence.syscalls.errors import SyscallError
from ringfence.syscalls.llm_parts import Part
from ringfence.syscalls.payload import content_bytes

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.rights import Judgement, Rights
    from ringfence.syscalls.table import Row as TableRow

_NO_PLAN = Plan(resource="", questions=())
_NO_MARKS = Marks()
_UNDECIDED = ("", b'"rules":[],"grants":[]}')
_ROWS_KNOWN, _ROWS_LATER = Rows(), Rows(later=True)
# Plain `list` and `dict` with a type: msgspec makes these without a call.
_questions = cast("Callable[[], list[Question]]", list)
_texts = cast("Callable[[], list[str]]", list)
_kept = cast("Callable[[], dict[str, Any]]", dict)
_versions = cast("Callable[[], dict[str, int]]", dict)
_taken = cast("Callable[[], dict[str, Part]]", dict)
_WRITES = frozenset({"fs.write", "fs.append"})
_BY_POINT = frozenset({"exec.run", "workspace.commit"})


class FlightState(Spending, kw_only=True, eq=False):
    """A call from its acceptance to its outcome, as far as it is data.

    Attributes:
        core: the kernel that it flies in.
        span_s: how long it may take.
        earlier: verdict and end of the body of its intent, where an earlier kernel decided it and this one has not yet.
        waits_for: the approval that it waits for.
        look: wakes it.
        let_go: whether it ends without an outcome, to be made again by the next start.
        approved: what it has been approved for, and `approval` under what.
        taints: what it read that taints its thread, and `marks` what its row says of that.
        watched: state keys that must not change before it commits.
        parts: what was taken out of its arguments and is not kept yet, by the names of the artifacts.
        rows: whether the thread made all the rows that the call changes: the body finds out, within the target's transaction.
    """

    core: Core
    row: TableRow
    arguments: Any
    canonical: bytes
    digest: bytes
    lane: str
    lane_step: int
    step: int
    span_s: float
    began: float = 0.0
    deadline: float = 0.0
    started_us: int = 0
    plan: Plan = _NO_PLAN
    effect: Effect = Effect.READ
    effect_id: str = ""
    epoch: int = -1
    judgement: Judgement | None = None
    earlier: tuple[str, bytes] = _UNDECIDED
    questions: list[Question] = msgspec.field(default_factory=_questions)
    rights: Rights | None = None
    memo: dict[str, Any] = msgspec.field(default_factory=_kept)
    used: frozenset[str] = frozenset()
    rerun: bool = False
    extra_rules: list[str] = msgspec.field(default_factory=_texts)
    extra_grants: list[str] = msgspec.field(default_factory=_texts)
    point: dict[str, Any] | None = None
    progress: bytes | None = None
    effect_started: bool = False
    ending: bool = False
    intent_written: bool = False
    generation: int = 0
    task: asyncio.Task[Any] | None = None
    fate: SyscallError | None = None
    waits_for: ApprovalRecord | None = None
    look: asyncio.Event | None = None
    approved: frozenset[tuple[Any, ...]] = frozenset()
    approval: ApprovalRecord | None = None
    staged: bool = False
    let_go: bool = False
    taints: str = ""
    marks: Marks | None = None
    watched: dict[str, int] = msgspec.field(default_factory=_versions)
    rows: Rows = _ROWS_KNOWN
    parts: dict[str, Part] = msgspec.field(default_factory=_taken)
    _ending: asyncio.Future[Any] | None = None
    _given: Any = None

    def __post_init__(self) -> None:
        self.began = now = time.monotonic()
        self.deadline = now + self.span_s
        self.started_us = time.time_ns() // 1000
        row = self.row
        self.effect = row.effect
        self.generation = self.thread.generation
        if row.action == "sql.write":
            self.rows = _ROWS_LATER

    # -- its end --------------------------------------------------------------------------------------------------

    @property
    def answer(self) -> asyncio.Future[Any]:
        """Resolves with the answer. Made for who asks, for of most calls nobody does."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_future()
            if self._given is not None:
                self._ending.set_result(self._given)
        return self._ending

    def give(self, answer: Any) -> None:
        """Say what the answer is, once."""
        self._given = answer
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(answer)

    @property
    def audit_id(self) -> str:
        """Where people find this call again."""
        return f"{self.thread.id}/{self.step}"

    @property
    def rated(self) -> str:
        """The action that rates count: a call of a server's tool counts as that tool, a read as its resources."""
        action = self.row.action
        return self.questions[0].action if action in OF_SERVERS and self.questions else action

    # -- rows -----------------------------------------------------------------------------------------------------

    def journal_row(self, phase: Phase) -> Row:
        """A row of this call without outcome and body."""
        # Plain attributes of its enums: `name` and `value` run Python for each look.
        return Row(
            chain=self.thread.key,
            phase=phase,
            step=self.step,
            branch=self.thread.branch,
            lane=self.lane,
            lane_step=self.lane_step,
            action=self.row.action,
            resource=self.plan.resource,
            effect=self.effect._name_,
            verdict=self.earlier[0] if self.judgement is None else self.judgement.verdict._value_,
            digest=self.digest,
            effect_id=self.effect_id,
            started_us=self.started_us,
        )

    def explain(self) -> bytes:
        """The end of a body: the point, and what decided the call."""
        more_to_say = self.point or self.approval or self.extra_rules or self.extra_grants
        if self.judgement is not None and not more_to_say:
            return self.judgement.tail
        parts: list[bytes] = []
        if self.point is not None:
            parts.append(b'"point":' + msgspec.json.encode(self.point) + b",")
        if self.approval is not None:
            parts.append(b'"approval":' + msgspec.json.encode(evidence(self.approval)) + b",")
        if self.extra_rules or self.extra_grants:
            more = {"rules": self.extra_rules, "grants": self.extra_grants}
            parts.append(b'"while_running":' + msgspec.json.encode(more) + b",")
        if self.judgement is None:
            parts.append(self.earlier[1])
        else:
            parts.append(self.judgement.tail)
        return b"".join(parts)

    def outcome_row(self, outcome: str, payload: bytes) -> Row:
        """The outcome; `payload` is the rendered `"result":…,` or `"error":…,` part of its body."""
        row = self.journal_row(Phase.OUTCOME)
        row.outcome = outcome
        row.duration_us = time.time_ns() // 1000 - self.started_us
        if payload:
            opening = b"{" if self.thread.facts.plain and not self.taints else self.opening(outcome)
            used = self.amounts("used", outcome)
            if not self.intent_written:
                used += b'"arguments":' + self.canonical + b","
            row.body = b"".join((opening, used, payload, self.explain()))
        return row

    # -- bytes ----------------------------------------------------------------------------------------------------

    async def afford(self, size: int) -> None:
        """See to it that an answer of so many bytes is reserved, where bytes are counted.

        Raises:
            BudgetExhausted: there are not so many left.
        """
        if "bytes" in self.reserved:
            await carrying.afford(self, self.core.pools, size)

    async def answered(self, found: msgspec.Struct, result: bytes) -> None:
        """Count an answer before it is given out.

        Raises:
            BudgetExhausted: it is larger than what is left, and nothing but read.
        """
        size = content_bytes(found, len(result))
        if self.row.effect is Effect.READ:
            await self.afford(size)
        self.came = size

    def answered_at(self, found: msgspec.Struct, result: bytes) -> bytes:
        """Count the answer of work that commits with it. Returns what its body says of that."""
        self.came = content_bytes(found, len(result))
        return self.amounts("used")

    # -- facts ----------------------------------------------------------------------------------------------------

    def taint(self, source: str) -> None:
        """Say that the call has read something untrusted."""
        self.taints = self.taints or source

    def opening(self, outcome: str = "ok") -> bytes:
        """The beginning of an outcome's body: what the call says about facts, where it says anything."""
        facts = self.thread.facts
        if facts.plain and not self.taints:
            return b"{"
        self.marks = self._marks(facts, outcome)
        return b"{" if self.marks is None else self.marks.opening()

    def _marks(self, facts: Facts, outcome: str) -> Marks | None:
        taints = self.taints
        if facts.taint is None and not taints and outcome == "ok":
            file = facts.touched_by(self.row.action, self.plan.resource)
            taints = f"the file `{file}`" if file else ""
        untaints = ""
        if facts.taint is not None and not taints and outcome == "ok":
            untaints = self._untaints()
        paths: tuple[str, ...] = ()
        if (facts.taint is not None or taints) and outcome in ("ok", "unknown"):
            paths = bounded(self._written())
        elif self.row.action == "spawn" and outcome == "ok":
            # A child gets a copy of them.
            paths = bounded(sorted(facts.paths))
        marks = Marks(
            untaints=untaints, tainted=facts.taint, taints="" if facts.taint else taints, paths=paths
        )
        return None if marks == _NO_MARKS else marks

    def _untaints(self) -> str:
        """The operator's rule by which this call ends the taint of its thread; empty: none."""
        if self.rights is None:
            return ""
        # INVARIANT: all of it falls under a rule: a program of the agent's own that has a trusted one's name does not.
        rules = [self.rights.untaints(question) for question in self.plan.questions]
        return rules[0] if rules and all(rules) else ""

    def _written(self) -> list[str]:
        """Files that the call wrote."""
        written = [str(q.resource) for q in self.questions if q.action in _WRITES]
        if self.row.action in _BY_POINT and not written and self.point is not None:
            covers = [str(path) for path in self.point["covers"]]
            # Of many, a point's row names only the first.
            written = covers if len(covers) < PATHS_MAX else [WHOLE]
        return written

    def noted(self, row: Row) -> None:
        """Have the thread know what a recorded row says, before its answer is given out."""
        thread = self.thread
        if self.marks is None and not thread.history.watching:
            return
        if thread.lineage.holds(row.branch, row.step):
            if self.marks is not None:
                thread.facts.take(row.step, self.marks)
            thread.history.add(row)

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
