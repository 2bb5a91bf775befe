"""OpenTelemetry's exporters, their threads, and what they may say in the log."""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import time
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from ringfence.kernel.config import VERSION
from ringfence.kernel.core import Core
from ringfence.kernel.telemetry.metrics import Durations, observe
from ringfence.kernel.telemetry.recorder import Recorder
from ringfence.kernel.telemetry.settings import GRPC, Wanted
from ringfence.kernel.telemetry.spans import SpanSender

log = logging.getLogger("ringfence.kernel.telemetry")

SCOPE = "ringfence.kernel"
CLOSE_S = 3.0
"""How long a kernel that ends waits for its last spans and metrics, each."""
LINE_EVERY_S = 60.0
"""At most one line of the log in this time says that telemetry can't be delivered."""


class Export:
    """The running exporters of one kernel."""

    def __init__(self, core: Core, recorder: Recorder, wanted: Wanted, instance: str) -> None:
        self._quiet = _Quiet()
        resource = Resource(
            {"service.name": "ringfence", "service.version": VERSION, "service.instance.id": instance}
        ).merge(OTELResourceDetector().detect())
        self._sender: SpanSender | None = None
        self._provider: MeterProvider | None = None
        if wanted.traces:
            exporter = _of(wanted.traces, "trace", "OTLPSpanExporter")()
            scope = InstrumentationScope(SCOPE, VERSION)
            self._sender = SpanSender(recorder, exporter, resource, scope, wanted)
        if wanted.metrics:
            reader = PeriodicExportingMetricReader(_metric_exporter(wanted.metrics, recorder))
            self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
            observe(self._provider, SCOPE, VERSION, core, recorder)

    async def close(self) -> None:
        """Send the rest, as far as the time allows."""
        await asyncio.to_thread(self._close)
        self._quiet.close()

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close(CLOSE_S)
        if self._provider is not None:
            # It joins a thread that may be in the middle of a try: the process does not wait for it.
            ending = threading.Thread(target=self._provider.shutdown, args=(CLOSE_S * 1000,), daemon=True)
            ending.start()
            ending.join(CLOSE_S)


def _of(protocol: str, signal: str, name: str) -> Any:
    way = "grpc" if protocol == GRPC else "http"
    module = {
        ("http", "trace"): "http.trace_exporter",
        ("http", "metric"): "http.metric_exporter",
        ("grpc", "trace"): "grpc.trace_exporter",
        ("grpc", "metric"): "grpc.metric_exporter",
    }[way, signal]
    return getattr(importlib.import_module(f"opentelemetry.exporter.otlp.proto.{module}"), name)


def _metric_exporter(protocol: str, recorder: Recorder) -> Any:
    """An exporter that adds the recorder's histograms to each collection."""
    durations = Durations(recorder)
    base = _of(protocol, "metric", "OTLPMetricExporter")

    def export(self: Any, metrics_data: MetricsData, timeout_millis: float = 10_000, **more: Any) -> Any:
        return base.export(self, durations.added_to(metrics_data), timeout_millis, **more)

    return type("MetricExporter", (base,), {"export": export})()


class _Quiet(logging.Handler):
    """Lets through one line a minute of what OpenTelemetry logs: a collector that is away is no news each time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last = -LINE_EVERY_S
        self._held_back = 0
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def close(self) -> None:
        """Leave the logger as it was."""
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on, or count it."""
        now = time.monotonic()
        if now - self._last < LINE_EVERY_S:
            self._held_back += 1
            return
        self._last = now
        more = f" ({self._held_back} more like it)" if self._held_back else ""
        self._held_back = 0
        line = record.getMessage().splitlines() or [""]
        log.warning("telemetry can't be delivered, calls go on without: %s%s", line[0][:500], more)
