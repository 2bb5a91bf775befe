"""What can go wrong with the embedded server, as one line for its user."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_PREFIX = re.compile(r"^.*?\b(?:FATAL|PANIC|initdb: error|initdb|postgres|launch)\s*:\s+", re.IGNORECASE)


class PostgresError(Exception):
    """The embedded server can't do what was asked. `str()` is the user's line and says what to do."""


def no_space(path: Path) -> PostgresError:
    """The error for a full file system under `path`."""
    return PostgresError(f"no space is left on the file system of `{path}`: free some, then start again")


def not_writable(path: Path) -> PostgresError:
    """The error for a directory that this user can't write."""
    return PostgresError(
        f"`{path}` is not writable by this user: mend its owner or mode, or choose another --data"
    )


def from_os_error(error: OSError, path: Path) -> PostgresError:
    """Names a failed file operation below `path` as its user should read it."""
    if error.errno in _NO_SPACE:
        return no_space(path)
    if error.errno in _NOT_WRITABLE:
        return not_writable(path)
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return PostgresError(f"`{path}` is not a directory: choose another --data")
    reason = (error.strerror or str(error)).lower()
    return PostgresError(f"`{error.filename or path}` can't be used ({reason}): choose another --data")


def from_output(text: str, what: str, path: Path, log: Path) -> PostgresError:
    """Names a failure of a PostgreSQL program by what it printed.

    Args:
        text: the program's last lines, in English (`lc_messages` is C).
        what: the program, for the line.
        path: the directory it worked on.
        log: where more can be read.
    """
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return no_space(path)
    if "Read-only file system" in text:
        return not_writable(path)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(FATAL|PANIC|error)\s*:", line)] or lines
    reason = _PREFIX.sub("", telling[-1]) if telling else "it said nothing"
    return PostgresError(f"{what} stopped: {reason}; read `{log}`, then start again")
