"""Telemetry of the kernel: spans and metrics for a collector that speaks OTLP.

`settings` reads the standard environment variables, `recorder` counts calls and chooses those that get a span; `export`, `spans`
and `metrics` are the only modules that import OpenTelemetry. Where nothing asks for telemetry `Core.telemetry` is None and none
of them is loaded.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfence.kernel.telemetry.settings import Wanted, wanted

if TYPE_CHECKING:
    from ringfence.kernel.core import Core

log = logging.getLogger(__name__)

INSTALL = "pip install 'ringfence[telemetry]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What became of the wish for telemetry.

    Attributes:
        traces: whether spans are sent.
        metrics: whether metrics are sent.
        problems: what was asked for and can't be had, one line each.
    """

    traces: bool = False
    metrics: bool = False
    problems: tuple[str, ...] = ()


def open_telemetry(
    core: Core, instance: str, stack: AsyncExitStack, environ: Mapping[str, str] = os.environ
) -> Telemetry:
    """Turn telemetry on where the environment asks for it; what is missing is a warning, for no call depends on it.

    Args:
        core: gets its `telemetry`; the journal gets its `flushed`.
        instance: names this kernel among others.
        stack: sends the rest and takes it apart.
        environ: the standard variables.
    """
    asked = wanted(environ)
    if asked is None:
        return Telemetry()
    problems = list(asked.problems)
    running = bool(asked.traces or asked.metrics)
    if running:
        try:
            _start(core, asked, instance, stack)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("opentelemetry"):
                raise
            running = False
            problems.append(
                f"OTEL_* variables ask for telemetry, and OpenTelemetry is not installed: {INSTALL}"
            )
        except (ValueError, OSError) as error:
            running = False
            problems.append(f"the OTEL_* variables can't be followed: {str(error).splitlines()[0]}")
    for problem in problems:
        log.warning("telemetry: %s", problem)
    return Telemetry(
        traces=running and bool(asked.traces),
        metrics=running and bool(asked.metrics),
        problems=tuple(problems),
    )


def _start(core: Core, asked: Wanted, instance: str, stack: AsyncExitStack) -> None:
    export = importlib.import_module("ringfence.kernel.telemetry.export")
    recorder = importlib.import_module("ringfence.kernel.telemetry.recorder").Recorder(
        asked.sampler if asked.traces else None, asked.queue_spans
    )
    stack.push_async_callback(export.Export(core, recorder, asked, instance).close)
    core.telemetry = recorder
    core.journal.flushed = recorder.flushed
