"""Waits for the first key of a line without taking it, so that something can be told before."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

_ERASE = "\r\x1b[K"


class Keys:
    """The terminal of standard input, at a prompt."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        self._moves = os.environ.get("TERM", "dumb") != "dumb"
        self._prompt = ""

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """While nobody reads: keys are neither shown nor gathered into lines, so that the first one is seen.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        saved = termios.tcgetattr(self._input)
        tty.setcbreak(self._input, termios.TCSADRAIN)
        try:
            yield
        finally:
            termios.tcsetattr(self._input, termios.TCSADRAIN, saved)

    def pressed(self, seconds: float, prompt: str) -> bool:
        """Show a prompt and wait; whether a key was pressed, which stays to be read."""
        if not self._prompt:
            self._write(prompt)
            self._prompt = prompt
        return bool(select.select([self._input], [], [], seconds)[0])

    def tell(self, line: str) -> None:
        """Write a line in place of the prompt; the next `pressed` shows the prompt again."""
        self.clear()
        self._write(f"{line}\n")

    def clear(self) -> None:
        """Take the prompt away."""
        if self._prompt:
            self._write(_ERASE if self._moves else "\n")
            self._prompt = ""

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
