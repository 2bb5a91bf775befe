"""Says on a terminal how far long work is: one line that is drawn over itself and gone at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from ringfence.console.durations import size, span
from ringfence.console.render import columns_available
from ringfence.console.text import cut, safe

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import TracebackType

_QUIET_S = 0.5
"""Work that is over by then shows nothing."""
_REDRAW_S = 0.2
_BAR_COLUMNS = 20
_ERASE = "\r\x1b[K"


class Progress:
    """Context manager around long work.

    Nothing is shown in a pipe, with `--json` or on a terminal that can't move its cursor. The line goes to
    standard error, so that not even half of it could become part of a result.
    """

    def __init__(self, what: str, *, total: int | None = None, unit: str = "", shown: bool = True) -> None:
        """Begin nothing yet.

        Args:
            what: the work, such as `uploading`.
            total: how much there is to do, where that is known.
            unit: noun of what is counted; empty: bytes.
            shown: whether the command wants it at all.
        """
        self._what, self._total, self._unit = what, total, unit
        self._done: int | None = None
        self.shown = shown and possible()
        """Whether anything is shown: what only serves the line can be spared else."""
        self._began = time.monotonic()
        self._over = threading.Event()
        # Held while the line or something in its place is written.
        self._pen = threading.Lock()
        self._drawn = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Draw from now on, after a moment."""
        self._began = time.monotonic()
        if self.shown:
            self._thread = threading.Thread(target=self._draw_on, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the line away."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        with self._pen:
            self._erase()

    def add(self, number: int = 1) -> None:
        """Count what is done."""
        self._done = (self._done or 0) + number

    def now(self, what: str, *, total: int | None = None) -> None:
        """Say what is being done from here on, and count anew."""
        self._what, self._total, self._done = what, total, None

    def counted(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Pass parts on and count their bytes."""
        for part in parts:
            self.add(len(part))
            yield part

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """While something else is written: the line is out of its way."""
        with self._pen:
            self._erase()
            yield

    def line(self) -> str:
        """The line as it is now."""
        elapsed_s = time.monotonic() - self._began
        parts = [self._what]
        if self._done is not None and self._total:
            share = min(1.0, self._done / self._total)
            full = int(share * _BAR_COLUMNS)
            parts.append(f"[{'#' * full}{'.' * (_BAR_COLUMNS - full)}] {int(share * 100):3d}%")
        if self._done is not None:
            # What a directory holds is counted before it is read: more may come than was announced.
            of = f" of {self._amount(self._total)}" if self._total and self._done <= self._total else ""
            parts.append(f"{self._amount(self._done)}{of}")
            if not self._unit and elapsed_s > 1:
                parts.append(f"{size(self._done / elapsed_s)}/s")
        parts.append(span(elapsed_s * 1000))
        return safe("  ".join(parts))

    def _amount(self, number: int) -> str:
        return f"{number} {self._unit}" if self._unit else size(number)

    def _draw_on(self) -> None:
        wait_s = _QUIET_S
        while not self._over.wait(wait_s):
            wait_s = _REDRAW_S
            with self._pen:
                self._write(_ERASE + cut(self.line(), columns_available() - 1))
                self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            self._write(_ERASE)
            self._drawn = False

    def _write(self, text: str) -> None:
        # A terminal that went away is no reason to end the work.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def possible() -> bool:
    """Whether a person watches on a terminal that can move its cursor."""
    fancy = os.environ.get("TERM", "dumb") != "dumb"
    return fancy and sys.stdout.isatty() and sys.stderr.isatty()
