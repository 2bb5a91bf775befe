"""What telemetry costs a call: off, metrics alone, spans for one call in a hundred, and for all of them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.calls import KERNEL_CPU, generate
from bench.host import Bench, cpu_seconds, median, pin, serving
from bench.report import Section

STREAMS = 32
SETTINGS: dict[str, dict[str, str] | None] = {
    "off": None,
    "metrics, no spans": {"OTEL_TRACES_SAMPLER": "always_off"},
    "spans of 1 %": {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    "spans of all": {"OTEL_TRACES_SAMPLER": "always_on"},
}


def measure(bench: Bench) -> Section:
    """A kernel for each setting; they are driven in turn, so that each meets the same minutes."""
    section = Section(
        name="telemetry",
        title=f"durable calls at {STREAMS} streams with telemetry to a collector on the same machine, beside none",
    )
    home = bench.directory("telemetry")
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(_collecting())
        pids: dict[str, int] = {}
        for number, (name, environment) in enumerate(SETTINGS.items()):
            bench.say(f"starting a kernel: {name}")
            more = (
                {} if environment is None else {**environment, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
            )
            kernel, told = stack.enter_context(
                serving(
                    "bench.serve",
                    *("--data", str(home / f"k{number}"), "--agents", str(STREAMS)),
                    log=home / f"serve{number}.log",
                    env={"OTEL_METRIC_EXPORT_INTERVAL": "1000", "OTEL_SERVICE_NAME": name, **more},
                )
            )
            pin(kernel.pid, KERNEL_CPU)
            pids[name] = kernel.pid
            (home / f"{name}.json").write_text(json.dumps(told["targets"]))
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
        for number in range(3 if bench.quick else 9):
            bench.say(f"round {number + 1}")
            for name, pid in pids.items():
                before = cpu_seconds(pid)
                report = generate(home / f"{name}.json", STREAMS, bench.seconds(1.0, 3.0))
                report["us"] = (cpu_seconds(pid) - before) / report["calls"] * 1e6
                rounds[name].append(report)
    spans = collector.spans()
    for name, reports in rounds.items():
        made = sum(report["calls"] for report in reports)
        section.rows.append(
            {
                "telemetry": name,
                "calls/s": median([r["calls_per_s"] for r in reports]),
                "µs": median([r["us"] for r in reports]),
                "of off": median(
                    [r["us"] / off["us"] for r, off in zip(reports, rounds["off"], strict=True)]
                ),
                "spans/call": spans.get(name, 0) / made,
            }
        )
    section.checks["no spans without being asked"] = not spans.get("off") and not spans.get(
        "metrics, no spans"
    )
    section.checks["spans arrive"] = bool(spans.get("spans of 1 %")) and bool(spans.get("spans of all"))
    section.notes.append(
        "µs: processor time of the kernel's process a call, the exporters' threads included; `of off`: medians of pairs"
    )
    section.notes.append("metrics are sent every second here, sixty times as often as by default")
    return section


class _Collector:
    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []

    def spans(self) -> dict[str, int]:
        """Spans that arrived by service."""
        found: dict[str, int] = {}
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                (name,) = [
                    a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                ]
                found[name] = found.get(name, 0) + sum(len(scope.spans) for scope in resource.scope_spans)
        return found


@contextlib.contextmanager
def _collecting() -> Iterator[_Collector]:
    """Takes whatever comes and decodes it when the measurement is over."""
    collector = _Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                collector.bodies.append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
