"""What the interpreter and gRPC are told at the kernel's start, so that they leave the event loop its time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

COLLECT_AFTER_OBJECTS = 50_000
"""New container objects before the collector looks: above what calls in flight hold at any time."""

QUIET_S: Final = 1.0
"""Nobody has come to rest for so long: those that did together are through."""
MANY: Final = 16
"""From so many on it is worth to give back what they had."""


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


class Rests:
    """Gives memory back to the system once many agents have come to rest: what they had while they lived is free by then.

    The allocators keep it otherwise, in pieces between what stays, until as many agents live again.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        """Begin with nobody at rest.

        Args:
            forget: lets caches go that were filled for those that rest.
        """
        self._forget = forget
        self._many = 0
        self._alarm: asyncio.TimerHandle | None = None

    def one_more(self) -> None:
        """The process of one more agent has ended."""
        self._many += 1
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(QUIET_S, self._quiet)

    def _quiet(self) -> None:
        self._alarm = None
        if self._many >= MANY:
            self._many = 0
            self._forget()
            # Not what is old already: that is looked through rarely, see `calm_collector`.
            gc.collect(1)
            give_back()


def give_back() -> None:
    """Give the system what the C library holds of free memory; nothing where it can't."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
