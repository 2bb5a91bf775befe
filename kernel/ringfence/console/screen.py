"""A terminal as a whole screen: shown until it ends, put back as it was whatever happens."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from typing import TYPE_CHECKING, Self

from ringfence.console.render import columns_available

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType
    from typing import Any

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_LINE, _END_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_CC = 6
_LINES_FALLBACK = 24
_TERMINATED = 128 + signal.SIGTERM


def usable() -> bool:
    """Whether both ends are a terminal that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """The terminal of standard input and output, for frames. Keys come without echo, Ctrl-C as ever."""

    def __enter__(self) -> Self:
        """Take the terminal over."""
        self._input = sys.stdin.fileno()
        self._saved = termios.tcgetattr(self._input)
        self._readable, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._wakeup = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        # A signal without a handler of Python's own would not wake the wait.
        self._handlers: list[tuple[int, Any]] = [
            (number, signal.signal(number, handler))
            for number, handler in ((signal.SIGWINCH, _ignore), (signal.SIGTERM, _end))
        ]
        tty.setcbreak(self._input)
        mode = termios.tcgetattr(self._input)
        # A stopped process would leave the shell on this screen.
        mode[_CC][termios.VSUSP] = b"\0"
        termios.tcsetattr(self._input, termios.TCSADRAIN, mode)
        self._write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the terminal back."""
        try:
            self._write(_LEAVE)
        finally:
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._saved)
            for number, handler in self._handlers:
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._readable)
            os.close(self._woken)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of now."""
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return columns_available(), _LINES_FALLBACK
        return (found.columns or columns_available()), (found.lines or _LINES_FALLBACK)

    def draw(self, lines: Sequence[str]) -> None:
        """Show a frame. Lines must fit; those below the last one of the screen are left out."""
        _, height = self.size
        body = "\n".join(line + _END_LINE for line in lines[:height])
        self._write(_HOME + body + _END_SCREEN)

    def wait(self, seconds: float) -> str | None:
        """Wait for a key.

        Returns:
            The key; empty when the window has another size now; None when the time is over.
        """
        ready, _, _ = select.select([self._input, self._readable], [], [], max(0.0, seconds))
        if self._readable in ready:
            os.read(self._readable, 4096)
            return ""
        if self._input in ready:
            # An end of input is as good as the key that ends.
            return os.read(self._input, 64).decode(errors="replace")[:1] or "q"
        return None

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _ignore(number: int, frame: FrameType | None) -> None:
    del number, frame


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    sys.exit(_TERMINATED)
