"""Files that commands write: whole or not at all, and never over what is no regular file."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Generator

STANDARD_OUTPUT = Path("-")

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def no_file(path: Path) -> str:
    """What stands at a path where it is no regular file, such as `a device`; empty: a regular file, or nothing.

    Links are not followed.

    Raises:
        OSError: the path can't be looked at.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISREG(mode):
        return ""
    return next((kind for fits, kind in _KINDS if fits(mode)), "no regular file")


@contextlib.contextmanager
def whole_file(target: Path) -> Generator[IO[bytes]]:
    """A file that appears under its name when the block ends well, readable by its owner alone.

    A regular file of that name is replaced then, and stays as it is when the block fails. `-` is standard output.

    Raises:
        ConsoleError: something else than a regular file has that name (exit 2), or it can't be written (exit 1).
    """
    if target == STANDARD_OUTPUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = target.absolute()
    try:
        if kind := no_file(target):
            raise ConsoleError(
                f"`{safe(target)}` is {kind} and is not replaced; name a file, or `-` for standard output",
                ExitCode.USAGE,
            )
        handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise ConsoleError(
            f"`{safe(target)}` can't be written: {os_error_text(error)}; give another file"
        ) from None
