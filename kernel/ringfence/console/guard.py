"""The last line of defence: whatever a command raises becomes one line on standard error and an exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Self

import click
from ringfence.console.errors import ConsoleError, ExitCode, ReaderGone, os_error_text
from ringfence.console.text import safe

if TYPE_CHECKING:
    from types import TracebackType

_QUOTED = re.compile(r"'([^'`]*)'")


def complain(message: str) -> None:
    """Print an error, each of its lines prefixed. A closed standard error changes nothing else."""
    with contextlib.suppress(OSError):
        for line in message.splitlines() or [""]:
            click.echo(f"ringfence: {safe(line)}", err=True)


class Guard:
    """Context manager that turns exceptions into `code` and a line on standard error."""

    def __init__(self) -> None:
        self.code = int(ExitCode.OK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Explain the error. `SystemExit` passes."""
        del kind, trace
        if error is None:
            return True
        if isinstance(error, SystemExit | GeneratorExit):
            return False
        self.code = _explain(error)
        return True


def _explain(error: BaseException) -> int:
    if isinstance(error, ConsoleError):
        complain(error.message)
        return error.code
    if isinstance(error, click.UsageError):
        complain(_usage_line(error))
        return ExitCode.USAGE
    if isinstance(error, click.ClickException):
        complain(_lower(error.format_message()))
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return ExitCode.INTERRUPTED
    if isinstance(error, BrokenPipeError | ReaderGone):
        _abandon_output()
        return ExitCode.PIPE
    if isinstance(error, OSError):
        place = f"`{error.filename}`: " if error.filename else ""
        complain(f"{place}{os_error_text(error)}")
        return ExitCode.UNWELL
    return _report_bug(error)


def _usage_line(error: click.UsageError) -> str:
    text = _QUOTED.sub(r"`\1`", _lower(error.format_message())).rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "ringfence"
    return f"{' '.join(text.split())}; see `{command} --help`"


def _lower(text: str) -> str:
    """The text with a small first letter, unless its first word is a name such as `JSON`."""
    first = text.partition(" ")[0]
    return text if first[1:] != first[1:].lower() else text[:1].lower() + text[1:]


def _report_bug(error: BaseException) -> int:
    summary = " ".join(str(error).split())
    what = f"{type(error).__name__}: {summary}" if summary else type(error).__name__
    try:
        where = f"the details are in `{_write_trace(error)}`"
    except OSError as problem:
        where = f"the details could not be written: {os_error_text(problem)}"
    complain(f"this is a bug in ringfence: {what}; {where}")
    return ExitCode.UNWELL


def _write_trace(error: BaseException) -> str:
    """Keep the traceback in a file of this user alone: the user's state directory, else the temporary one."""
    text = "".join(traceback.format_exception(error)).encode(errors="backslashreplace")
    home = os.environ.get("HOME") or tempfile.gettempdir()
    folder = Path(os.environ.get("XDG_STATE_HOME") or f"{home}/.local/state") / "ringfence"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix="bug-", suffix=".log", dir=folder)
    except OSError:
        handle, name = tempfile.mkstemp(prefix="ringfence-bug-", suffix=".log")
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return name


def _abandon_output() -> None:
    """Send what is still buffered nowhere: flushing it at exit would fail a second time, loudly."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)
