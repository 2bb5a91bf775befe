"""How much a live workspace holds, and may hold: counted once, then carried on with each change.

What counts is the length of each file, holes included, and how many files, links and directories there are. Whoever changes
the workspace holds its lock, so the running total is exact; what changes it otherwise (a rollback, recovery after a crash)
has it counted anew.
"""

# Names in a layer may be any bytes; pathlib takes none.
# ruff: noqa: PTH118

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ringfence.sandbox.changeset import ChangeSet
from ringfence.sandbox.names import relative
from ringfence.sandbox.points import PointPath
from ringfence.sandbox.records import PathInfo, WorkspaceError
from ringfence.sandbox.workspace import Workspace

ENTRY_BYTES = 1024
"""A workspace may have one file, link or directory for each so many bytes of its limit."""
ENTRIES_LEAST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes of content, and how many files, links and directories; negative where it is less that is left."""

    content_bytes: int = 0
    entries: int = 0

    def plus(self, other: Usage) -> Usage:
        """Both together."""
        return Usage(
            content_bytes=self.content_bytes + other.content_bytes, entries=self.entries + other.entries
        )


class Meter:
    """The running total of one workspace.

    Args:
        workspace: the live workspace.
        limit_bytes: most bytes of content.
    """

    def __init__(self, workspace: Workspace, limit_bytes: int) -> None:
        self.limit = Usage(content_bytes=limit_bytes, entries=max(limit_bytes // ENTRY_BYTES, ENTRIES_LEAST))
        self._workspace = workspace
        self._used: Usage | None = None

    @property
    def known(self) -> Usage | None:
        """The total, None where it has to be counted first."""
        return self._used

    def carry_on(self, used: Usage | None) -> None:
        """Take over the total of another meter of the same workspace."""
        self._used = used

    def used(self) -> Usage:
        """The total; reads the whole tree once.

        Raises:
            WorkspaceError: it can't be read.
        """
        if self._used is None:
            try:
                self._used = tree_usage(self._workspace.root)
            except OSError as error:
                raise WorkspaceError("Failed", f"the workspace can't be counted: {error}") from error
        return self._used

    def admit(self, grows: Usage) -> None:
        """Look whether a change still fits. What makes a workspace smaller always does, also one that is over its limit.

        Raises:
            WorkspaceError: it doesn't; nothing changed.
        """
        if grows.content_bytes <= 0 and grows.entries <= 0:
            return
        used, limit = self.used(), self.limit
        then = used.plus(grows)
        if grows.content_bytes > 0 and then.content_bytes > limit.content_bytes:
            raise _no_room(used.content_bytes, grows.content_bytes, limit.content_bytes, "bytes")
        if grows.entries > 0 and then.entries > limit.entries:
            raise _no_room(used.entries, grows.entries, limit.entries, "files, links and directories")

    def check(self) -> None:
        """Look whether what is there is within the limit.

        Raises:
            WorkspaceError: it isn't.
        """
        used, limit = self.used(), self.limit
        if used.content_bytes > limit.content_bytes or used.entries > limit.entries:
            raise WorkspaceError(
                "NoSpace",
                f"it has {used.content_bytes} bytes in {used.entries} files, links and directories, and `sandbox.disk` "
                f"allows {limit.content_bytes} in {limit.entries}; raise it, or leave large data out",
            )

    def add(self, grows: Usage) -> None:
        """Carry on the total after a change."""
        if self._used is not None:
            self._used = self._used.plus(grows)

    def forget(self) -> None:
        """The workspace changed in a way that was not said: count it again when it matters."""
        self._used = None


def _no_room(used: int, more: int, limit: int, what: str) -> WorkspaceError:
    return WorkspaceError(
        "NoSpace",
        f"the workspace holds {used} {what} and may hold {limit} (`sandbox.disk`), so {more} more don't fit; "
        "delete what is not needed, or submit the agent with a larger `sandbox.disk`",
    )


def tree_usage(top: Path) -> Usage:
    """Count all that lies beneath a directory; links are not followed.

    Raises:
        OSError: a directory can't be read.
    """
    content_bytes = entries = 0
    pending = [os.fspath(top)]
    while pending:
        with os.scandir(pending.pop()) as found:
            for entry in found:
                facts = entry.stat(follow_symlinks=False)
                entries += 1
                if stat.S_ISREG(facts.st_mode):
                    content_bytes += facts.st_size
                elif stat.S_ISDIR(facts.st_mode):
                    pending.append(entry.path)
    return Usage(content_bytes=content_bytes, entries=entries)


def written(old: PathInfo | None, size_bytes: int, parents: int) -> Usage:
    """What a file of `size_bytes` in place of `old` makes of a workspace, with so many new directories above it."""
    before = 0 if old is None else old.size_bytes
    return Usage(content_bytes=size_bytes - before, entries=parents + (old is None))


def removed(before: Iterable[PointPath]) -> Usage:
    """What is left where all of these paths go."""
    there = [entry for entry in before if entry.kind != "absent"]
    return Usage(content_bytes=-sum(entry.size for entry in there), entries=-len(there))


def changed(upper: Path, changes: ChangeSet, before: Iterable[PointPath]) -> Usage:
    """What a command's changes make of a workspace.

    Args:
        upper: the layer that they are in.
        changes: all of them.
        before: the same paths as they are now.

    Raises:
        OSError: the layer can't be read.
    """
    after: dict[str, int] = {}
    for change in changes.changes:
        if change.kind != "remove":
            facts = os.lstat(os.path.join(os.fsencode(upper), relative(change.path)))
            after[change.path] = facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return removed(before).plus(Usage(content_bytes=sum(after.values()), entries=len(after)))
