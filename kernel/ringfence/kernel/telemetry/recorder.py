"""The side of telemetry that calls pass by: adds to numbers, and keeps the facts of a call that was chosen for a span.

INVARIANT: nothing here waits, does I/O or raises for what a call holds; no span is built here, and none at all for a call that
was not chosen.
"""

from __future__ import annotations

import functools
import random
import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from ringfence.kernel.telemetry.settings import EVERY, Parent, Sampler, parent_of

if TYPE_CHECKING:
    from ringfence.kernel.flight import Flight
    from ringfence.kernel.journal.types import Row, StoredRow
    from ringfence.kernel.settled import Answer
    from ringfence.kernel.thread import Thread
    from ringfence.syscalls.table import Row as TableRow

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Bounds of durations: a call takes a millisecond, a command or a model minutes."""

ROWS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2000.0)
"""Bounds of rows in a flush."""

UNRECORDED = "unrecorded"
"""Outcome of a call that left no row: the journal could not take it and the agent makes it again."""

NO_SYSCALL = "no such syscall"
"""Stands for every action that is none: an agent must not make up new series."""

_bits = random.Random().getrandbits  # noqa: S311 - ids of spans are no secrets
_parent_of = functools.lru_cache(maxsize=4096)(parent_of)


class Spread:
    """A histogram of plain numbers."""

    __slots__ = ("bounds", "counts", "high", "low", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.low = float("inf")
        self.high = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)


class ModelUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of a model says about itself. Never what was said to the model, or by it."""

    request_model: str
    response_model: str = ""
    finish_reasons: tuple[str, ...] = ()
    input_tokens: int | None = None
    output_tokens: int | None = None
    estimated: bool | None = None
    cost_usd: float | None = None


class SpanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that the span of one call needs; built into one by the exporter's thread."""

    trace_id: int
    span_id: int
    parent: Parent | None
    start_ns: int
    end_ns: int
    agent: str
    name: str
    step: int
    lane: str
    lane_step: int
    branch: int
    action: str
    method: str
    resource: str
    effect: str
    verdict: str
    rule: str
    outcome: str
    reason: str
    replayed: bool
    model: ModelUse | None = None


class Recorder:
    """What `Core.telemetry` is while telemetry is on. Called from the kernel's event loop alone.

    Attributes:
        calls: (action, outcome) -> calls.
        verdicts: (action, verdict) -> decided calls.
        replays: action -> answers out of the journal.
        durations: action -> seconds from acceptance to answer.
        flushes: seconds of the journal's flushes.
        flush_rows: rows in them.
        starts: seconds from the order to a sandbox with a program in it.
        spans: what waits for the exporter, oldest first.
        dropped: spans that found the queue full.
    """

    def __init__(self, sampler: Sampler | None, queue_spans: int) -> None:
        self._below = 0 if sampler is None else sampler.below
        self._parents = sampler is not None and sampler.parent_based
        self._traces = sampler is not None
        self._queue_spans = queue_spans
        self.calls: dict[tuple[str, str], int] = {}
        self.verdicts: dict[tuple[str, str], int] = {}
        self.replays: dict[str, int] = {}
        self.durations: dict[str, Spread] = {}
        self.flushes = Spread(SECONDS)
        self.flush_rows = Spread(ROWS)
        self.starts = Spread(SECONDS)
        self.spans: deque[SpanFacts] = deque()
        self.dropped = 0

    # -- the ends of calls ----------------------------------------------------------------------------------------

    def call(self, flight: Flight, answer: Answer) -> None:
        """Take the end of a call that was run."""
        now_ns = time.time_ns()
        action = flight.row.action
        outcome = _outcome(answer)
        verdict = "" if flight.judgement is None else flight.judgement.verdict.value
        if outcome == "denied":
            verdict = "deny"
        self._count(action, outcome, verdict)
        spread = self.durations.get(action)
        if spread is None:
            spread = self.durations[action] = Spread(SECONDS)
        spread.add((now_ns - flight.started_us * 1000) / 1e9)
        chosen = self._choose(flight.thread)
        if chosen is None:
            return
        trace_id, parent = chosen
        rules = () if flight.judgement is None else flight.judgement.decision.rules
        self._put(
            SpanFacts(
                trace_id=trace_id,
                span_id=_span_id(),
                parent=parent,
                start_ns=flight.started_us * 1000,
                end_ns=now_ns,
                agent=flight.thread.id,
                name=flight.thread.record.name,
                step=flight.step,
                lane=flight.lane,
                lane_step=flight.lane_step,
                branch=flight.thread.branch,
                action=action,
                method=flight.row.method,
                resource=flight.plan.resource,
                effect=flight.effect.name,
                verdict=verdict,
                rule=rules[0] if rules else "",
                outcome=outcome,
                reason="" if answer.failure is None else answer.failure.reason,
                replayed=False,
                model=_model_use(flight, answer) if action.startswith("llm.") else None,
            )
        )

    def refused(self, thread: Thread, known: TableRow | None, row: Row, answer: Answer) -> None:
        """Take a request that never became a call: it names no syscall, or its arguments can't be read."""
        action = NO_SYSCALL if known is None else known.action
        outcome = _outcome(answer)
        self._count(action, outcome, row.verdict)
        self._other(thread, action, known, row, outcome, answer)

    def replayed(self, thread: Thread, known: TableRow, recorded: StoredRow, answer: Answer) -> None:
        """Take an answer out of the journal: no call was made, so its span has no duration."""
        self.replays[known.action] = self.replays.get(known.action, 0) + 1
        self._other(thread, known.action, known, recorded, recorded.outcome, answer)

    def _count(self, action: str, outcome: str, verdict: str) -> None:
        key = (action, outcome)
        self.calls[key] = self.calls.get(key, 0) + 1
        if verdict:
            key = (action, verdict)
            self.verdicts[key] = self.verdicts.get(key, 0) + 1

    def _other(
        self,
        thread: Thread,
        action: str,
        known: TableRow | None,
        row: Row | StoredRow,
        outcome: str,
        answer: Answer,
    ) -> None:
        chosen = self._choose(thread)
        if chosen is None:
            return
        trace_id, parent = chosen
        now_ns = time.time_ns()
        self._put(
            SpanFacts(
                trace_id=trace_id,
                span_id=_span_id(),
                parent=parent,
                start_ns=now_ns if answer.replayed else row.started_us * 1000,
                end_ns=now_ns,
                agent=thread.id,
                name=thread.record.name,
                step=row.step,
                lane=row.lane,
                lane_step=row.lane_step,
                branch=row.branch,
                action=action,
                method="" if known is None else known.method,
                resource=row.resource,
                effect=row.effect,
                verdict=row.verdict,
                rule="",
                outcome=outcome,
                reason="" if answer.failure is None else answer.failure.reason,
                replayed=answer.replayed,
            )
        )

    # -- which calls get a span -----------------------------------------------------------------------------------

    def _choose(self, thread: Thread) -> tuple[int, Parent | None] | None:
        """The trace of a call that gets a span, with its parent; None: it gets none."""
        if not self._traces:
            return None
        text = thread.manifest.run.env.get("TRACEPARENT")
        if text is not None:
            parent = _parent_of(text)
            if parent is not None:
                sampled = parent.sampled if self._parents else parent.trace_id % EVERY < self._below
                return (parent.trace_id, parent) if sampled else None
        if not self._below:
            return None
        low = _bits(64)
        if low >= self._below:
            return None
        return _bits(64) << 64 | low or 1, None

    def _put(self, facts: SpanFacts) -> None:
        if len(self.spans) >= self._queue_spans:
            self.dropped += 1
        else:
            self.spans.append(facts)

    # -- the rest -------------------------------------------------------------------------------------------------

    def flushed(self, rows: int, seconds: float) -> None:
        """Take one flush of the journal."""
        self.flushes.add(seconds)
        self.flush_rows.add(rows)

    def sandbox_started(self, seconds: float) -> None:
        """Take the start of one sandbox."""
        self.starts.add(seconds)


def _span_id() -> int:
    return _bits(64) or 1


def _outcome(answer: Answer) -> str:
    if answer.failure is None:
        return "ok"
    return answer.failure.outcome if answer.step else UNRECORDED


class _Reply(msgspec.Struct):
    """What is read of the result of `llm.complete`."""

    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    estimated: bool = False
    cost_usd: float | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode


def _model_use(flight: Flight, answer: Answer) -> ModelUse:
    asked = str(getattr(flight.arguments, "model", ""))
    try:
        reply = _decode_reply(answer.result or b"{}")
    except msgspec.DecodeError:
        return ModelUse(request_model=asked)
    return ModelUse(
        request_model=asked,
        response_model=reply.model,
        finish_reasons=(reply.finish_reason,) if reply.finish_reason else (),
        input_tokens=reply.prompt_tokens,
        output_tokens=reply.completion_tokens,
        estimated=True if reply.estimated else None,
        cost_usd=reply.cost_usd,
    )
