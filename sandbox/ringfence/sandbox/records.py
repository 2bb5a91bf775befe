"""What the workspace hands out, and the one error it raises."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from ringfence.sandbox.names import shown


class WorkspaceError(Exception):
    """The workspace can't do what was asked; `str()` is one line for the user.

    Attributes:
        reason: `InvalidRequest`, `NoSuchResource`, `Conflict`, `NoSpace`, `Failed` or `Internal`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PathInfo:
    """One path as it stands, links not followed.

    Attributes:
        path: canonical path.
        kind: `file`, `directory`, `link` or `other`.
        size_bytes: length of a file's content; 0 for other kinds.
        mode: permission bits.
        modified_ns: time of the last change, nanoseconds since the epoch.
        target: where a link points, as written in it.
    """

    path: str
    kind: str
    size_bytes: int
    mode: int
    modified_ns: int
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """A part of a file.

    Attributes:
        data: the bytes.
        size_bytes: length of the whole file.
        version: differs whenever the content was replaced.
    """

    data: bytes
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMatch:
    """One hit: `line` from 1, or 0 where only the name was asked for; `text` cut to a bounded length."""

    path: str
    line: int
    text: str


_LINES = {
    errno.ENOENT: ("NoSuchResource", "`{path}` does not exist; list its directory to see what does"),
    errno.ENOTDIR: (
        "NoSuchResource",
        "`{path}` lies beneath something that is not a directory; check its parents",
    ),
    errno.ELOOP: ("Conflict", "`{path}` became a link meanwhile; resolve it again"),
    errno.EISDIR: ("InvalidRequest", "`{path}` is a directory; name a file in it"),
    errno.EEXIST: ("Conflict", "`{path}` exists already; remove it first or choose another name"),
    errno.ENOTEMPTY: (
        "InvalidRequest",
        "`{path}` is a directory with something in it; ask for recursive removal",
    ),
    errno.EACCES: ("Failed", "permission bits forbid it at `{path}`; change them with a command"),
    errno.EPERM: ("Failed", "this host forbids it at `{path}`; check the file's attributes and owner"),
    errno.EROFS: ("Failed", "`{path}` is on a read-only file system; mount it writable"),
    errno.ENAMETOOLONG: ("InvalidRequest", "a name in `{path}` is too long; shorten it"),
    errno.EINVAL: ("InvalidRequest", "`{path}` can't be used like this; a directory can't go beneath itself"),
    errno.ENOSPC: ("NoSpace", "no space left for `{path}`; free space on the disk that holds the workspaces"),
    errno.EDQUOT: ("NoSpace", "the disk quota is used up at `{path}`; free space or raise the quota"),
    errno.EFBIG: ("NoSpace", "`{path}` would be larger than this host allows; write less or raise its limit"),
    errno.EMFILE: ("Failed", "too many open files for `{path}`; raise the kernel's open-file limit"),
}


def workspace_error(error: OSError, path: str) -> WorkspaceError:
    """Put the operating system's refusal into the user's words."""
    reason, line = _LINES.get(
        error.errno or 0,
        ("Failed", "`{path}` failed with {detail}; check the disk that holds the workspaces"),
    )
    detail = (error.strerror or str(error)).lower()
    return WorkspaceError(reason, line.format(path=shown(path), detail=detail))
