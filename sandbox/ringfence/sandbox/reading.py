"""Reading a workspace: the one name of a path, what stands there, what is in it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from ringfence.sandbox import content, links, openat, search
from ringfence.sandbox.capture import fingerprint_of
from ringfence.sandbox.names import WORKSPACE, BadNameError, normalise, parent, shown
from ringfence.sandbox.openat import Opened
from ringfence.sandbox.records import PathInfo, ReadResult, SearchMatch, WorkspaceError, workspace_error
from ringfence.sandbox.tree import Tree


class WorkspaceReader:
    """The reading half of a workspace.

    Args:
        root: its directory on this host.
        uid: host uid (and gid) that new files get; None: the kernel's own.

    Raises:
        WorkspaceError: the directory is not there.
    """

    def __init__(self, root: Path, *, uid: int | None = None) -> None:
        try:
            self.tree = Tree(root, uid=uid)
        except OSError as error:
            reason = (error.strerror or "").lower()
            raise WorkspaceError("Internal", f"workspace `{root}` can't be opened: {reason}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def root(self) -> Path:
        """Its directory on this host."""
        return self.tree.root

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
            links.check_spelling(self.tree, path, lexical)
            try:
                os.close(self.tree.open(lexical, openat.PATH if follow else openat.LOOK))
            except OSError as error:
                if error.errno == errno.ELOOP:
                    return links.same_spelling(links.resolve(self.tree, lexical, follow=follow))
                if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.EACCES}:
                    raise workspace_error(error, lexical) from error
        except BadNameError as problem:
            raise WorkspaceError("InvalidRequest", str(problem)) from problem
        return lexical

    def canonical_open(self, path: str) -> tuple[str, Opened | None]:
        """Resolve as `canonical` does, and keep what stands there open for reading: one system call for both.

        Nothing is kept where the agent itself couldn't open it. Reading what is kept later would miss what was written
        meanwhile.

        Raises:
            WorkspaceError: as `canonical`.
        """
        try:
            lexical = normalise(path)
            links.check_spelling(self.tree, path, lexical)
            # Following no link, it opens a path that is its own canonical name, or nothing.
            return lexical, self.tree.open_file_as_agent(lexical)
        except (OSError, BadNameError):
            pass
        return self.canonical(path), None

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
        self,
        path: str,
        offset: int,
        limit: int,
        *,
        max_bytes: int,
        only_below: int | None,
        opened: Opened | None = None,
        as_agent: bool = False,
    ) -> ReadResult | None:
        """Read as `read` does, but give None where more than `only_below` bytes would be read.

        Args:
            path: canonical path.
            offset: first byte.
            limit: most bytes; 0: to the end.
            max_bytes: never more than this, whatever `limit` says.
            only_below: give None for more than so many bytes; None: read any number.
            opened: what `canonical_open` kept; used up by reading.
            as_agent: read only what the agent's own uid could read.
        """
        if offset < 0 or limit < 0:
            raise WorkspaceError("InvalidRequest", "`offset` and `limit` can't be negative; give 0 or more")
        try:
            if opened is None or opened.fd < 0:
                tree = self.tree
                opened = tree.open_file_as_agent(path) if as_agent else Opened(tree.open(path, openat.FILE))
            facts = opened.facts
            check_file(path, facts)
            size = max(0, min(limit or max_bytes, max_bytes, facts.st_size - offset))
            if only_below is not None and size > only_below:
                return None
            data = content.read_range(opened.fd, offset, size)
            opened.close()
        except OSError as error:
            raise workspace_error(error, path) from error
        return ReadResult(data=data, size_bytes=facts.st_size, version=content.version_of(facts))

    def stat(self, path: str, *, as_agent: bool = False) -> PathInfo:
        """Describe one canonical path; a link itself, not what it points at.

        Args:
            path: canonical path.
            as_agent: only if the agent's own uid could.

        Raises:
            WorkspaceError: not there.
        """
        try:
            facts = self.tree.lstat(path, as_agent=as_agent)
            return _info(path, facts, self.tree.readlink(path) if stat.S_ISLNK(facts.st_mode) else "")
        except OSError as error:
            raise workspace_error(error, path) from error

    def existing_file(self, path: str) -> PathInfo | None:
        """Describe the regular file at a canonical path; None where nothing stands.

        Raises:
            WorkspaceError: something else stands there.
        """
        try:
            facts = self.tree.find(path)
        except OSError as error:
            raise workspace_error(error, path) from error
        if facts is None:
            return None
        check_file(path, facts)
        return _info(path, facts, "")

    def holds(self, path: str) -> bool:
        """Whether something stands at a canonical path.

        Raises:
            WorkspaceError: it can't be looked at.
        """
        try:
            return self.tree.find(path) is not None
        except OSError as error:
            raise workspace_error(error, path) from error

    def version(self, path: str) -> tuple[int, str]:
        """Size in bytes and version of what stands at a canonical path.

        Raises:
            WorkspaceError: not there.
        """
        try:
            facts = self.tree.lstat(path)
        except OSError as error:
            raise workspace_error(error, path) from error
        return facts.st_size, content.version_of(facts)

    def missing_parents(self, path: str) -> list[str]:
        """Directories that writing to a canonical path would make, outermost first.

        Raises:
            WorkspaceError: it lies beneath something that is not a directory.
        """
        try:
            missing = self.tree.missing_parents(path)
            above = self.tree.lstat(parent(missing[0] if missing else path))
        except OSError as error:
            raise workspace_error(error, path) from error
        if not stat.S_ISDIR(above.st_mode):
            raise workspace_error(OSError(errno.ENOTDIR, ""), path)
        return missing

    def list(self, path: str, *, as_agent: bool = False) -> list[PathInfo]:
        """Describe the entries of one directory, in name order.

        Args:
            path: canonical path.
            as_agent: only if the agent's own uid could.

        Raises:
            WorkspaceError: not there, or not a directory.
        """
        fd = self._open_directory(path, as_agent=as_agent)
        try:
            with os.scandir(fd) as entries:
                names = sorted(entry.name for entry in entries)
            found = [_entry(fd, path, name) for name in names]
        except OSError as error:
            raise workspace_error(error, path) from error
        finally:
            os.close(fd)
        return [info for info in found if info is not None]

    def _open_directory(self, path: str, *, as_agent: bool = False) -> int:
        try:
            return (self.tree.open_as_agent if as_agent else self.tree.open)(path, openat.DIRECTORY)
        except OSError as error:
            if error.errno == errno.ENOTDIR and self.tree.find(path) is not None:
                raise WorkspaceError(
                    "InvalidRequest", f"`{shown(path)}` is not a directory; name one"
                ) from None
            raise workspace_error(error, path) from error

    def names(self, path: str = WORKSPACE, *, as_agent: bool = False) -> Iterator[tuple[str, bool]]:
        """All paths beneath a directory in path order, each with whether it is a directory; links not followed.

        Args:
            path: canonical path of the directory.
            as_agent: only what the agent's own uid could list.

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
            fd = self._open_directory(here, as_agent=as_agent)
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
        """Find files below a directory by name and content, as far as the agent's own uid can read.

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
        query = search.Search(self.tree, path, glob=glob, text=text, limit=limit, stop=stop)
        return query.run(self.names(path, as_agent=True), visible)

    def find(self, path: str, glob: str, *, stop: Callable[[], bool] = lambda: False) -> list[str]:
        """Find the files and links below a directory whose path matches a glob, in path order.

        Raises:
            WorkspaceError: as `search`.
        """
        query = search.Search(self.tree, path, glob=glob, text="", limit=0, stop=stop)
        return query.names(self.names(path))

    def fingerprint(self, path: str) -> str:
        """Identity of the state of one canonical path, for comparing before and after.

        Returns:
            `absent`, or the kind with permission bits, content hash or link target, and a hash of `user.*` attributes.

        Raises:
            WorkspaceError: it can't be read.
        """
        try:
            return fingerprint_of(self.tree, path)
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


def check_file(path: str, facts: os.stat_result) -> None:
    """Make sure that something is a regular file with one name.

    Raises:
        WorkspaceError: it is not.
    """
    if stat.S_ISDIR(facts.st_mode):
        raise WorkspaceError("InvalidRequest", f"`{shown(path)}` is a directory; name a file in it")
    if not stat.S_ISREG(facts.st_mode):
        raise WorkspaceError("InvalidRequest", f"`{shown(path)}` is not a regular file; name one that is")
    # INVARIANT: all that enters a workspace is a copy, so a second name was put there by somebody else, and what it names
    # may lie outside.
    if facts.st_nlink > 1:
        raise WorkspaceError(
            "InvalidRequest",
            f"`{shown(path)}` is a hard link with another name elsewhere; remove it or copy it",
        )
