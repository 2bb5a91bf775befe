"""The live workspace of one agent: every path beneath its root, none outside, links resolved by identity.

`canonical` gives the one name that policy decides on. Everything else takes such names and follows no link, so that a link
put in the way between the decision and the effect makes the call fail instead of reaching something else.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from ringfence.sandbox import content, openat, search
from ringfence.sandbox.names import WORKSPACE, NameProblem, beneath, normalise, shown
from ringfence.sandbox.records import PathInfo, ReadResult, SearchMatch, WorkspaceError, workspace_error
from ringfence.sandbox.tree import Tree
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

_LINKS = 40  # most links in one path, as the operating system counts
_NEW_FILE_MODE = 0o644


class Workspace:
    """The live workspace.

    Args:
        root: its directory on this host.
        uid: host uid (and gid) that new files get; None: the kernel's own.

    Raises:
        WorkspaceError: the directory is not there.
    """

    def __init__(self, root: Path, *, uid: int | None = None) -> None:
        self.root = root
        try:
            self.tree = Tree(root, uid=uid)
        except OSError as error:
            reason = (error.strerror or "").lower()
            raise WorkspaceError("Internal", f"workspace `{root}` can't be opened: {reason}") from error

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptors back; nothing else works afterwards."""
        self.tree.close()

    def sweep(self) -> None:
        """Remove what a crash left half written. Only at start, while nobody else works on this workspace."""
        try:
            self.tree.sweep()
        except OSError as error:
            raise workspace_error(error, WORKSPACE) from error

    # Names

    def canonical(self, path: str, *, follow: bool = True) -> str:
        """Resolve a requested path to the one name that policy decides on. The path need not exist.

        Args:
            path: absolute below /workspace, or relative to it.
            follow: whether a link as the last component is followed too.

        Raises:
            WorkspaceError: outside /workspace, not sayable, or through a link that leads outside or nowhere.
        """
        try:
            lexical = normalise(path)
            try:
                os.close(self.tree.open(lexical, openat.PATH if follow else openat.LOOK))
            except OSError as error:
                if error.errno == errno.ELOOP:
                    return self._resolve(lexical, follow=follow)
                if error.errno == errno.ENOENT and not path.isascii():
                    self._check_spelling(path, lexical)
                if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.EACCES}:
                    raise workspace_error(error, lexical) from error
        except NameProblem as problem:
            raise WorkspaceError("InvalidRequest", str(problem)) from problem
        return lexical

    def _check_spelling(self, path: str, lexical: str) -> None:
        """Refuse a name that stands on the disk only in a form that requests are not compared in."""
        raw = "/".join(part for part in path.split("/") if part not in {"", "."})
        raw = f"/{raw}" if path.startswith("/") else f"{WORKSPACE}/{raw}"
        if raw != lexical and self.tree.find(raw) is not None:
            raise NameProblem(
                f"`{shown(path)}` stands on the disk in a Unicode form other than NFC; rename it"
            )

    def _resolve(self, lexical: str, *, follow: bool) -> str:
        """Follow links one component at a time, none out of the workspace."""
        done: list[str] = []
        todo = lexical.split("/")[:1:-1]
        asked = len(todo)  # so many at the bottom were asked for; what lies above them was written in a link
        links = 0
        while todo:
            name = todo.pop()
            written = len(todo) >= asked
            asked = min(asked, len(todo))
            if name == "..":
                if not done:
                    raise WorkspaceError("InvalidRequest", _leaves(lexical))
                done.pop()
                continue
            here = "/".join([WORKSPACE, *done, name])
            try:
                facts = self.tree.lstat(here)
                target = self.tree.readlink(here) if stat.S_ISLNK(facts.st_mode) else None
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.EACCES}:
                    raise workspace_error(error, lexical) from error
                if written:
                    raise WorkspaceError("InvalidRequest", _dangles(lexical, here)) from error
                return "/".join([here, *todo[::-1]])
            if target is None or (not follow and not todo):
                done.append(name)
                continue
            links += 1
            if links > _LINKS:
                raise WorkspaceError(
                    "InvalidRequest", f"`{shown(lexical)}` is a loop of links; remove one of them"
                )
            parts = [part for part in target.split("/") if part not in {"", "."}]
            if target.startswith("/"):
                if parts[:1] != ["workspace"]:
                    raise WorkspaceError("InvalidRequest", _leaves(lexical))
                done.clear()
                del parts[0]
            todo.extend(reversed(parts))
        return "/".join([WORKSPACE, *done])

    # Reading

    def read(self, path: str, offset: int = 0, limit: int = 0, *, max_bytes: int = 16 << 20) -> ReadResult:
        """Read a part of a file.

        Args:
            path: canonical path.
            offset: first byte.
            limit: most bytes; 0: to the end.
            max_bytes: never more than this, whatever `limit` says.

        Raises:
            WorkspaceError: not there, not a file, or a negative number.
        """
        found = self.read_within(path, offset, limit, max_bytes=max_bytes, only_below=None)
        if found is None:
            raise WorkspaceError("Internal", f"`{shown(path)}` could not be read")
        return found

    def read_within(
        self, path: str, offset: int, limit: int, *, max_bytes: int, only_below: int | None
    ) -> ReadResult | None:
        """Read as `read` does, but give None where more than `only_below` bytes would be read."""
        if offset < 0 or limit < 0:
            raise WorkspaceError("InvalidRequest", "`offset` and `limit` can't be negative; give 0 or more")
        try:
            fd = self.tree.open(path, openat.FILE)
            try:
                facts = os.fstat(fd)
                if not stat.S_ISREG(facts.st_mode):
                    raise _not_a_file(path, facts.st_mode)
                size = max(0, min(limit or max_bytes, max_bytes, facts.st_size - offset))
                if only_below is not None and size > only_below:
                    return None
                data = content.read_range(fd, offset, size)
            finally:
                os.close(fd)
        except OSError as error:
            raise workspace_error(error, path) from error
        return ReadResult(data=data, size_bytes=facts.st_size, version=content.version_of(facts))

    def stat(self, path: str) -> PathInfo:
        """Describe one canonical path; a link itself, not what it points at.

        Raises:
            WorkspaceError: not there.
        """
        try:
            facts = self.tree.lstat(path)
            return _info(path, facts, self.tree.readlink(path) if stat.S_ISLNK(facts.st_mode) else "")
        except OSError as error:
            raise workspace_error(error, path) from error

    def list(self, path: str) -> list[PathInfo]:
        """Describe the entries of one directory, in name order.

        Raises:
            WorkspaceError: not there, or not a directory.
        """
        try:
            fd = self.tree.open(path, openat.DIRECTORY)
        except OSError as error:
            if error.errno == errno.ENOTDIR and self.tree.find(path) is not None:
                raise WorkspaceError(
                    "InvalidRequest", f"`{shown(path)}` is not a directory; read it instead"
                ) from None
            raise workspace_error(error, path) from error
        try:
            with os.scandir(fd) as entries:
                names = sorted(entry.name for entry in entries)
            found = [_entry(fd, path, name) for name in names]
        except OSError as error:
            raise workspace_error(error, path) from error
        finally:
            os.close(fd)
        return [info for info in found if info is not None]

    def names(self, path: str = WORKSPACE) -> Iterator[tuple[str, bool]]:
        """All paths beneath a directory in path order, each with whether it is a directory; links not followed.

        Raises:
            WorkspaceError: not there, or a directory beneath can't be read.
        """
        pending = [(path, True)]
        while pending:
            here, directory = pending.pop()
            if here != path:
                yield here, directory
            if not directory:
                continue
            try:
                fd = self.tree.open(here, openat.DIRECTORY)
            except OSError as error:
                raise workspace_error(error, here) from error
            try:
                with os.scandir(fd) as entries:
                    found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
            finally:
                os.close(fd)
            pending.extend((f"{here}/{name}", deeper) for name, deeper in reversed(found))

    def walk(self, path: str = WORKSPACE) -> Iterator[PathInfo]:
        """Describe all that lies beneath a directory, parents first, in path order; links not followed."""
        for found, _ in self.names(path):
            try:
                yield self.stat(found)
            except WorkspaceError as error:
                if error.reason != "NoSuchResource":
                    raise

    def search(
        self,
        path: str,
        glob: str,
        text: str,
        limit: int,
        visible: Callable[[str], bool],
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[list[SearchMatch], int, bool]:
        """Find files below a directory by name and content.

        Args:
            path: canonical path of the directory.
            glob: on the path below it: `*` within a name, `**` across; empty: all.
            text: literal text that a line has to contain; empty: names only.
            limit: most matches; 0: 1000.
            visible: whether a canonical path may be shown.
            stop: asked now and then; True ends the search early.

        Returns:
            Matches in path order, the count of paths left out as not visible, and whether the search ended early.

        Raises:
            WorkspaceError: not a directory, or a glob or text that can't match.
        """
        query = search.Query(glob=glob, text=text, limit=limit)
        return search.run(self.tree, self.names(path), path, query, visible, stop)

    def fingerprint(self, path: str) -> str:
        """Identity of the state of one canonical path, for comparing before and after.

        Returns:
            `absent`, or the kind with permission bits and content hash or link target.

        Raises:
            WorkspaceError: it can't be read.
        """
        try:
            facts = self.tree.find(path)
            if facts is None:
                return content.ABSENT
            if stat.S_ISDIR(facts.st_mode):
                return content.directory_fingerprint(facts.st_mode)
            if stat.S_ISLNK(facts.st_mode):
                return content.link_fingerprint(self.tree.readlink(path))
            if not stat.S_ISREG(facts.st_mode):
                return content.other_fingerprint(facts.st_mode)
            return content.file_fingerprint(facts.st_mode, self.content_hash(path))
        except OSError as error:
            raise workspace_error(error, path) from error

    def content_hash(self, path: str, tail: bytes = b"") -> str:
        """SHA-256 in hex of a file's content followed by `tail`."""
        try:
            fd = self.tree.open(path, openat.FILE)
            try:
                return content.hash_fd(fd, tail)
            finally:
                os.close(fd)
        except OSError as error:
            raise workspace_error(error, path) from error

    # Changing

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
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(fd)
            raise _not_a_file(path, mode)
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
            content.write_xattrs(fd, content.read_xattrs(old))
            os.fchmod(fd, stat.S_IMODE(facts.st_mode))
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


def _entry(fd: int, directory: str, name: str) -> PathInfo | None:
    try:
        facts = os.stat(name, dir_fd=fd, follow_symlinks=False)
        target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(facts.st_mode) else ""
    except FileNotFoundError:  # it went while the directory was listed
        return None
    return _info(f"{directory}/{name}", facts, target)


def _info(path: str, facts: os.stat_result, target: str) -> PathInfo:
    return PathInfo(
        path=path,
        kind=content.kind_of(facts.st_mode),
        size_bytes=facts.st_size if stat.S_ISREG(facts.st_mode) else 0,
        mode=stat.S_IMODE(facts.st_mode),
        modified_ns=facts.st_mtime_ns,
        target=target,
    )


def _not_a_file(path: str, mode: int) -> WorkspaceError:
    if stat.S_ISDIR(mode):
        return WorkspaceError("InvalidRequest", f"`{shown(path)}` is a directory; name a file in it")
    return WorkspaceError(
        "InvalidRequest", f"`{shown(path)}` is not a regular file; only files can be used like this"
    )


def _leaves(path: str) -> str:
    return f"`{shown(path)}` leads out of /workspace through a link; name a path inside"


def _dangles(path: str, target: str) -> str:
    return f"`{shown(path)}` is a link to `{shown(target)}`, which does not exist; name that path itself"
