"""How a command ends: exit codes, and the one error type that becomes a line on standard error."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit code says. Scripts rely on the numbers."""

    OK = 0
    UNWELL = 1
    """The thing asked about is not well: an agent failed, a chain is broken, doctor found a gap."""
    USAGE = 2
    """Usage, or a bad manifest."""
    DENIED = 3
    MISSING = 4
    """No such agent, step or point."""
    CONFLICT = 5
    UNREACHABLE = 6
    """No kernel reachable."""
    INTERRUPTED = 130
    """Ctrl-C, as shells report it."""
    PIPE = 141
    """Whoever read the output went away, as shells report it."""


class ConsoleError(Exception):
    """Ends a command with an exit code and a message for people.

    The message is one lower-case line: what, with input in backticks, then what to do. A manifest may have
    several problems; then each is a line of its own.
    """

    def __init__(self, message: str, code: int = ExitCode.UNWELL) -> None:
        super().__init__(message)
        self.message = message
        self.code = int(code)


class ReaderGone(Exception):
    """Whoever read standard output went away."""


def os_error_text(error: OSError) -> str:
    """Say in lower case why the operating system refused, such as `no such file or directory`."""
    return (error.strerror or str(error)).lower()
