"""The store of rollback points: what is kept is whole, or the call is refused."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import pytest
from ringfence.sandbox.snapshots import PointManifest, PointPath, SnapshotError, SnapshotStore
from ringfence.sandbox.workspace import Workspace


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
    return SnapshotStore(tmp_path / "data/points/a1")


def blobs(store) -> list[Path]:
    return [path for path in (store.root / "blobs").rglob("*") if path.is_file()]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_point_holds_what_was_there(store, workspace, live):
    (live / "d/empty").mkdir(parents=True)
    (live / "d/small").write_text("x")
    (live / "d/large").write_bytes(bytes(100_000))
    (live / "d/link").symlink_to("small")
    os.setxattr(live / "d/small", "user.note", b"\0\xff")
    (live / "d" / os.fsdecode(b"\xff\n")).write_text("odd")
    made = store.capture(
        "p7",
        workspace,
        ["/workspace/d", "/workspace/none"],
        expect={"/workspace/none": "x"},
        extra={"a": [1, None, "é"]},
    )
    assert store.load("p7") == made
    assert store.verify("p7")
    assert {entry.path: entry.kind for entry in made.paths} == {
        "/workspace/d": "directory",
        "/workspace/d/empty": "directory",
        "/workspace/d/large": "file",
        "/workspace/d/link": "link",
        "/workspace/d/small": "file",
        "/workspace/d/\udcff\n": "file",
        "/workspace/none": "absent",
    }
    assert {entry.path: entry.before for entry in made.paths} == {
        entry.path: workspace.fingerprint(entry.path) for entry in made.paths
    }
    assert made.size_bytes == 100_004
    assert made.extra == {"a": [1, None, "é"]}


def test_a_directory_alone(store, workspace, live):
    (live / "d/e").mkdir(parents=True)
    made = store.capture("p1", workspace, ["/workspace/d"], beneath=False)
    assert [entry.path for entry in made.paths] == ["/workspace/d"]


def test_nobody_else_may_look(store, workspace, live):
    (live / "f").write_bytes(bytes(100_000))
    store.capture("p1", workspace, ["/workspace/f"])
    for path in [store.root, *store.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_same_content_is_kept_once(store, workspace, live):
    for name in ("a", "b", "c"):
        (live / name).write_bytes(bytes(50_000))
    store.capture("p1", workspace, ["/workspace/a", "/workspace/b"])
    store.capture("p2", workspace, ["/workspace/c"])
    assert len(blobs(store)) == 1
    assert list((store.root / "tmp").iterdir()) == []


def test_a_damaged_blob_is_seen_and_written_anew(store, workspace, live):
    (live / "f").write_bytes(os.urandom(50_000))
    store.capture("p1", workspace, ["/workspace/f"])
    [blob] = blobs(store)
    flip(blob)
    assert not store.verify("p1")
    store.capture("p2", workspace, ["/workspace/f"])
    assert store.verify("p1")
    assert store.verify("p2")


def test_many_small_files_keep_the_manifest_bounded(store, workspace, live):
    (live / "d").mkdir()
    for number in range(100):
        (live / f"d/{number}").write_bytes(os.urandom(8_000))
    made = store.capture("p1", workspace, ["/workspace/d"])
    assert sum(len(entry.inline or b"") for entry in made.paths) <= 128 << 10
    assert len(blobs(store)) == sum(
        1 for entry in made.paths if entry.kind == "file" and entry.inline is None
    )
    assert store.verify("p1")


def test_holes_stay_holes(store, workspace, live):
    with (live / "sparse").open("wb") as file:
        file.seek(100 << 20)
        file.write(b"end")
    store.capture("p1", workspace, ["/workspace/sparse"], expect={"/workspace/sparse": "absent"})
    [blob] = blobs(store)
    assert blob.stat().st_blocks * 512 < 1 << 20
    (live / "sparse").unlink()
    store.restore(workspace, store.plan_restore(workspace, ["p1"]).items)
    assert (live / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (live / "sparse").stat().st_size == (100 << 20) + 3


def test_no_manifest_means_that_nothing_started(store):
    assert store.load("p1") is None
    assert not store.verify("p1")
    assert store.points() == []
    with pytest.raises(SnapshotError, match="does not exist"):
        store.set_expect("p1", {})


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "other", "junk", "future"])
def test_a_damaged_manifest_is_an_error_never_an_absence(store, how):
    store.put_record("p1", {"rows": list(range(10_000))})
    path = store.root / "p1.json"
    if how == "flip":
        flip(path)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-80])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other":
        store.put_record("p2", {"rows": list(range(10_001))})
        path.write_bytes((store.root / "p2.json").read_bytes())
    elif how == "junk":
        path.write_bytes(os.urandom(300))
    else:
        from hashlib import sha256

        line = path.read_bytes().split(b"\n")[0].replace(b'"format":1', b'"format":2')
        path.write_bytes(line + b'\n{"sha256": "' + sha256(line).hexdigest().encode() + b'"}\n')
    assert not store.verify("p1")
    with pytest.raises(SnapshotError) as caught:
        store.load("p1")
    assert "\n" not in str(caught.value)


def test_records_and_late_expectations(store):
    made = store.put_record("p3", {"xid": 7, "rows": [{"id": 1}]})
    assert store.load("p3") == made
    assert made.size_bytes > 0
    store.set_expect("p3", {"/workspace/a": "absent"})
    assert store.load("p3").expect == {"/workspace/a": "absent"}
    assert store.load("p3").extra == made.extra
    with pytest.raises(SnapshotError, match="not JSON"):
        store.put_record("p4", {"bytes": b"x"})
    assert store.load("p4") is None


def test_points_come_in_order(store):
    for number in (10, 9, 100, 1):
        store.put_record(f"p{number}", {})
    assert store.points() == ["p1", "p9", "p10", "p100"]


@pytest.mark.parametrize("point", ["", "../p1", "a/b", ".hidden", "p1\n", "x" * 200])
def test_ids_name_files_in_the_store_only(store, point):
    with pytest.raises(SnapshotError):
        store.put_record(point, {})


def test_what_can_not_be_brought_back_is_refused(store, workspace, live):
    (live / "d").mkdir()
    os.mkfifo(live / "d/pipe")
    with pytest.raises(SnapshotError, match="device, socket or pipe"):
        store.capture("p1", workspace, ["/workspace/d"])
    assert store.load("p1") is None


def test_a_store_that_is_a_file_refuses(tmp_path, workspace, live):
    (live / "f").write_text("x")
    (tmp_path / "store").write_text("in the way")
    store = SnapshotStore(tmp_path / "store")
    with pytest.raises(SnapshotError, match="can't be used"):
        store.capture("p1", workspace, ["/workspace/f"])
    with pytest.raises(SnapshotError, match="can't be used"):
        store.put_record("p1", {})


def test_a_store_on_another_file_system(workspace, live):
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == live.stat().st_dev:
        pytest.skip("there is no second file system")
    data = os.urandom(3_000_000)
    (live / "f").write_bytes(data)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        store = SnapshotStore(Path(other) / "points")
        store.capture("p1", workspace, ["/workspace/f"], expect={"/workspace/f": "absent"})
        (live / "f").unlink()
        store.restore(workspace, store.plan_restore(workspace, ["p1"]).items)
    assert (live / "f").read_bytes() == data


def test_the_cost_follows_what_is_touched(store, workspace, live, tmp_path):
    """Counted in system calls, which no noise changes: one file in ten and one in three thousand cost the same."""
    import shutil
    import subprocess
    import sys

    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    counts = []
    for number in (10, 3000):
        tree = tmp_path / f"t{number}" / "live"
        tree.mkdir(parents=True)
        for each in range(number):
            (tree / f"f{each}").write_text("x" * 1000)
        program = (
            "import os; from pathlib import Path\n"
            "from ringfence.sandbox.workspace import Workspace; from ringfence.sandbox.snapshots import SnapshotStore\n"
            f"w = Workspace(Path({str(tree)!r})); s = SnapshotStore(Path({str(tree.parent / 'points')!r}))\n"
            "s.capture('p0', w, ['/workspace/f0']); w.write('/workspace/f0', b'y'); os.path.exists('/marker-begin')\n"
            "s.capture('p1', w, ['/workspace/f1']); w.write('/workspace/f1', b'y'); os.path.exists('/marker-end')\n"
        )
        trace = tmp_path / f"trace{number}"
        subprocess.run(
            ["strace", "-f", "-o", str(trace), sys.executable, "-c", program], check=True, capture_output=True
        )
        lines = trace.read_text().splitlines()
        begin = next(at for at, line in enumerate(lines) if "/marker-begin" in line)
        end = next(at for at, line in enumerate(lines) if "/marker-end" in line)
        counts.append((end - begin, sum("sync(" in line for line in lines[begin:end])))
    assert counts[0] == counts[1]
    assert counts[0][1] == 4  # manifest and its directory, file and its directory


def test_a_point_that_is_kept_while_others_are_pruned_is_whole(store, workspace, live, tmp_path):
    (live / "f").write_bytes(b"f" * 50_000)
    for point in ("p1", "p2"):
        store.capture(point, workspace, ["/workspace/f"])
    needed = store.content_of(["p2"])
    # As for an object: its call holds no lock of the workspace.
    data = b"o" * 50_000
    (tmp_path / "object").write_bytes(data)
    entry = PointPath(
        path="bucket/key", before="v1", kind="file", size=len(data), blob=hashlib.sha256(data).hexdigest()
    )
    manifest = PointManifest(
        point="p3", paths=(entry,), size_bytes=len(data), expect={}, parents={}, extra={}
    )
    store.keep(manifest, lambda _: os.open(tmp_path / "object", os.O_RDONLY))
    store.remove(["p1"], needed)
    assert store.points() == ["p2", "p3"]
    assert store.verify("p2")
    assert store.verify("p3")
