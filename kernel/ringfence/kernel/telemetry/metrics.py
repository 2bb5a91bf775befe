"""Metrics out of the recorder's numbers and the kernel's own state, read when they are sent and not when they change."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from ringfence.kernel.core import Core
from ringfence.kernel.telemetry.recorder import Recorder, Spread
from ringfence.kernel.thread import FINAL_STATES, Thread

CALLS = "ringfence.calls"

BUDGET_AGENTS_MAX = 500
"""Agents whose budgets are sent: a series for each of thousands would serve nobody."""


def observe(provider: MeterProvider, scope: str, version: str, core: Core, recorder: Recorder) -> None:
    """Register everything but histograms."""
    meter = provider.get_meter(scope, version)

    def counter(name: str, unit: str, text: str, read: Any) -> None:
        meter.create_observable_counter(name, [read], unit=unit, description=text)

    def gauge(name: str, unit: str, text: str, read: Any) -> None:
        meter.create_observable_gauge(name, [read], unit=unit, description=text)

    counter(CALLS, "{call}", "Calls that came to an end.", _by(recorder.calls, "ringfence.outcome"))
    counter(
        "ringfence.verdicts", "{call}", "Decisions of policy.", _by(recorder.verdicts, "ringfence.verdict")
    )
    counter("ringfence.replays", "{call}", "Answers out of the journal.", _by_action(recorder.replays))
    journal = core.journal
    gauge("ringfence.journal.queue", "{row}", "Rows that wait for a flush.", _one(lambda: journal.waiting))
    counter("ringfence.journal.rows", "{row}", "Rows made durable.", _one(lambda: journal.rows))
    gauge("ringfence.calls.active", "{call}", "Calls in flight.", _one(lambda: _in_flight(core)))
    gauge("ringfence.sandboxes.live", "{sandbox}", "Sandboxes with a program.", _one(lambda: _live(core)))
    gauge("ringfence.agents", "{agent}", "Agents of this kernel by state.", _states(core))
    counter(
        "ringfence.spans.dropped",
        "{span}",
        "Spans that found the queue full.",
        _one(lambda: recorder.dropped),
    )
    gauge("ringfence.budget.used", "1", "What an agent has used of a budget.", _budgets(core, "used"))
    gauge("ringfence.budget.limit", "1", "The limit of a budget.", _budgets(core, "limit"))
    gauge("ringfence.budget.left", "1", "What is left of a total.", _budgets(core, "left"))


def _threads(core: Core) -> list[Thread]:
    # One step of the interpreter: the event loop changes the dictionary meanwhile.
    return list(core.threads.values())


def _in_flight(core: Core) -> int:
    return sum(len(thread.flights) for thread in _threads(core))


def _live(core: Core) -> int:
    return sum(thread.program is not None for thread in _threads(core))


def _one(read: Any) -> Any:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(read())]

    return callback


def _by(numbers: dict[tuple[str, str], int], second: str) -> Any:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(number, {"ringfence.action": action, second: word})
            for (action, word), number in list(numbers.items())
        ]

    return callback


def _by_action(numbers: dict[str, int]) -> Any:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(number, {"ringfence.action": action}) for action, number in list(numbers.items())]

    return callback


def _states(core: Core) -> Any:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        counts = Counter(thread.state for thread in _threads(core))
        return [Observation(number, {"ringfence.state": state}) for state, number in counts.items()]

    return callback


def _budgets(core: Core, what: str) -> Any:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        alive = [thread for thread in _threads(core) if thread.state not in FINAL_STATES]
        found: list[Observation] = []
        for thread in alive[:BUDGET_AGENTS_MAX]:
            for line in thread.budgets.view():
                value = getattr(line, what)
                if value is not None:
                    labels = {
                        "ringfence.agent": thread.id,
                        "ringfence.budget": line.name,
                        "ringfence.budget.kind": line.kind,
                    }
                    found.append(Observation(value, labels))
        return found

    return callback


class Durations:
    """Adds the recorder's histograms to what the SDK has collected.

    The SDK's own would cost each call several microseconds for what is an addition here.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._started_ns = time.time_ns()
        self._since_ns = self._started_ns
        self._sent: dict[tuple[str, str], tuple[tuple[int, ...], float]] = {}

    def added_to(self, data: MetricsData) -> MetricsData:
        """The same with histograms, of the temporality that the counters have."""
        delta = any(
            isinstance(metric.data, Sum)
            and metric.data.aggregation_temporality is AggregationTemporality.DELTA
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        )
        now_ns = time.time_ns()
        metrics = self._metrics(now_ns, delta)
        self._since_ns = now_ns
        return MetricsData(
            [
                ResourceMetrics(
                    resource.resource,
                    [
                        ScopeMetrics(scope.scope, [*scope.metrics, *metrics], scope.schema_url)
                        for scope in resource.scope_metrics
                    ],
                    resource.schema_url,
                )
                for resource in data.resource_metrics
            ]
        )

    def _metrics(self, now_ns: int, delta: bool) -> list[Metric]:
        recorder = self._recorder
        calls = [
            ({"ringfence.action": action}, spread) for action, spread in list(recorder.durations.items())
        ]
        named: list[tuple[str, str, str, list[tuple[dict[str, str], Spread]]]] = [
            ("ringfence.call.duration", "s", "From a call's acceptance to its answer.", calls),
            ("ringfence.journal.flush.duration", "s", "Time of a flush.", [({}, recorder.flushes)]),
            ("ringfence.journal.flush.rows", "{row}", "Rows of a flush.", [({}, recorder.flush_rows)]),
            ("ringfence.sandbox.start.duration", "s", "Time to start a sandbox.", [({}, recorder.starts)]),
        ]
        temporality = AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
        found: list[Metric] = []
        for name, unit, text, series in named:
            points = [self._point(name, a, s, now_ns, delta) for a, s in series if any(s.counts)]
            if points:
                found.append(Metric(name, text, unit, Histogram(points, temporality)))
        return found

    def _point(
        self, name: str, attributes: dict[str, str], spread: Spread, now_ns: int, delta: bool
    ) -> HistogramDataPoint:
        counts: Sequence[int] = tuple(spread.counts)
        total = spread.total
        key = (name, attributes.get("ringfence.action", ""))
        before, total_before = self._sent.get(key, ((0,) * len(counts), 0.0))
        self._sent[key] = (tuple(counts), total)
        if delta:
            counts = [now - then for now, then in zip(counts, before, strict=True)]
            total -= total_before
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=self._since_ns if delta else self._started_ns,
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=total,
            bucket_counts=counts,
            explicit_bounds=spread.bounds,
            min=spread.low,
            max=spread.high,
        )
