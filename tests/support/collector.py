"""A collector that receives OTLP over real HTTP or gRPC and keeps what it decoded."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb

REQUESTS = {"traces": trace_pb.ExportTraceServiceRequest, "metrics": metrics_pb.ExportMetricsServiceRequest}
ANSWERS = {"traces": trace_pb.ExportTraceServiceResponse, "metrics": metrics_pb.ExportMetricsServiceResponse}
SERVICES = {
    "traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
}


def value_of(value: Any) -> Any:
    """A protobuf `AnyValue` as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


def attributes_of(pairs: Any) -> dict[str, Any]:
    found = {pair.key: value_of(pair.value) for pair in pairs}
    assert len(found) == len(pairs), "an attribute comes twice"
    return found


class Collector:
    """What has arrived."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[str, list[Any]] = {"traces": [], "metrics": []}
        self.endpoint = ""

    def take(self, signal: str, request: Any) -> None:
        with self._lock:
            self._arrived[signal].append(request)

    def arrived(self, signal: str) -> list[Any]:
        with self._lock:
            return list(self._arrived[signal])

    @property
    def spans(self) -> list[Any]:
        """Every span, in the order of arrival."""
        return [
            span
            for request in self.arrived("traces")
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self, signal: str) -> dict[str, Any]:
        request = self.arrived(signal)[0]
        first = request.resource_spans[0] if signal == "traces" else request.resource_metrics[0]
        return attributes_of(first.resource.attributes)

    def last(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """The points of a metric as they came last, with their attributes; [] before the first."""
        for request in reversed(self.arrived("metrics")):
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        if metric.name == name:
                            data = getattr(metric, metric.WhichOneof("data"))
                            return [(attributes_of(point.attributes), point) for point in data.data_points]
        return []

    def numbers(self, name: str) -> dict[tuple[Any, ...], float]:
        """The same as numbers by the values of their attributes, in order of the attributes' names."""
        return {
            tuple(value for _, value in sorted(labels.items())): getattr(point, point.WhichOneof("value"))
            for labels, point in self.last(name)
        }

    @property
    def names(self) -> set[str]:
        """Names of all metrics that have arrived."""
        return {
            metric.name
            for request in self.arrived("metrics")
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def temporalities(self, name: str) -> set[int]:
        return {
            getattr(metric, metric.WhichOneof("data")).aggregation_temporality
            for request in self.arrived("metrics")
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        }


@contextlib.contextmanager
def http_collector() -> Iterator[Collector]:
    """One that listens on loopback and takes OTLP/HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            signal = self.path.removeprefix("/v1/")
            known = signal in REQUESTS and self.headers["content-type"] == "application/x-protobuf"
            if known:
                collector.take(signal, REQUESTS[signal].FromString(body))
            answer = ANSWERS[signal]().SerializeToString() if known else b""
            self.send_response(200 if known else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collector]:
    """One that takes OTLP/gRPC."""
    collector = Collector()

    def method(signal: str) -> Any:
        def export(request: Any, _context: Any) -> Any:
            collector.take(signal, request)
            return ANSWERS[signal]()

        return grpc.unary_unary_rpc_method_handler(
            export,
            request_deserializer=REQUESTS[signal].FromString,
            response_serializer=ANSWERS[signal].SerializeToString,
        )

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(name, {"Export": method(signal)})
            for signal, name in SERVICES.items()
        ]
    )
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
