"""Rolling back: what it would do, and that it does exactly that."""

from __future__ import annotations

import os
import stat
import struct

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


def test_a_directory_that_got_a_file_after_the_plan_stops_it(store, workspace, live):
    act(store, workspace, "p1", ["/workspace/d"], (live / "d").mkdir)
    plan = store.plan_restore(workspace, ["p1"])
    (live / "d/theirs").write_text("x")
    with pytest.raises(SnapshotError, match="`/workspace/d/theirs` changed since"):
        store.restore(workspace, plan.items)
    assert (live / "d/theirs").read_text() == "x"
    assert store.plan_restore(workspace, ["p1"]).conflicts == ("/workspace/d",)


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


def test_names_of_one_file_come_back_as_names_of_one_file(store, workspace, live):
    (live / "d").mkdir()
    (live / "a").write_text("x")
    (live / "d/b").hardlink_to(live / "a")
    (live / "stays").hardlink_to(live / "a")
    (live / "other").write_text("x")

    def work():
        (live / "a").unlink()
        workspace.delete("/workspace/d", recursive=True)
        (live / "other").unlink()

    act(store, workspace, "p1", ["/workspace/a", "/workspace/d", "/workspace/other"], work)
    undo(store, workspace, "p1")
    facts = {name: (live / name).stat() for name in ("a", "d/b", "stays", "other")}
    assert len({facts[name].st_ino for name in ("a", "d/b", "stays")}) == 1
    assert facts["a"].st_nlink == 3
    assert facts["other"].st_nlink == 1
    assert store.plan_restore(workspace, ["p1"]).items == ()


def test_names_that_went_one_after_the_other_are_one_file_again(store, workspace, live):
    (live / "a").write_text("x")
    (live / "b").hardlink_to(live / "a")
    act(store, workspace, "p1", ["/workspace/a"], (live / "a").unlink)
    act(store, workspace, "p2", ["/workspace/b"], lambda: workspace.write("/workspace/b", b"y"))
    undo(store, workspace, "p2", "p1")
    assert (live / "a").stat().st_ino == (live / "b").stat().st_ino
    assert (live / "a").read_text() == "x"
    assert store.plan_restore(workspace, ["p2", "p1"]).items == ()


def test_names_that_all_went_or_were_changed_since(store, workspace, live):
    (live / "a").write_text("x")
    (live / "b").hardlink_to(live / "a")
    (live / "c").write_text("y")
    (live / "d").hardlink_to(live / "c")

    def work():
        for name in ("a", "b", "c"):
            (live / name).unlink()

    act(store, workspace, "p1", [f"/workspace/{name}" for name in "abc"], work)
    (live / "d").write_text("changed in place by somebody else")
    undo(store, workspace, "p1")
    assert (live / "a").stat().st_ino == (live / "b").stat().st_ino
    assert (live / "a").read_text() == "x"
    assert (live / "c").read_text() == "y"
    assert (live / "d").read_text() == "changed in place by somebody else"


def test_access_lists_and_capabilities_come_back(store, workspace, live):
    (live / "f").write_text("x")
    (live / "f").chmod(0o640)
    entries = ((1, 6, -1), (2, 4, 12345), (4, 4, -1), (16, 4, -1), (32, 0, -1))
    access = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", t, p, i & 0xFFFFFFFF) for t, p, i in entries)
    try:
        os.setxattr(live / "f", "system.posix_acl_access", access)
    except OSError:
        pytest.skip("this file system has no access lists")
    wanted = {"system.posix_acl_access": access}
    if os.geteuid() == 0:
        wanted["security.capability"] = struct.pack("<IIIII", 0x02000000, 1 << 10, 0, 0, 0)
        os.setxattr(live / "f", "security.capability", wanted["security.capability"])
    mode = (live / "f").stat().st_mode
    act(store, workspace, "p1", ["/workspace/f"], (live / "f").unlink)
    undo(store, workspace, "p1")
    assert {name: os.getxattr(live / "f", name) for name in os.listxattr(live / "f")} == wanted
    assert (live / "f").stat().st_mode == mode
    # What is written anew keeps the list, and no capability: it is another program.
    workspace.write("/workspace/f", b"y")
    assert os.listxattr(live / "f") == ["system.posix_acl_access"]


def test_an_attribute_that_others_set_is_a_conflict(store, workspace, live):
    (live / "f").write_text("x")
    act(store, workspace, "p1", ["/workspace/f"], lambda: workspace.write("/workspace/f", b"y"))
    os.setxattr(live / "f", "user.theirs", b"1")
    assert undo(store, workspace, "p1").conflicts == ("/workspace/f",)


@pytest.mark.parametrize("sparse", [True, False])
def test_holes_are_where_they_were_whatever_content_is_shared(store, workspace, live, sparse):
    """The same content, once with holes and once without, is kept once."""
    (live / "holes").write_bytes(b"")
    os.truncate(live / "holes", 1 << 20)
    (live / "zeros").write_bytes(bytes(1 << 20))
    (live / "small").write_bytes(b"")
    os.truncate(live / "small", 8192)
    os.setxattr(live / "small", "user.a", b"x" * 1000)
    names = ["holes", "zeros", "small"] if sparse else ["zeros", "holes", "small"]
    before = {name: (live / name).stat().st_blocks for name in names}

    def work():
        for name in names:
            (live / name).unlink()

    act(store, workspace, "p1", [f"/workspace/{name}" for name in names], work)
    undo(store, workspace, "p1")
    assert {name: (live / name).stat().st_blocks for name in names} == before


def test_the_time_of_a_directory_comes_back_where_nothing_else_has_to(store, workspace, live):
    (live / "d").mkdir()
    os.utime(live / "d", ns=(10**18, 10**18))
    act(store, workspace, "p1", ["/workspace/d/x"], lambda: workspace.write("/workspace/d/x", b""))
    act(store, workspace, "p2", ["/workspace/d/x"], lambda: workspace.delete("/workspace/d/x", False))
    plan = undo(store, workspace, "p2", "p1")
    assert [(item.path, plan.kinds[item.path]) for item in plan.items] == [("/workspace/d", "directory")]
    assert (live / "d").stat().st_mtime_ns == 10**18
    assert store.plan_restore(workspace, ["p2", "p1"]).items == ()


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


def test_a_directory_in_which_a_file_came_and_went_has_a_kind(store, workspace, live):
    before = live.stat().st_mtime_ns
    act(store, workspace, "p1", ["/workspace/f"], lambda: (live / "f").write_text("made"))
    act(store, workspace, "p2", ["/workspace/f"], (live / "f").unlink)
    os.utime(live, ns=(1, 1))
    plan = undo(store, workspace, "p2", "p1")
    assert {item.path: plan.kinds[item.path] for item in plan.items} == {"/workspace": "directory"}
    assert live.stat().st_mtime_ns == before


def test_what_others_changed_between_two_calls_is_a_conflict(store, workspace, live):
    (live / "a").write_text("before")
    act(store, workspace, "p1", ["/workspace/a"], lambda: (live / "a").write_text("first"))
    (live / "a").write_text("theirs")
    act(store, workspace, "p2", ["/workspace/a"], lambda: (live / "a").write_text("second"))
    plan = undo(store, workspace, "p2", "p1")
    assert plan.conflicts == ("/workspace/a",)
    assert "between two of these calls" in plan.reasons["/workspace/a"]
    assert (live / "a").read_text() == "second"
    undo(store, workspace, "p2")
    assert (live / "a").read_text() == "theirs"
