"""A kernel of an ordinary user opens read-only directories for a change: killed then, the next one gives them their bits back."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox.changes import apply_changes, read_changes
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.tree import Tree
from ringfence.sandbox.workspace import Workspace

NOBODY = 65_534
DIED = 9


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of an ordinary user's."""
    with tempfile.TemporaryDirectory(prefix="rf-modes-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        for directory in ("live/shut", "upper/shut"):
            (place / directory).mkdir(parents=True)
        (place / "live/shut/f").write_text("old")
        (place / "upper/shut/f").write_text("new")
        (place / "format").write_text("user")
        for directory in ("live/shut", "upper/shut"):
            (place / directory).chmod(0o555)
        if os.geteuid() == 0:
            for path in (place, *place.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        yield place
        shutil.rmtree(place, onerror=_open_up)


def _open_up(remove: Callable[[str], object], path: str, _: object) -> None:
    Path(path).parent.chmod(0o700)
    remove(path)


def as_user(work: Callable[[], object]) -> int:
    """Do it in a process of an ordinary user; how that ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dying(work: Callable[[], object]) -> Callable[[], None]:
    """The same, and the process dies as the first file comes into its place."""

    def die(*_: Any, **__: Any) -> None:
        os._exit(DIED)

    def run() -> None:
        Tree.place = die
        work()

    return run


def bits(place: Path) -> int:
    return stat.S_IMODE((place / "live/shut").stat().st_mode)


def test_an_apply_that_was_cut_off_leaves_the_bits_as_they_were(place: Path) -> None:
    def apply() -> None:
        changes = read_changes(place / "upper", place / "live")
        assert [change.path for change in changes.changes] == ["/workspace/shut/f"]
        apply_changes(place / "upper", place / "live", changes, uid=None)

    changes = read_changes(place / "upper", place / "live")
    assert as_user(dying(apply)) == DIED
    assert bits(place) == 0o755
    again = lambda: apply_changes(place / "upper", place / "live", changes, uid=None)  # noqa: E731 - as recovery does
    assert as_user(again) == 0
    assert ((place / "live/shut/f").read_text(), bits(place)) == ("new", 0o555)


@pytest.mark.parametrize("others", [False, True])
def test_a_restore_that_was_cut_off_leaves_the_bits_as_they_were(place: Path, others: bool) -> None:
    def take() -> None:
        with Workspace(place / "live") as workspace:
            store = SnapshotStore(place / "points")
            store.capture("p1", workspace, ["/workspace/shut/f"])
            (place / "live/shut/f").write_text("changed")
            store.set_expect("p1", {"/workspace/shut/f": workspace.fingerprint("/workspace/shut/f")})

    def restore() -> None:
        with Workspace(place / "live") as workspace:
            store = SnapshotStore(place / "points")
            plan = store.plan_restore(workspace, ["p1"])
            assert not plan.conflicts
            store.restore(workspace, plan.items)

    def somebody() -> None:
        """Puts it back by hand, so that nothing is left to restore."""
        shut = place / "live/shut"
        facts = shut.stat()
        (shut / "f").write_text("old")
        with Workspace(place / "live") as workspace:
            point = SnapshotStore(place / "points").require("p1")
            os.utime(shut / "f", ns=(facts.st_atime_ns, point.paths[0].mtime_ns))
            os.utime(shut, ns=(facts.st_atime_ns, point.parents["/workspace/shut"]))
            assert SnapshotStore(place / "points").plan_restore(workspace, ["p1"]).items == ()

    assert as_user(take) == 0
    assert as_user(dying(restore)) == DIED
    assert bits(place) == 0o755
    assert as_user(somebody if others else restore) == 0
    assert ((place / "live/shut/f").read_text(), bits(place)) == ("old", 0o555)
