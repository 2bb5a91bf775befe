"""Rolling back: what it would do, and that it does exactly that."""

from __future__ import annotations

import os
import stat

import pytest
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.sandbox.workspace import Workspace

ABSENT = "absent"


@pytest.fixture
def live(tmp_path):
    root = tmp_path / "live"
    root.mkdir()
    return root


@pytest.fixture
def workspace(live):
    with Workspace(live) as opened:
        yield opened


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path / "points")


def act(store, workspace, point, paths, effect):
    """Capture, do, and note what came of it, as exec.run does."""
    made = store.capture(point, workspace, paths)
    effect()
    touched = [entry.path for entry in made.paths]
    store.set_expect(point, {path: workspace.fingerprint(path) for path in touched})


def undo(store, workspace, *points, path=None):
    plan = store.plan_restore(workspace, points, path)
    store.restore(workspace, plan.items)
    return plan


def test_new_files_go_changed_ones_come_back_and_others_stay(store, workspace, live):
    (live / "a").write_text("before")
    (live / "ignored").mkdir()

    def work():
        (live / "a").write_text("after")
        (live / "n").write_text("new")
        (live / "m").mkdir()
        (live / "m/n").write_text("new")

    act(store, workspace, "p1", [f"/workspace/{name}" for name in ("a", "n", "m", "m/n")], work)
    (live / "u").write_text("another program")
    (live / "ignored/i").write_text("another program")
    plan = store.plan_restore(workspace, ["p1"])
    assert [(item.path, item.action) for item in plan.items] == [
        ("/workspace/a", "restore"),
        ("/workspace/m", "remove"),
        ("/workspace/m/n", "remove"),
        ("/workspace/n", "remove"),
    ]
    store.restore(workspace, plan.items)
    assert (live / "a").read_text() == "before"
    assert sorted(path.name for path in live.iterdir()) == ["a", "ignored", "u"]
    assert (live / "ignored/i").exists()


def test_what_others_changed_since_is_a_conflict_and_left_alone(store, workspace, live):
    (live / "a").write_text("before")
    (live / "b").write_text("before")

    def work():
        (live / "a").write_text("after")
        (live / "b").write_text("after")
        (live / "new").mkdir()

    act(store, workspace, "p1", ["/workspace/a", "/workspace/b", "/workspace/new"], work)
    (live / "a").write_text("theirs")
    (live / "new/theirs").write_text("theirs")
    plan = undo(store, workspace, "p1")
    assert plan.conflicts == ("/workspace/a", "/workspace/new")
    assert "theirs" in plan.reasons["/workspace/new"]
    assert (live / "a").read_text() == "theirs"
    assert (live / "b").read_text() == "before"
    assert (live / "new/theirs").exists()


def test_a_directory_that_others_took_away_is_not_made_up(store, workspace, live):
    (live / "d").mkdir()
    (live / "d/f").write_text("x")
    act(store, workspace, "p1", ["/workspace/d/f"], (live / "d/f").unlink)
    (live / "d").rmdir()
    plan = undo(store, workspace, "p1")
    assert plan.conflicts == ("/workspace/d/f",)
    assert list(live.iterdir()) == []


def test_kinds_come_back(store, workspace, live):
    (live / "d/sub/empty").mkdir(parents=True)
    (live / "d/f").write_text("f")
    (live / "f").write_text("f")
    (live / "f").chmod(0o640)
    (live / "l").symlink_to("f")
    seen = {
        name: workspace.fingerprint(f"/workspace/{name}")
        for name in ("d", "d/sub", "d/sub/empty", "d/f", "f", "l")
    }

    def work():
        workspace.delete("/workspace/d", recursive=True)
        (live / "d").symlink_to("/etc")
        (live / "f").unlink()
        (live / "f").mkdir()
        (live / "f/x").write_text("x")
        (live / "l").unlink()
        (live / "l").write_text("no link")

    paths = [f"/workspace/{name}" for name in ("d", "f", "f/x", "l")]
    act(store, workspace, "p1", paths, work)
    undo(store, workspace, "p1")
    assert {name: workspace.fingerprint(f"/workspace/{name}") for name in seen} == seen
    assert (live / "d").is_dir()
    assert not (live / "d").is_symlink()


def test_several_points_collapse_to_the_oldest_state(store, workspace, live):
    (live / "f").write_text("0")
    for number in (1, 2, 3):
        act(
            store, workspace, f"p{number}", ["/workspace/f"], lambda n=number: (live / "f").write_text(str(n))
        )
    undo(store, workspace, "p3", "p2")
    assert (live / "f").read_text() == "1"
    plan = undo(store, workspace, "p3", "p2", "p1")
    # What an earlier rollback left is neither what the newest point made nor what it found.
    assert plan.conflicts == ("/workspace/f",)
    undo(store, workspace, "p1")
    assert (live / "f").read_text() == "0"


def test_a_call_that_was_refused_after_its_point_changes_no_plan(store, workspace, live):
    (live / "f").write_text("0")
    act(store, workspace, "p1", ["/workspace/f"], lambda: (live / "f").write_text("1"))
    store.capture("p2", workspace, ["/workspace/f"], expect={"/workspace/f": ABSENT})
    store.capture("p3", workspace, ["/workspace/f"], expect={"/workspace/f": "file:0644:00"})
    undo(store, workspace, "p3", "p2", "p1")
    assert (live / "f").read_text() == "0"


def test_a_point_that_is_gone_is_refused_by_name(store, workspace):
    act(store, workspace, "p1", ["/workspace/f"], lambda: workspace.write("/workspace/f", b"1"))
    with pytest.raises(SnapshotError, match=r"`p2` is gone: `.*p2\.json` does not exist; restore the points"):
        store.plan_restore(workspace, ["p2", "p1"])


def test_only_one_path(store, workspace, live):
    def work():
        workspace.write("/workspace/a/x", b"1")
        workspace.write("/workspace/ab/x", b"1")

    act(store, workspace, "p1", [f"/workspace/{name}" for name in ("a", "a/x", "ab", "ab/x")], work)
    undo(store, workspace, "p1", path="/workspace/a")
    assert [path.name for path in live.iterdir()] == ["ab"]


def test_times_bits_attributes_and_owners_come_back(store, workspace, live):
    (live / "d").mkdir(mode=0o750)
    (live / "d/f").write_text("x")
    (live / "d/f").chmod(0o600)
    os.setxattr(live / "d/f", "user.a", b"1")
    os.setxattr(live / "d", "user.d", b"2")
    if os.geteuid() == 0:
        os.chown(live / "d/f", 1234, 1235)
    for name in ("d/f", "d"):
        os.utime(live / name, ns=(1_111_111_111_222_333_444,) * 2)
    before = {name: (live / name).stat() for name in ("d", "d/f", ".")}

    def work():
        (live / "d/f").chmod(0o777)
        os.setxattr(live / "d/f", "user.b", b"3")
        os.removexattr(live / "d/f", "user.a")
        os.removexattr(live / "d", "user.d")
        (live / "d/g").write_text("x")
        if os.geteuid() == 0:
            os.chown(live / "d/f", 0, 0)

    act(store, workspace, "p1", ["/workspace/d", "/workspace/d/g"], work)
    undo(store, workspace, "p1")
    for name, facts in before.items():
        now = (live / name).stat()
        assert (now.st_mode, now.st_mtime_ns, now.st_uid, now.st_gid) == (
            facts.st_mode,
            facts.st_mtime_ns,
            facts.st_uid,
            facts.st_gid,
        ), name
    assert {name: os.getxattr(live / "d/f", name) for name in os.listxattr(live / "d/f")} == {"user.a": b"1"}
    assert os.getxattr(live / "d", "user.d") == b"2"


def test_a_time_alone_comes_back(store, workspace, live):
    (live / "f").write_text("x")
    before = (live / "f").stat().st_mtime_ns
    act(store, workspace, "p1", ["/workspace/f"], lambda: os.utime(live / "f", ns=(1, 1)))
    undo(store, workspace, "p1")
    assert (live / "f").stat().st_mtime_ns == before


def test_directories_that_forbid_writing_are_no_hindrance(store, workspace, live):
    (live / "ro/deep").mkdir(parents=True)
    (live / "ro/deep/f").write_text("x")
    (live / "ro/deep").chmod(0o555)
    (live / "ro").chmod(0o555)
    before = {name: workspace.fingerprint(f"/workspace/{name}") for name in ("ro", "ro/deep", "ro/deep/f")}
    act(store, workspace, "p1", ["/workspace/ro"], lambda: workspace.delete("/workspace/ro", recursive=True))
    undo(store, workspace, "p1")
    assert {name: workspace.fingerprint(f"/workspace/{name}") for name in before} == before


def test_a_damaged_blob_stops_the_rollback_before_it_touches_anything(store, workspace, live):
    (live / "a").write_bytes(os.urandom(50_000))
    (live / "b").write_bytes(os.urandom(50_000))

    def work():
        (live / "a").write_text("after")
        (live / "b").write_text("after")

    act(store, workspace, "p1", ["/workspace/a", "/workspace/b"], work)
    plan = store.plan_restore(workspace, ["p1"])
    blob = max((path for path in (store.root / "blobs").rglob("*") if path.is_file()), key=str)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(SnapshotError, match="nothing was changed"):
        store.restore(workspace, plan.items)
    assert (live / "a").read_text() == (live / "b").read_text() == "after"


def test_a_path_that_changed_after_the_plan_stops_it(store, workspace, live):
    (live / "a").write_text("before")
    act(store, workspace, "p1", ["/workspace/a"], lambda: (live / "a").write_text("after"))
    plan = store.plan_restore(workspace, ["p1"])
    (live / "a").write_text("theirs")
    with pytest.raises(SnapshotError, match="plan the rollback again"):
        store.restore(workspace, plan.items)
    assert (live / "a").read_text() == "theirs"


def test_a_restore_can_be_run_again(store, workspace, live):
    (live / "d").mkdir()
    (live / "d/f").write_text("x")
    act(store, workspace, "p1", ["/workspace/d"], lambda: workspace.delete("/workspace/d", recursive=True))
    plan = store.plan_restore(workspace, ["p1"])
    store.restore(workspace, plan.items)
    first = {path: path.stat().st_mtime_ns for path in live.rglob("*")}
    store.restore(workspace, plan.items)
    assert {path: path.stat().st_mtime_ns for path in live.rglob("*")} == first
    assert store.plan_restore(workspace, ["p1"]).items == ()


def test_hard_links_come_back_as_files_of_their_own(store, workspace, live):
    (live / "a").write_text("x")
    (live / "b").hardlink_to(live / "a")

    def work():
        (live / "a").unlink()
        (live / "b").unlink()

    act(store, workspace, "p1", ["/workspace/a", "/workspace/b"], work)
    undo(store, workspace, "p1")
    assert (live / "a").read_text() == (live / "b").read_text() == "x"
    assert (live / "a").stat().st_nlink == 1


def test_nothing_is_left_in_the_staging_directory(store, workspace, live):
    (live / "f").write_text("x")
    (live / "l").symlink_to("f")

    def work():
        (live / "f").unlink()
        (live / "l").unlink()

    act(store, workspace, "p1", ["/workspace/f", "/workspace/l"], work)
    undo(store, workspace, "p1")
    assert list((live.parent / ".tmp-live").iterdir()) == []
    assert stat.S_ISLNK((live / "l").lstat().st_mode)
