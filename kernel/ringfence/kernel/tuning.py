"""What the interpreter and gRPC are told at the kernel's start, so that they leave the event loop its time."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

COLLECT_AFTER_OBJECTS = 50_000
"""New container objects before the collector looks: above what calls in flight hold at any time."""


def calm_collector() -> None:
    """Leave what is imported to itself, and look for cycles among calls rarely: a call makes none.

    At the interpreter's default of 700 new objects the collector runs through all calls in flight many times for every
    flush; that took a tenth of the kernel's processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 20, 50)


def let_helpers_wait() -> None:
    """Keep gRPC's polling thread from interrupting the event loop each time that a reply wakes it.

    As a batch thread it runs when the loop has nothing to do, and hands over many events at once: a fifth of the switches.
    """
    for path in Path("/proc/self/task").iterdir():
        if int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(path.name), os.SCHED_BATCH, os.sched_param(0))
