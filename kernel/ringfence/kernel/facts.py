"""What a thread is known to have taken in: whether something untrusted, and where that went.

All of it stands in the rows of the thread's own journal, so a restart, a replay, a fork and a rollback find it as it was:
the part `facts` of an outcome's body, which comes first in it, says what that call learnt and under what it was made.

INVARIANT: a thread is tainted before the answer that taints it is given out, and until an operator's rule or another
branch ends it; whatever it writes meanwhile says so, and taints who reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from ringfence.kernel.journal.types import Row, StoredRow
    from ringfence.kernel.replay import Lineage

MARK: Final = b'{"facts":'
"""How a body begins that says anything about facts. The statements of `facts.sql` look for it too."""

PATHS_MAX: Final = 256
"""Paths that one row names; more stand for the whole workspace."""

KEPT_PATHS_MAX: Final = 8192
WHOLE: Final = "/workspace"


class Taint(msgspec.Struct, frozen=True, kw_only=True):
    """What tainted a thread: the step that read it, and what it was, for people."""

    step: int
    source: str

    @property
    def text(self) -> str:
        """One phrase."""
        return f"{self.source} at step {self.step}" if self.step else self.source


class Marks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part `facts` of a body.

    Attributes:
        untaints: rule that ended the taint with this call.
        tainted: what the thread was tainted by when the row was made.
        taints: what this call read that taints the thread.
        paths: files that it wrote; they taint who reads them, or with `untaints` do no longer.
    """

    # The order counts: `facts.sql` recognises what was written under a taint by how its row begins.
    untaints: str = ""
    tainted: Taint | None = None
    taints: str = ""
    paths: tuple[str, ...] = ()

    def opening(self) -> bytes:
        """The beginning of a body."""
        return MARK + msgspec.json.encode(self) + b","

    @property
    def taint(self) -> Taint | None:
        """What somebody who is born by this call is tainted by."""
        return self.tainted


class _Body(msgspec.Struct):
    facts: Marks = Marks()


_decode = msgspec.json.Decoder(_Body).decode


def marks_of(body: bytes) -> Marks | None:
    """What a body says about facts; None: nothing."""
    return _decode(body).facts if body.startswith(MARK) else None


class Facts:
    """The taint of one thread on its present branch, and its tainted files.

    Attributes:
        plain: whether there is nothing to say: no taint, and no file that would taint.
    """

    __slots__ = ("paths", "plain", "taint")

    def __init__(self, taint: Taint | None = None, paths: Iterable[str] = ()) -> None:
        self.taint = taint
        self.paths: set[str] = set(paths)
        self.plain = taint is None and not self.paths

    @property
    def bare(self) -> bool:
        """Whether they are as those of a thread that has just begun."""
        return self.plain

    def take(self, step: int, marks: Marks) -> None:
        """Take over what a row says."""
        if marks.untaints:
            self.taint = None
            self.paths.difference_update(marks.paths)
        else:
            if marks.taints and self.taint is None:
                self.taint = Taint(step=step, source=marks.taints)
            self.paths.update(marks.paths)
        if len(self.paths) > KEPT_PATHS_MAX:
            self.paths = {WHOLE}
        self.plain = self.taint is None and not self.paths

    def take_row(self, row: Row | StoredRow, *, files_only: bool = False) -> None:
        """Take over what a row says; of an earlier run only what it did to the files."""
        marks = marks_of(row.body)
        if marks is None:
            return
        if files_only:
            marks = msgspec.structs.replace(marks, taints="")
            held, self.taint = self.taint, None
            self.take(row.step, marks)
            self.taint = held
            self.plain = self.taint is None and not self.paths
        else:
            self.take(row.step, marks)

    def touched_by(self, action: str, resource: str) -> str:
        """A tainted file that reading a path gives something of; empty: none. Commands may read all."""
        if action in ("exec.run", "workspace.commit"):
            return next(iter(self.paths), "")
        if not action.startswith("fs."):
            return ""
        for path in self.paths:
            if path == resource or resource.startswith(f"{path}/"):
                return path
            if action != "fs.read" and path.startswith(f"{resource}/"):
                return path
        return ""


def bounded(paths: Iterable[str]) -> tuple[str, ...]:
    """Paths as a row names them."""
    found = tuple(dict.fromkeys(paths))
    return found if len(found) <= PATHS_MAX else (WHOLE,)


def earlier_runs(lineage: Lineage, every: Iterable[tuple[int, Lineage]]) -> list[Lineage]:
    """Lineages of the runs before the present one, oldest first: their files are still there.

    Args:
        lineage: the present one.
        every: each branch with its lineage, in the order in which they were made.
    """
    # A run goes on with the files of the one before, as they stood when it was left: on its newest branch.
    newest: dict[int, Lineage] = {one.root: one for _, one in sorted(every) if one.root < lineage.root}
    return [newest[root] for root in sorted(newest)]
