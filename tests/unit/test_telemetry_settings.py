"""What the OTEL_* variables ask for."""

from __future__ import annotations

import pytest
from ringfence.kernel.telemetry.settings import EVERY, Parent, Sampler, parent_of, wanted

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "True"},
    ],
)
def test_nothing_is_asked_for(environ):
    assert wanted(environ) is None


def test_one_endpoint_asks_for_both_and_one_of_its_own_for_one():
    both = wanted(ENDPOINT)
    assert both is not None
    assert (both.traces, both.metrics, both.problems) == ("http/protobuf", "http/protobuf", ())
    assert (both.queue_spans, both.batch_spans, both.span_delay_s) == (2048, 512, 5.0)
    one = wanted(
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c/v1/metrics", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    )
    assert one is not None
    assert (one.traces, one.metrics) == ("", "grpc")
    mixed = wanted(
        {**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "OTEL_METRICS_EXPORTER": "none"}
    )
    assert mixed is not None
    assert (mixed.traces, mixed.metrics, mixed.problems) == ("grpc", "", ())


@pytest.mark.parametrize(
    ("name", "arg", "below", "parent_based"),
    [
        ("", "", EVERY, True),
        ("always_on", "", EVERY, False),
        ("parentbased_always_off", "", 0, True),
        ("always_off", "", 0, False),
        ("traceidratio", "0.25", EVERY // 4, False),
        ("parentbased_traceidratio", "0", 0, True),
        ("parentbased_traceidratio", "", EVERY, True),
    ],
)
def test_samplers(name, arg, below, parent_based):
    found = wanted({**ENDPOINT, "OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": arg})
    assert found is not None
    assert found.problems == ()
    assert found.sampler == Sampler(below=below, parent_based=parent_based)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER=jaeger_remote"),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "OTEL_TRACES_SAMPLER_ARG=2",
        ),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "nan"},
            "OTEL_TRACES_SAMPLER_ARG=nan",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL=http/json"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER=console"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "OTEL_BSP_MAX_QUEUE_SIZE=-1"),
    ],
)
def test_what_cannot_be_had_is_said_once(environ, named):
    found = wanted({**ENDPOINT, **environ})
    assert found is not None
    (problem,) = found.problems
    assert f"`{named}`" in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"cc-{TRACE}-{SPAN}-03-more", True),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("", None),
    ],
)
def test_traceparents(text, expected):
    known = Parent(trace_id=int(TRACE, 16), span_id=int(SPAN, 16), sampled=bool(expected))
    assert parent_of(text) == (None if expected is None else known)
