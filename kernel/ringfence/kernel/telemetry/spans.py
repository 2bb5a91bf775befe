"""Spans out of the facts of calls, and the thread that sends them."""

from __future__ import annotations

import logging
import threading
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from ringfence.kernel.server.status import CODES
from ringfence.kernel.telemetry.recorder import ModelUse, Recorder, SpanFacts
from ringfence.kernel.telemetry.settings import Wanted

log = logging.getLogger(__name__)

SERVICE = "ringfence.v1.SyscallService"

LOOK_S = 0.1
"""How often the thread looks whether a batch is full: calls wake nobody."""

SERVER_ERRORS = frozenset({2, 4, 12, 13, 14, 15})
"""gRPC status numbers that say that the server failed; a refusal is no failure of it."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_STATUS_NUMBERS: dict[str, int] = {reason: code.value[0] for reason, code in CODES.items()}


class SpanSender:
    """Builds and sends spans in a thread of its own."""

    def __init__(
        self,
        recorder: Recorder,
        exporter: SpanExporter,
        resource: Resource,
        scope: InstrumentationScope,
        wanted: Wanted,
    ) -> None:
        self._spans = recorder.spans
        self._exporter = exporter
        self._resource = resource
        self._scope = scope
        self._batch = wanted.batch_spans
        self._delay_s = wanted.span_delay_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringfence spans", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Send what waits, as far as the time allows."""
        self._over.set()
        self._thread.join(seconds)
        self._exporter.shutdown()

    def _run(self) -> None:
        waited = 0.0
        while not self._over.wait(LOOK_S):
            waited += LOOK_S
            if len(self._spans) >= self._batch or waited >= self._delay_s:
                waited = 0.0
                self._send()
        self._send()

    def _send(self) -> None:
        for _ in range(len(self._spans) // self._batch + 1):
            count = min(len(self._spans), self._batch)
            if not count:
                return
            facts = [self._spans.popleft() for _ in range(count)]
            try:
                self._exporter.export([self._span(one) for one in facts])
            except Exception:
                # A bug here must end neither this thread nor a call.
                log.exception("%d spans can't be sent", count)

    def _span(self, facts: SpanFacts) -> ReadableSpan:
        # The SDK's tracer would build a span before the sampler is asked and again count the time; the facts are all there.
        parent = facts.parent
        model = facts.model
        number = _STATUS_NUMBERS.get(facts.reason, 0)
        failed = number in SERVER_ERRORS or (model is not None and bool(facts.reason))
        return ReadableSpan(
            name=f"chat {model.request_model}"
            if model is not None
            else f"{SERVICE}/{facts.method or facts.action}",
            context=SpanContext(facts.trace_id, facts.span_id, is_remote=False, trace_flags=_SAMPLED),
            parent=None
            if parent is None
            else SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=_SAMPLED),
            resource=self._resource,
            attributes=attributes(facts, number),
            kind=SpanKind.SERVER if model is None else SpanKind.CLIENT,
            status=Status(StatusCode.ERROR) if failed else Status(StatusCode.UNSET),
            start_time=facts.start_ns,
            end_time=facts.end_ns,
            instrumentation_scope=self._scope,
        )


def attributes(facts: SpanFacts, number: int) -> dict[str, Any]:
    """Attributes by the RPC and GenAI conventions, and Ringfence's own."""
    found: dict[str, Any] = {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": facts.method,
        "rpc.grpc.status_code": number,
        "error.type": facts.reason,
        "ringfence.agent": facts.agent,
        "ringfence.agent.name": facts.name,
        "ringfence.step": facts.step,
        "ringfence.lane": facts.lane,
        "ringfence.lane_step": facts.lane_step,
        "ringfence.branch": facts.branch,
        "ringfence.action": facts.action,
        "ringfence.resource": facts.resource,
        "ringfence.effect": facts.effect,
        "ringfence.verdict": facts.verdict,
        "ringfence.rule": facts.rule,
        "ringfence.outcome": facts.outcome,
        "ringfence.replayed": facts.replayed,
        **({} if facts.model is None else _model(facts.model)),
    }
    return {name: value for name, value in found.items() if value not in ("", None, ())}


def _model(model: ModelUse) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model.request_model,
        "gen_ai.response.model": model.response_model,
        "gen_ai.response.finish_reasons": model.finish_reasons,
        "gen_ai.usage.input_tokens": model.input_tokens,
        "gen_ai.usage.output_tokens": model.output_tokens,
        "ringfence.usage.estimated": model.estimated,
        "ringfence.usage.cost_usd": model.cost_usd,
    }
