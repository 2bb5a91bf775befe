"""The kernel's own log: lines on its standard error, or `kernel.log` in the data directory, which turns over by size.

Standard output and error of a kernel in the background go to the same file, so that what the interpreter or a library
writes at the end of a kernel is there too. After a turn they follow to the new file.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
import time
from io import TextIOWrapper
from pathlib import Path

from ringfence.kernel.logs import LOG_BYTES_MAX

NAME = "kernel.log"

RECORD_CHARS_MAX = 16 << 10
"""Longest record; what is beyond is left out, and says so."""

SAME_PLACE_MAX = 20
"""Records from one place in the code within a minute; then they are counted until it is over."""

MINUTE_S = 60.0

PLACE = f"`{NAME}` in the kernel's data directory, or the output of `ringfence up`"
"""Where the log is, as an agent may know it: no path of this host."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Bounded(logging.Formatter):
    """Cuts a record that is too long."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        beyond = len(text) - RECORD_CHARS_MAX
        if beyond <= 0:
            return text
        half = RECORD_CHARS_MAX // 2
        return f"{text[:half]}\n… {beyond} characters left out …\n{text[-half:]}"


class Calm(logging.Filter):
    """Lets a bounded number of records from each place in the code through: no flood hides what else is said."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; the first one after a flood says how many were not."""
        place = (record.pathname, record.lineno)
        now = time.monotonic()
        since, count = self._seen.get(place, (now, 0))
        if now - since >= MINUTE_S:
            if count > SAME_PLACE_MAX:
                record.msg = f"{record.getMessage()} ({count - SAME_PLACE_MAX} more like this were left out)"
                record.args = None
            since, count = now, 0
        self._seen[place] = (since, count + 1)
        return count < SAME_PLACE_MAX


class _Turning(logging.handlers.RotatingFileHandler):
    """`kernel.log`, private to its owner, with the kernel's standard output and error behind it."""

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return os.fdopen(fd, "a", encoding="utf-8", errors="backslashreplace")

    def doRollover(self) -> None:  # noqa: N802 - the base's name
        """Turn over: the file becomes `kernel.log.1`, in place of the one before."""
        super().doRollover()
        for standard in (sys.stdout, sys.stderr):
            standard.flush()
        if self.stream is not None:
            for number in (1, 2):
                os.dup2(self.stream.fileno(), number)


def set_up(data: Path) -> None:
    """Send what the kernel's code logs to where its standard error goes; a file `kernel.log` is kept in bounds."""
    path = data / NAME
    handler: logging.Handler = logging.StreamHandler()
    if _is_our_output(path):
        handler = _Turning(path, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8")
        _place[:] = [f"`{path}`"]
    handler.setFormatter(_Bounded(_FORMAT))
    handler.addFilter(Calm())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("ringfence").setLevel(logging.INFO)


_place: list[str] = []


def place() -> str:
    """Where the log is, for an operator of this host."""
    return _place[0] if _place else "the output of `ringfence up`"


def _is_our_output(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), path.stat())
    except OSError:
        return False
