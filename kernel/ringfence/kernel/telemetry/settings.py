"""What the standard `OTEL_*` environment variables ask of the kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

EVERY = 1 << 64
"""`Sampler.below` that takes every call: decisions are made on 64 random bits."""

HTTP, GRPC = "http/protobuf", "grpc"
DEFAULT_SAMPLER = "parentbased_always_on"
QUEUE_SPANS_DEFAULT = 2048
BATCH_SPANS_DEFAULT = 512
SPAN_DELAY_MS_DEFAULT = 5000

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Which calls get a span.

    Attributes:
        below: calls whose 64 random bits are below it; 0 none, `EVERY` all.
        parent_based: whether an agent with a `TRACEPARENT` does as that says.
    """

    below: int
    parent_based: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The trace that an agent's calls belong to."""

    trace_id: int
    span_id: int
    sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Telemetry that was asked for.

    Attributes:
        traces: OTLP protocol of spans, empty: no spans.
        metrics: OTLP protocol of metrics, empty: no metrics.
        sampler: which calls get a span.
        queue_spans: spans that wait for the exporter at most; further ones are dropped and counted.
        batch_spans: spans in one request at most.
        span_delay_s: longest wait until a span is sent.
        problems: what was asked for and can't be had, one line each.
    """

    traces: str
    metrics: str
    sampler: Sampler
    queue_spans: int
    batch_spans: int
    span_delay_s: float
    problems: tuple[str, ...]


def wanted(environ: Mapping[str, str]) -> Wanted | None:
    """Read the variables. None: nothing asks for telemetry, or `OTEL_SDK_DISABLED` forbids it."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    asked = [signal for signal in ("TRACES", "METRICS") if _endpoint(environ, signal)]
    if not asked:
        return None
    problems: list[str] = []
    protocols = {signal: _protocol(environ, signal, problems) for signal in asked}
    return Wanted(
        traces=protocols.get("TRACES", ""),
        metrics=protocols.get("METRICS", ""),
        sampler=_sampler(environ, problems),
        queue_spans=_number(environ, "OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS_DEFAULT, problems),
        batch_spans=_number(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS_DEFAULT, problems),
        span_delay_s=_number(environ, "OTEL_BSP_SCHEDULE_DELAY", SPAN_DELAY_MS_DEFAULT, problems) / 1000,
        problems=tuple(dict.fromkeys(problems)),
    )


def parent_of(traceparent: str) -> Parent | None:
    """Read a W3C `traceparent`; None where it is not a valid one, as the standard wants it."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id=trace_id, span_id=span_id, sampled=bool(int(found[4], 16) & 1))


def _endpoint(environ: Mapping[str, str], signal: str) -> str:
    return (
        environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "").strip()
        or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    )


def _protocol(environ: Mapping[str, str], signal: str, problems: list[str]) -> str:
    """The protocol of one signal; empty where its exporter is `none` or one that isn't there."""
    name = f"OTEL_{signal}_EXPORTER"
    exporters = environ.get(name, "").strip().lower() or "otlp"
    if exporters == "none":
        return ""
    if exporters != "otlp":
        problems.append(
            f"`{name}={exporters}` is not there: this kernel exports by otlp alone; use `otlp` or `none`"
        )
        return ""
    name = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    protocol = environ.get(name, "").strip()
    if not protocol:
        name = "OTEL_EXPORTER_OTLP_PROTOCOL"
        protocol = environ.get(name, "").strip() or HTTP
    if protocol not in (HTTP, GRPC):
        problems.append(f"`{name}={protocol}` is not there: use `{HTTP}` or `{GRPC}`")
        return ""
    return protocol


def _sampler(environ: Mapping[str, str], problems: list[str]) -> Sampler:
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or DEFAULT_SAMPLER
    kind = name.removeprefix("parentbased_")
    parent_based = kind != name
    if kind == "always_on":
        return Sampler(below=EVERY, parent_based=parent_based)
    if kind == "always_off":
        return Sampler(below=0, parent_based=parent_based)
    if kind == "traceidratio":
        return Sampler(below=_ratio(environ, problems), parent_based=parent_based)
    problems.append(
        f"`OTEL_TRACES_SAMPLER={name}` is not there: use always_on, always_off or traceidratio, with or without "
        f"`parentbased_` before it; every call gets a span now"
    )
    return Sampler(below=EVERY, parent_based=True)


def _ratio(environ: Mapping[str, str], problems: list[str]) -> int:
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        problems.append(
            f"`OTEL_TRACES_SAMPLER_ARG={text}` is no number from 0 to 1; every call gets a span now"
        )
        return EVERY
    return round(ratio * EVERY)


def _number(environ: Mapping[str, str], name: str, default: int, problems: list[str]) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    problems.append(f"`{name}={text}` is no whole number above 0; {default} is used")
    return default
