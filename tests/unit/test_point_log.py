"""Small points in one file: what was kept is found, what a crash tore off never counted, and what is damaged is said."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox import pointlog, points
from ringfence.sandbox.pointlog import ENTRY_MAX
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.sandbox.workspace import Workspace

pytestmark = pytest.mark.timeout(60)

SECTOR = 512
ROWS = {"rows": ["x" * 100] * 12}
"""More than two sectors of it."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "points"


def opened(root: Path) -> SnapshotStore:
    """The store as another process finds it."""
    pointlog._logs.clear()
    return SnapshotStore(root)


def files(root: Path) -> list[Path]:
    return sorted((root / "log").iterdir())


def extra(store: SnapshotStore, point: str) -> Any:
    found = store.load(point)
    return None if found is None else found.extra


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_records_are_found_by_this_process_and_the_next(root: Path) -> None:
    store = opened(root)
    for number in range(1, 12):
        made = store.put_record(f"p{number}", {"n": number, "odd": "é\0\ud800"})
        assert store.load(f"p{number}") == made
    for found in (store, opened(root)):
        assert found.points() == [f"p{number}" for number in range(1, 12)]
        assert extra(found, "p7") == {"n": 7, "odd": "é\0\ud800"}
        assert found.verify("p11")
        assert extra(found, "p12") is None
        assert not found.verify("p12")
        assert found.size_of("p3") % SECTOR == 0 < found.size_of("p3")
        assert found.taken_at("p3") <= found.taken_at("p4")
    assert list(root.glob("*.json")) == []
    assert files(root)[0].stat().st_mode & 0o777 == 0o600


def test_the_newest_of_one_id_counts_and_a_file_over_all(root: Path, tmp_path: Path) -> None:
    store = opened(root)
    for number in range(3):
        store.put_record("p1", {"n": number})
    assert extra(opened(root), "p1") == {"n": 2}
    (tmp_path / "live").mkdir()
    with Workspace(tmp_path / "live") as workspace:
        store.capture("p1", workspace, ["/workspace/none"], extra={"n": 3})
    store.put_record("p1", {"n": 4})
    assert (root / "p1.json").exists()
    for found in (store, opened(root)):
        assert extra(found, "p1") == {"n": 4}
        assert found.points() == ["p1"]


def test_what_is_long_has_a_file_of_its_own(root: Path) -> None:
    store = opened(root)
    store.put_record("p1", {"a": "x" * ENTRY_MAX})
    assert (root / "p1.json").exists()
    assert not (root / "log").exists()
    store.put_record("p2", {"a": "x" * (ENTRY_MAX - 200)})
    assert not (root / "p2.json").exists()
    assert [len(extra(opened(root), point)["a"]) for point in ("p1", "p2")] == [ENTRY_MAX, ENTRY_MAX - 200]


def test_a_record_costs_one_flush_of_data(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root)
    store.put_record("p1", ROWS)
    flushed: list[str] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, name=name, real=real: (flushed.append(name), real(fd)))
    size, blocks = files(root)[0].stat().st_size, files(root)[0].stat().st_blocks
    store.put_record("p2", ROWS)
    assert flushed == ["fdatasync"]
    # Nothing but data has to be written: the file is as long as before, and has its blocks.
    assert (files(root)[0].stat().st_size, files(root)[0].stat().st_blocks) == (size, blocks)
    assert blocks * 512 >= size


def test_files_fill_up_and_go_when_their_points_do(root: Path) -> None:
    store = opened(root)
    names = [f"p{number}" for number in range(1, 25)]
    for name in names:
        store.put_record(name, {"a": name * 5000})
    assert len(files(root)) >= 3
    before = sum(path.stat().st_size for path in files(root))
    assert [extra(opened(root), name) for name in names] == [{"a": name * 5000} for name in names]
    store = opened(root)
    freed = store.remove(names[:-1], ())
    assert freed == before - sum(path.stat().st_size for path in files(root)) > 0
    assert len(files(root)) == 1
    store.put_record("p25", {"a": 25})
    for found in (store, opened(root)):
        assert found.points() == ["p24", "p25"]
        assert extra(found, "p24") == {"a": "p24" * 5000}
        assert extra(found, "p25") == {"a": 25}
    store.remove(["p24", "p25"], ())
    assert files(root) == []
    assert opened(root).points() == []


def test_a_removed_point_leaves_the_others_of_its_file(root: Path) -> None:
    store = opened(root)
    for number in range(1, 6):
        store.put_record(f"p{number}", {"n": number})
    store.put_record("p3", {"n": 33})
    store.remove(["p2", "p9"], ())
    store.put_record("p6", {"n": 6})
    for found in (store, opened(root)):
        assert found.points() == ["p1", "p3", "p4", "p5", "p6"]
        assert [extra(found, point)["n"] for point in found.points()] == [1, 33, 4, 5, 6]


def test_what_another_process_wrote_is_seen(root: Path) -> None:
    one = opened(root)
    one.put_record("p1", {"n": 1})
    other = opened(root)
    other.put_record("p2", {"n": 2})
    assert extra(one, "p2") == {"n": 2}
    other.put_record("p3", {"n": 3})
    one.put_record("p4", {"n": 4})
    assert one.points() == other.points() == ["p1", "p2", "p3", "p4"]
    assert [extra(opened(root), f"p{n}") for n in (1, 2, 3, 4)] == [{"n": n} for n in (1, 2, 3, 4)]


# -- a crash --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [(), (0,), (0, 1), (1,), (1, 2), (0, 2), (2,)])
def test_a_torn_entry_never_counted(root: Path, kept: tuple[int, ...]) -> None:
    """Some of the last entry's sectors reached the disk, and others are the zeros that were there."""
    store = opened(root)
    store.put_record("p1", {"n": 1})
    at = SECTOR + store.size_of("p1")
    store.put_record("p2", ROWS)
    (path,) = files(root)
    assert store.size_of("p2") == 4 * SECTOR
    for sector in range(4):
        if sector not in kept:
            change(path, at + sector * SECTOR, bytes(SECTOR))
    store = opened(root)
    assert store.points() == ["p1"]
    assert extra(store, "p2") is None
    assert store.damages(["p1"]) == {"p1": []}
    # What comes later is whole, whatever was left there.
    store.put_record("p2", {"n": 2})
    store.put_record("p3", {"n": 3})
    for found in (store, opened(root)):
        assert [extra(found, f"p{n}") for n in (1, 2, 3)] == [{"n": 1}, {"n": 2}, {"n": 3}]


def _steps(root: Path, count: int, work: str) -> int:
    """In a process of its own: do `work` and die before its `count`th system call that changes the disk; gives its end."""
    child = os.fork()
    if child == 0:
        left = count

        def dying(real: Any) -> Any:
            def call(*given: Any, **options: Any) -> Any:
                nonlocal left
                if left == 0:
                    os._exit(9)
                left -= 1
                return real(*given, **options)

            return call

        for name in ("write", "pwrite", "fsync", "fdatasync", "mkdir", "rename", "unlink", "open"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            store = opened(root)
            if work == "remove":
                store.remove(["p1", "p2"], ())
            else:
                store.put_record("p3", ROWS)
                store.put_record("p4", {"a": "x" * (ENTRY_MAX - 300)})
                store.put_record("p5", {"a": "x" * (ENTRY_MAX - 300)})
        except BaseException:  # noqa: BLE001 - the child must not go on as the parent
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("work", ["put", "remove"])
@pytest.mark.parametrize("fresh", [True, False], ids=["new store", "used store"])
def test_killed_between_any_two_steps(tmp_path: Path, work: str, fresh: bool) -> None:
    """What was there is there, what was begun is whole or not there; and the next one goes on."""
    ends: list[int] = []
    seen: set[tuple[str, ...]] = set()
    while not ends or ends[-1] == 9:
        root = tmp_path / f"points-{len(ends)}"
        before = [] if fresh and work == "put" else ["p1", "p2", "p7"]
        for name in before:
            opened(root).put_record(name, {"name": name})
        ends.append(_steps(root, len(ends), work))
        store = opened(root)
        now = store.points()
        seen.add(tuple(now))
        assert set(before) - {"p1", "p2"} <= set(now)
        assert work == "remove" or set(before) <= set(now)
        assert store.damages(now) == {point: [] for point in now}
        assert all(extra(store, point) == {"name": point} for point in now if point in before)
        store.put_record("p8", {"n": 8})
        assert opened(root).points() == [*now, "p8"]
    assert ends[-1] == 0
    assert len(ends) > 5
    assert len(seen) == (2 if work == "remove" else 4)


# -- damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["last", "middle"])
@pytest.mark.parametrize("at", [0, 9, 13, 17, 30, 152, 170, 600, 1100, -2])
def test_a_damaged_entry_is_an_error_never_an_absence(root: Path, place: str, at: int) -> None:
    store = opened(root)
    store.put_record("p1", {"n": 1})
    start = SECTOR + store.size_of("p1")
    length = len(points.dump(store.put_record("p2", ROWS))) + pointlog._HEADER_BYTES
    if place == "middle":
        store.put_record("p3", {"n": 3})
    (path,) = files(root)
    where = start + (at if at >= 0 else length + at)
    change(path, where, bytes([path.read_bytes()[where] ^ 1]))
    for found in (store, opened(root)):
        with pytest.raises(SnapshotError, match="damaged") as caught:
            found.load("p2")
        assert "\n" not in str(caught.value)
        assert not found.verify("p2")
        assert extra(found, "p1") == {"n": 1}
    again = opened(root)
    again.put_record("p4", {"n": 4})
    for found in (again, opened(root)):
        assert extra(found, "p4") == {"n": 4}
        assert place == "last" or extra(found, "p3") == {"n": 3}
        with pytest.raises(SnapshotError, match="damaged"):
            found.load("p2")


def test_damage_outlives_the_removal_of_what_lies_before_it(root: Path) -> None:
    store = opened(root)
    store.put_record("p1", {"n": 1})
    start = SECTOR + store.size_of("p1")
    store.put_record("p2", ROWS)
    store.put_record("p3", {"n": 3})
    (path,) = files(root)
    change(path, start + 3, b"?")  # whose it was can't be read any more
    store = opened(root)
    store.remove(["p1"], ())
    for found in (store, opened(root)):
        assert found.points() == ["p3"]
        with pytest.raises(SnapshotError, match=r"nobody knows whether there is a rollback point `p2`"):
            found.load("p2")


@pytest.mark.parametrize("how", ["cut", "head", "grown", "empty"])
def test_a_file_that_is_not_as_it_was_laid_out(root: Path, how: str) -> None:
    store = opened(root)
    store.put_record("p1", ROWS)
    store.put_record("p2", ROWS)
    (path,) = files(root)
    if how == "head":
        change(path, 3, b"?")
    else:
        size = {"cut": SECTOR + store.size_of("p1"), "empty": 0, "grown": 2 << 16}[how]
        os.truncate(path, size)
    store = opened(root)
    with pytest.raises(SnapshotError, match="damaged"):
        store.load("p3")
    if how in ("cut", "empty"):
        with pytest.raises(SnapshotError, match="damaged"):
            store.load("p2")
    store.put_record("p4", {"n": 4})
    assert extra(opened(root), "p4") == {"n": 4}


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_something_else_in_the_place_of_a_file_holds_nobody_up(root: Path, put: Any) -> None:
    store = opened(root)
    store.put_record("p1", ROWS)
    (path,) = files(root)
    path.unlink()
    put(path)
    store = opened(root)
    with pytest.raises(SnapshotError, match="in the place of its file"):
        store.load("p1")
    with pytest.raises(SnapshotError):
        store.put_record("p2", ROWS)


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
def test_a_disk_that_fails_refuses_and_the_next_one_goes_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = opened(root)
    store.put_record("p1", {"n": 1})

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, name, fails)
        with pytest.raises(SnapshotError, match="can't be used: input/output error"):
            store.put_record("p2", ROWS)
    assert extra(store, "p2") is None
    store.put_record("p3", {"n": 3})
    assert len(files(root)) == 2
    assert [extra(opened(root), point) for point in ("p1", "p3")] == [{"n": 1}, {"n": 3}]


def test_what_reads_back_wrong_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root)
    store.put_record("p1", {"n": 1})
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data).replace(b"x", b"y"), at))
    with pytest.raises(SnapshotError, match="`p2` reads back wrong; check the disk, then try again"):
        store.put_record("p2", ROWS)
    monkeypatch.undo()
    store.put_record("p3", {"n": 3})
    assert [extra(opened(root), point) for point in ("p1", "p3")] == [{"n": 1}, {"n": 3}]


def test_a_store_that_was_moved_away_gets_nothing_more(root: Path, tmp_path: Path) -> None:
    store = opened(root)
    store.put_record("p1", {"n": 1})
    root.rename(tmp_path / "away")
    assert extra(store, "p1") is None
    store.put_record("p2", {"n": 2})
    assert extra(opened(root), "p2") == {"n": 2}
    assert opened(tmp_path / "away").points() == ["p1"]
