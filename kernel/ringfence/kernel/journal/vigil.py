"""Waiting awake: what a lone call saves by it is the waking of a processor that has gone to sleep.

A batch of one row is answered by the database within a few tenths of a millisecond, and while nothing else happens the event loop would
put its processor to sleep for just that long. To wake it again takes tens of microseconds, and after it the caches are
cold. So the loop looks at its own descriptors instead, for a moment, and goes on as soon as there is anything.

What comes from outside ends it: calls, threads, signals. A timer, or a callback that another one asked for meanwhile, may wait that moment.

INVARIANT: only on a processor that nobody else wants. A loop that has to wait for its turn there sleeps as ever: who sleeps is preferred by
Linux when it wakes, and who was awake is not.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

AWAKE_S: Final = 300e-6
"""How long it waits at most; a commit on a disk of its own takes about half as long."""

TAKEN_S: Final = 50e-6
"""Between two looks; more of it means that somebody else had the processor."""

SPAN: Final = 64
"""So many waits are judged together."""

CROWDED: Final = 0.25
"""Share of its time on the processor or in the line for it that a thread stands in that line; more of it means that others want it."""

VAIN_MAX: Final = SPAN // 4
"""So many waits of a span may be in vain."""

REST_MAX: Final = 16
"""Spans without it after one that did not do well: one at first, and twice as many each time."""


class Ran(NamedTuple):
    """A thread so far.

    Attributes:
        ran: nanoseconds on a processor.
        stood: nanoseconds in the line for one.
    """

    ran: int
    stood: int


class Vigil:
    """Short waits of one event loop.

    Args:
        ready: whether the loop has anything to do.
        ran: of the loop's thread.
        clock: seconds.
    """

    def __init__(
        self,
        ready: Callable[[], object],
        ran: Callable[[], Ran],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ready = ready
        self._ran = ran
        self._clock = clock
        self._before = ran()
        self._left = SPAN
        self._vain = 0
        self._rest = 0
        # The first span only looks.
        self._resting = 1

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Vigil | None:
        """One for the loop of this thread.

        Returns:
            None: the loop is of another kind than the kernel's, there is but one processor, or Linux doesn't tell how crowded it is.
        """
        descriptor: Any = getattr(loop, "_get_backend_id", None)
        if descriptor is None or (os.cpu_count() or 1) < 2:  # noqa: PLR2004 - the database needs one meanwhile
            return None
        try:
            file = _Schedstat(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
            file.ran()
        except (OSError, ValueError):
            return None
        poll = select.poll()
        poll.register(descriptor(), select.POLLIN)
        return cls(lambda: poll.poll(0), file.ran)

    def keep(self) -> bool:
        """Wait until the loop has something to do, or it takes too long; whether it has. Or do nothing."""
        self._left -= 1
        if not self._left:
            self._judge()
        if self._resting:
            return False
        ready, clock = self._ready, self._clock
        now = clock()
        end = now + AWAKE_S
        while now < end:
            if ready():
                return True
            before, now = now, clock()
            if now - before > TAKEN_S:
                break
        self._vain += 1
        return False

    def _judge(self) -> None:
        before, now = self._before, self._ran()
        ran, stood = now.ran - before.ran, now.stood - before.stood
        crowded = stood > CROWDED * (ran + stood)
        if crowded or self._vain > VAIN_MAX:
            self._rest = self._resting = min(max(1, 2 * self._rest), REST_MAX)
        elif self._resting:
            self._resting -= 1
        else:
            self._rest >>= 1
        self._before, self._left, self._vain = now, SPAN, 0


class _Schedstat:
    """What Linux tells of one thread; closed with the last reference to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def ran(self) -> Ran:
        on, line, _ = os.pread(self._descriptor, 100, 0).split()
        return Ran(int(on), int(line))

    def __del__(self) -> None:
        os.close(self._descriptor)
