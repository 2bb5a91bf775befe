"""Counting calls, and choosing those that get a span."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.metrics.export import AggregationTemporality as Temporality
from opentelemetry.sdk.metrics.export import (
    Histogram,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from ringfence.kernel.settled import Answer
from ringfence.kernel.telemetry.metrics import Durations
from ringfence.kernel.telemetry.recorder import UNRECORDED, ModelUse, Recorder, Spread
from ringfence.kernel.telemetry.settings import EVERY, Sampler
from ringfence.kernel.telemetry.spans import attributes
from ringfence.policy.types import Decision, Verdict
from ringfence.syscalls.base import Effect
from ringfence.syscalls.errors import JournalUnavailable
from ringfence.syscalls.table import build_table

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TABLE = build_table()


def flight_of(action: str = "fs.read", traceparent: str | None = None, **more: Any) -> Any:
    """What telemetry reads of a flight; the real thing needs a kernel, and is used in tests/integration."""
    env = {} if traceparent is None else {"TRACEPARENT": traceparent}
    return SimpleNamespace(
        **{
            "row": TABLE.get(action) or SimpleNamespace(action=action, method="Complete"),
            "judgement": SimpleNamespace(verdict=Verdict.ALLOW, decision=DECISION),
            "started_us": 1_000_000,
            "thread": SimpleNamespace(
                id="a1",
                branch=0,
                record=SimpleNamespace(name="one"),
                manifest=SimpleNamespace(run=SimpleNamespace(env=env)),
            ),
            "step": 1,
            "lane": "0",
            "lane_step": 0,
            "plan": SimpleNamespace(resource="/workspace/a"),
            "effect": Effect.READ,
            "arguments": None,
            **more,
        }
    )


DECISION = Decision(verdict=Verdict.ALLOW, rules=("r1",), reason="")


def spans_of(sampler: Sampler | None, calls: int = 1, traceparent: str | None = None) -> int:
    recorder = Recorder(sampler, queue_spans=1 << 20)
    for _ in range(calls):
        recorder.call(flight_of(traceparent=traceparent), Answer(step=1, result=b"{}"))
    assert recorder.calls == {("fs.read", "ok"): calls}
    assert recorder.verdicts == {("fs.read", "allow"): calls}
    assert sum(recorder.durations["fs.read"].counts) == calls
    return len(recorder.spans)


def test_a_ratio_takes_its_share():
    assert spans_of(Sampler(below=EVERY, parent_based=True), 100) == 100
    assert spans_of(Sampler(below=0, parent_based=True), 100) == 0
    assert spans_of(None, 100) == 0
    # Six standard deviations: once in a thousand million runs it is outside.
    assert 800 < spans_of(Sampler(below=EVERY // 10, parent_based=True), 10_000) < 1200


def test_a_parent_decides_where_the_sampler_asks_it():
    never, always = Sampler(below=0, parent_based=True), Sampler(below=EVERY, parent_based=True)
    assert spans_of(never, 3, f"00-{TRACE}-{SPAN}-01") == 3
    assert spans_of(always, 3, f"00-{TRACE}-{SPAN}-00") == 0
    assert spans_of(always, 3, "what is this") == 3
    alone = Sampler(below=EVERY, parent_based=False)
    assert spans_of(alone, 3, f"00-{TRACE}-{SPAN}-00") == 3
    # By the trace's own bits: all of its calls or none.
    low = int(TRACE, 16) % EVERY
    assert spans_of(Sampler(below=low, parent_based=False), 3, f"00-{TRACE}-{SPAN}-01") == 0
    assert spans_of(Sampler(below=low + 1, parent_based=False), 3, f"00-{TRACE}-{SPAN}-01") == 3


def test_a_full_queue_drops_and_counts():
    recorder = Recorder(Sampler(below=EVERY, parent_based=True), queue_spans=2)
    for _ in range(5):
        recorder.call(flight_of(), Answer(step=1, result=b"{}"))
    assert (len(recorder.spans), recorder.dropped) == (2, 3)


def test_a_call_that_left_no_row_is_told_apart():
    recorder = Recorder(None, queue_spans=2)
    recorder.call(flight_of(), Answer(step=0, failure=JournalUnavailable("away")))
    assert recorder.calls == {("fs.read", UNRECORDED): 1}


def test_a_model_call_says_what_it_used_and_nothing_of_what_was_said():
    recorder = Recorder(Sampler(below=EVERY, parent_based=True), queue_spans=2)
    arguments = SimpleNamespace(model="gpt-5", messages=[{"role": "user", "content": "my secret"}])
    reply = json.dumps(
        {
            "text": "ours",
            "message": {"role": "assistant", "content": "ours"},
            "finish_reason": "stop",
            "model": "gpt-5-mini",
            "resource": "host",
            "prompt_tokens": 12,
            "completion_tokens": 3,
            "estimated": True,
            "cost_usd": 0.25,
        }
    ).encode()
    recorder.call(flight_of("llm.complete", arguments=arguments), Answer(step=1, result=reply))
    (facts,) = recorder.spans
    assert facts.model == ModelUse(
        request_model="gpt-5",
        response_model="gpt-5-mini",
        finish_reasons=("stop",),
        input_tokens=12,
        output_tokens=3,
        estimated=True,
        cost_usd=0.25,
    )
    found = attributes(facts, 0)
    assert {
        name: value for name, value in found.items() if name.startswith(("gen_ai.", "ringfence.usage."))
    } == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.response.model": "gpt-5-mini",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 3,
        "ringfence.usage.estimated": True,
        "ringfence.usage.cost_usd": 0.25,
    }
    assert "secret" not in repr(facts)
    assert "ours" not in repr(facts)


def test_bounds_belong_to_the_bucket_below():
    spread = Spread((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        spread.add(value)
    assert (spread.counts, spread.total, spread.low, spread.high) == ([2, 2, 1], 7.5, 0.5, 2.5)


def test_histograms_follow_the_temporality_of_the_counters():
    for temporality, expected in ((Temporality.CUMULATIVE, [1, 2]), (Temporality.DELTA, [1, 1])):
        recorder = Recorder(None, queue_spans=1)
        durations = Durations(recorder)
        scope = InstrumentationScope("test")
        metric = Metric("ringfence.calls", "", "", Sum([], temporality, is_monotonic=True))
        data = MetricsData([ResourceMetrics(Resource({}), [ScopeMetrics(scope, [metric], "")], "")])
        counts: list[int] = []
        for _ in range(2):
            recorder.flushed(5, 0.001)
            added = durations.added_to(data).resource_metrics[0].scope_metrics[0].metrics
            assert [m.name for m in added[1:]] == [
                "ringfence.journal.flush.duration",
                "ringfence.journal.flush.rows",
            ]
            assert isinstance(added[2].data, Histogram)
            assert added[2].data.aggregation_temporality is temporality
            counts.append(added[2].data.data_points[0].count)
        assert counts == expected
