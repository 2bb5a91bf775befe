"""The live workspace of one agent: every path beneath its root, none outside, links resolved by identity.

`canonical` gives the one name that policy decides on. Everything else takes such names and follows no link, so that
a link put in the way between the decision and the effect makes the call fail instead of reaching something else.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence

from ringfence.sandbox import content, openat
from ringfence.sandbox.names import WORKSPACE, beneath, shown
from ringfence.sandbox.reading import WorkspaceReader, check_file
from ringfence.sandbox.records import PathInfo, ReadResult, SearchMatch, WorkspaceError, workspace_error
from ringfence.sandbox.trees import copy_tree, extract_tar, make_tar

__all__ = [
    "WORKSPACE",
    "PathInfo",
    "ReadResult",
    "SearchMatch",
    "Workspace",
    "WorkspaceError",
    "copy_tree",
    "extract_tar",
    "make_tar",
]

_NEW_FILE_MODE = 0o644


class Workspace(WorkspaceReader):
    """The live workspace.

    Args:
        root: its directory on this host.
        uid: host uid (and gid) that new files get; None: the kernel's own.

    Raises:
        WorkspaceError: the directory is not there.
    """

    def write(self, path: str, data: bytes, mode: int = _NEW_FILE_MODE) -> tuple[int, str]:
        """Replace a file's content, or create it with its missing parents. All or nothing, durable on return.

        Args:
            path: canonical path.
            data: the whole content.
            mode: permission bits of a new file; an existing one keeps its own.

        Returns:
            Size in bytes and version.

        Raises:
            WorkspaceError: a directory or a link stands there, no space, and so on; nothing changed.
        """
        return self._replace(path, lambda fd, _: content.write_all(fd, data), mode)

    def append(self, path: str, data: bytes) -> tuple[int, str]:
        """Add to the end of a file, or create it. The file is replaced by a longer copy: all or nothing."""

        def fill(fd: int, old: int | None) -> None:
            if old is not None:
                content.copy_content(old, fd)
                os.lseek(fd, 0, os.SEEK_END)
            content.write_all(fd, data)

        return self._replace(path, fill, _NEW_FILE_MODE)

    def _replace(self, path: str, fill: Callable[[int, int | None], None], mode: int) -> tuple[int, str]:
        tree = self.tree
        try:
            old = self._open_old(path)
            try:
                fd, name = tree.temporary()
                try:
                    fill(fd, old)
                    self._dress(fd, old, mode)
                    os.fsync(fd)
                    facts = os.fstat(fd)
                    tree.make_parents(path)
                    tree.place(name, path)
                except BaseException:
                    tree.drop(name)
                    raise
                finally:
                    os.close(fd)
            finally:
                if old is not None:
                    os.close(old)
        except OSError as error:
            raise workspace_error(error, path) from error
        return facts.st_size, content.version_of(facts)

    def _open_old(self, path: str) -> int | None:
        try:
            fd = self.tree.open(path, openat.FILE)
        except FileNotFoundError:
            return None
        try:
            check_file(path, os.fstat(fd))
        except WorkspaceError:
            os.close(fd)
            raise
        return fd

    def _dress(self, fd: int, old: int | None, mode: int) -> None:
        """Give a staged file its owner, bits, attributes and a time of its own."""
        if old is None:
            self.tree.own(fd)
            os.fchmod(fd, mode & 0o777)
        else:
            facts = os.fstat(old)
            if os.geteuid() == 0:
                os.fchown(fd, facts.st_uid, facts.st_gid)
            content.write_xattrs(fd, content.read_xattrs(old, lists=True))
            os.fchmod(fd, stat.S_IMODE(facts.st_mode) & ~content.SET_ID)
        # The clock of the file system ticks in milliseconds, too coarse to tell two versions apart.
        now = time.time_ns()
        os.utime(fd, ns=(now, now))

    def move(self, path: str, to: str) -> None:
        """Rename a file, link or directory; missing parents of the target are made. Durable on return.

        Raises:
            WorkspaceError: the target exists, lies beneath the source, or the source is missing; nothing changed.
        """
        if beneath(to, path):
            raise WorkspaceError(
                "InvalidRequest", f"`{shown(path)}` can't be moved to itself or below itself"
            )
        try:
            self.tree.lstat(path)
        except OSError as error:
            raise workspace_error(error, path) from error
        try:
            self.tree.make_parents(to)
            self.tree.rename(path, to)
        except OSError as error:
            raise workspace_error(error, to) from error

    def delete(self, path: str, recursive: bool) -> int:
        """Remove a file or link, or a directory with all beneath it. Durable on return.

        Returns:
            How many files, links and directories went.

        Raises:
            WorkspaceError: not there, the workspace itself, or a directory without `recursive`.
        """
        if path == WORKSPACE:
            raise WorkspaceError(
                "InvalidRequest", "the workspace itself can't be removed; name what is in it"
            )
        try:
            if not stat.S_ISDIR(self.tree.lstat(path).st_mode):
                self.tree.remove(path)
                return 1
            if not recursive:
                raise WorkspaceError(
                    "InvalidRequest", f"`{shown(path)}` is a directory; ask for recursive removal"
                )
            count = 1 + sum(1 for _ in self.names(path))
            self.tree.remove_tree(path)
        except OSError as error:
            raise workspace_error(error, path) from error
        return count

    def remove_each(self, paths: Sequence[str]) -> None:
        """Remove single files, links and empty directories, those already gone included. Durable on return.

        Args:
            paths: canonical paths, what lies in a directory before the directory.

        Raises:
            WorkspaceError: a directory is not empty, and so on; those before it are gone.
        """
        for path in paths:
            try:
                if self.tree.find(path) is not None:
                    self.tree.remove(path)
            except OSError as error:
                raise workspace_error(error, path) from error
