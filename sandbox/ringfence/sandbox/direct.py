"""The layer that an unmodified program works on: a writable overlay, and what of it the live workspace has already.

Below it lies a tree that never changes while the program runs (the base); changes are found against the live workspace, which
is the base with everything that was committed so far.

INVARIANT: nothing here is read while a process writes to the layer: whoever asks holds the program still.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from ringfence.sandbox.changes import Change, ChangeSet, discard, read_changes
from ringfence.sandbox.names import WORKSPACE
from ringfence.sandbox.overlay_read import Mark, mark_of, node_of

UPPER = "upper"
_TICKS_NS = 1_000_000_000
_NOTING = frozenset({"ext2", "ext3", "ext4", "xfs"})
"""File systems that write dirty pages back, so that a change by an old mapping gets a time too: those in memory never do."""
BASE = "base"
LEDGER = "direct-paths"
"""File of an agent's directory that lists what was committed and is not in its program image."""


def _awake() -> AbstractAsyncContextManager[None]:
    return nullcontext()


class DirectLayer:
    """The overlay of one agent's program.

    Args:
        home: the agent's directory.
        own: whether the program resumes by itself: it begins on the live workspace as it is. Otherwise each start begins on
            the program image, and does again what it did before.

    Attributes:
        why: what the boundary being made is for, as people see it in `steps`.
        hold: keeps the program still while the block is entered. Set by who runs it.
        strayed: says why the program can't be taken for one that does again what it did before; empty: it can. Set by who runs it.
        redoing: whether the program is before where an earlier start of it was: what it has not done again is no change.
    """

    def __init__(self, home: Path, *, own: bool) -> None:
        self.place = home / "direct"
        self.own = own
        self.why = ""
        self.hold: Callable[[], AbstractAsyncContextManager[None]] = _awake
        self.strayed: Callable[[], str] = str
        self.redoing = False
        self._live = home / "live"
        self._image = home / "image"
        self._ledger = home / LEDGER
        self._made: set[str] = set()
        self._settled: dict[str, Mark] = {}
        self._looked_ns = 0
        self._notes_changes = False

    @property
    def upper(self) -> Path:
        """The upper layer: there from the program's start until the layer is discarded."""
        return self.place / UPPER

    @property
    def base(self) -> Path:
        """The tree below the overlay."""
        return self.place.with_name(f"direct-{BASE}") if self.own else self._image

    def renew(self, make_base: Callable[[Path], None]) -> None:
        """Begin anew for the next start of the program: an empty layer on its base.

        Args:
            make_base: fills a directory with what the program may see of the live workspace; used where it resumes by itself.

        Raises:
            OSError, WorkspaceError: it can't be made.
        """
        self.discard()
        self._made = set()
        if self.own:
            discard(self.base)
            make_base(self.base)
        else:
            self._made = self._recorded()
        self.redoing = bool(self._made) and not self.own
        self.place.mkdir(mode=0o711)
        self._settled = {}
        self._notes_changes = _kind_of(self.place) in _NOTING

    def discard(self) -> None:
        """Forget what was not committed. Content if there is nothing.

        Raises:
            OSError: something in it can't be removed.
        """
        discard(self.place)

    def changes(self) -> ChangeSet:
        """What differs between the live workspace and what the program sees.

        Raises:
            ChangesError: a layer can't be read, or a name in it can't be judged.
        """
        if not self.upper.is_dir():
            return ChangeSet()
        self._looked_ns = time.time_ns()
        # A program that goes through its past again writes again what is there: that is no change.
        found = read_changes(self.upper, self._live, self._settled, times=False)
        known = set(found.removed)
        gone = [change for change in self._removed() if change.path not in known]
        return ChangeSet(changes=(*found.changes, *gone)) if gone else found

    def committing(self, changes: ChangeSet) -> None:
        """Say what is about to be committed: what is not in the base may vanish again without a trace in the layer.

        Raises:
            OSError: that can't be kept.
        """
        fresh = [c.path for c in changes.changes if c.kind == "create" and c.path not in self._made]
        if fresh and not self.own:
            self._keep(fresh)
        self._made.update(fresh)

    def settle(self) -> None:
        """Say that the live workspace is now what the program sees: what it doesn't touch again is not read again.

        INVARIANT: a file is taken for untouched only by a time of change that a later change can't have: the layer's file system
        notes each, also by a mapping, and it lies long enough back for its clock.
        """
        self._settled = {}
        if not self._notes_changes:
            return
        before_ns = self._looked_ns - _TICKS_NS
        pending = [""]
        while pending:
            where = pending.pop()
            with os.scandir(self.upper / where) as entries:
                for entry in entries:
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        pending.append(f"{where}{entry.name}/")
                    elif stat.S_ISREG(facts.st_mode) and facts.st_ctime_ns < before_ns:
                        self._settled[f"{where}{entry.name}"] = mark_of(facts)

    def _removed(self) -> Iterator[Change]:
        """What was committed, is not in the base, and the program no longer sees: of that an upper layer keeps no whiteout."""
        if self.redoing:
            return
        for path in sorted(self._made):
            where = path.removeprefix(f"{WORKSPACE}/")
            if os.path.lexists(self.upper / where) or os.path.lexists(self.base / where):
                continue
            try:
                facts = (self._live / where).lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            mode = stat.S_IMODE(facts.st_mode)
            yield Change(path=path, kind="remove", node=node_of(facts.st_mode), mode=mode)

    def _keep(self, paths: Iterable[str]) -> None:
        # INVARIANT: kept before it is committed: a later start finds every path that an earlier one may have made.
        with self._ledger.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(path)}\n" for path in paths)
            file.flush()
            os.fsync(file.fileno())

    def _recorded(self) -> set[str]:
        try:
            lines = self._ledger.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return set()
        found: set[str] = set()
        for line in lines:
            try:
                found.add(json.loads(line))
            except ValueError:
                continue  # cut off by a crash, so what it names was not committed
        return found


def _kind_of(path: Path) -> str:
    """The kind of the file system that a path lies on; empty where it can't be told."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if words[2] == wanted and "-" in words:
            return words[words.index("-") + 1]
    return ""
