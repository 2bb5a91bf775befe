"""Takes in what a command writes and measures what it changes, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ringfence.sandbox.docker.layers import closed_bytes
from ringfence.sandbox.native.job import STDERR_NAME, STDOUT_NAME
from ringfence.sandbox.native.meters import DiskMeter
from ringfence.sandbox.native.output import Sink

_OUTPUT_SHARE = 4
"""Each output file of a command may take this part of its disk limit."""


class _UpperMeter(DiskMeter):
    """Sees what lies in closed directories too: an ordinary user's kernel may not read them as they are."""

    def __init__(self, limit: int, upper: str, proc: int, workspace: int, outside: Callable[[], int]) -> None:
        super().__init__(limit, upper, proc, workspace, outside)
        self._upper = upper

    def measure(self) -> int:
        """Bytes on disk."""
        return super().measure() + (closed_bytes(self._upper) if os.geteuid() != 0 else 0)


class Watch:
    """A command's streams and its disk space.

    Args:
        scratch: where its output files go.
        limit_bytes: bound of what it changes and writes.

    Attributes:
        writers: descriptors for the command's standard output and standard error, until they are handed over.
    """

    def __init__(self, scratch: Path, limit_bytes: int) -> None:
        self._limit = limit_bytes
        share = limit_bytes // _OUTPUT_SHARE
        self._sinks = [Sink(str(scratch / name), share) for name in (STDOUT_NAME, STDERR_NAME)]
        self.writers: tuple[int, ...] = tuple(sink.take_writer() for sink in self._sinks)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._meter: _UpperMeter | None = None
        self._views: Sequence[int] = ()
        self._thread: threading.Thread | None = None

    @property
    def totals(self) -> list[int]:
        """How many bytes were written to each."""
        return [sink.total_bytes for sink in self._sinks]

    def handed_over(self) -> None:
        """The command holds the writing ends; here they are closed."""
        writers, self.writers = self.writers, ()
        for writer in writers:
            os.close(writer)

    def start(self, upper: Path, views: Sequence[int], exceeded: Callable[[], None]) -> None:
        """Begin to read and to measure.

        Args:
            upper: the upper layer.
            views: descriptors of the command's /proc and workspace, which become this object's; none where the engine's
                runtime gives none, and then removed files that are still open go uncounted.
            exceeded: called once, in the thread, when the limit is passed.
        """
        self._views = views
        if len(views) == 2:  # noqa: PLR2004
            self._meter = _UpperMeter(self._limit, str(upper), views[0], views[1], self._kept)
        self._thread = threading.Thread(
            target=self._run, args=(exceeded,), name="ringfence command", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """The command is gone: take what is left in the pipes and close everything. Blocks."""
        if self._thread is not None:
            os.write(self._wake_write, b"x")
            self._thread.join()
        self.handed_over()
        for sink in self._sinks:
            sink.finish()
        for descriptor in (self._wake_read, self._wake_write, *self._views):
            os.close(descriptor)

    def _kept(self) -> int:
        return sum(sink.kept_bytes for sink in self._sinks)

    def _run(self, exceeded: Callable[[], None]) -> None:
        poll = select.poll()
        takers = {sink.source: sink.take for sink in self._sinks}
        for descriptor in (self._wake_read, *takers):
            poll.register(descriptor, select.POLLIN)
        told = False
        while True:
            due = None
            if self._meter is not None and not told:
                due = max(self._meter.due - time.monotonic(), 0) * 1000 + 1
            for descriptor, _ in poll.poll(due):
                if descriptor == self._wake_read:
                    return
                if not takers[descriptor]():
                    poll.unregister(descriptor)
            if self._meter is not None and not told and time.monotonic() >= self._meter.due:
                with contextlib.suppress(OSError):  # it ends under our eyes
                    told = self._meter.exceeded()
                if told:
                    exceeded()
