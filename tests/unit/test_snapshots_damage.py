"""What of a point is damaged is named, here and in a shared store."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from ringfence.sandbox.depot import DepotError, DirectoryDepot
from ringfence.sandbox.shared import SharedFiles
from ringfence.sandbox.shared_points import SharedSnapshots
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.sandbox.workspace import Workspace

pytestmark = pytest.mark.timeout(30)

BIG = b"x" * 400_000
"""More than a manifest holds itself."""


def test_a_shared_store_is_read_back_too(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "depot").mkdir()
    workspace = Workspace(tmp_path / "live", uid=None)
    files = SharedFiles(DirectoryDepot(tmp_path / "depot"), "bot", 1)
    store = SharedSnapshots(tmp_path / "points", files, workspace)
    for name in ("a", "b"):
        (tmp_path / "live" / name).write_bytes(name.encode() + BIG)
        store.capture(f"p{1 + 'ab'.index(name)}", workspace, [f"/workspace/{name}"])
    ids = ["p1", "p2", "p3"]
    found = store.damages(ids)
    assert [len(found[one]) for one in ids] == [0, 0, 2]
    assert {(d.path, d.where) for d in found["p3"]} == {("", "here"), ("", "store")}
    # The store's copy of one content is damaged, and of the other point the manifest is gone.
    (blob,) = (p for p in (tmp_path / "depot").rglob("*") if p.is_file() and p.read_bytes() == b"a" + BIG)
    blob.chmod(0o600)
    blob.write_bytes(b"b" + BIG)
    (manifest,) = (p for p in (tmp_path / "depot").rglob("p2.json"))
    manifest.unlink()
    found = store.damages(ids[:2])
    assert [(d.path, d.where) for d in found["p1"]] == [("/workspace/a", "store")]
    assert [(d.path, d.where) for d in found["p2"]] == [("", "store")]
    assert not store.verify("p1")


# -- something else in the place of a file ------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _vast(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 29)


INSTEAD: list[tuple[Callable[[Path], object], str]] = [
    (os.mkfifo, "a pipe stands in the place of its file"),
    (lambda path: path.symlink_to("/dev/zero"), "a link stands in the place of its file"),
    (_socket, "a socket stands in the place of its file"),
    (Path.mkdir, "a directory stands in the place of its file"),
    (_vast, "it has 1099511627776 bytes, more than the 1073741824 that one may have"),
    (_hole, "it is cut short, or something else was written over it"),
    (Path.touch, "it is cut short, or something else was written over it"),
    (lambda path: path.write_text("{}"), "it is cut short, or something else was written over it"),
    (
        lambda path: path.write_text('{"sha256": "0"}\n'),
        "its checksum differs, so it was changed or cut short",
    ),
]


@pytest.fixture
def kept(tmp_path: Path) -> SnapshotStore:
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "a").write_bytes(BIG)
    with Workspace(tmp_path / "live", uid=None) as workspace:
        store = SnapshotStore(tmp_path / "points")
        store.capture("p1", workspace, ["/workspace/a"])
    return store


@pytest.mark.parametrize(("put", "why"), INSTEAD)
def test_a_manifest_is_read_only_from_a_file_of_its_own(
    kept: SnapshotStore, put: Callable[[Path], object], why: str
) -> None:
    path = kept.root / "p1.json"
    path.unlink()
    put(path)
    (damage,) = kept.damages(["p1"])["p1"]
    text = f"rollback point `p1` is damaged: {why}; restore the points directory from a backup"
    assert (damage.path, damage.why) == ("", text)
    with pytest.raises(SnapshotError):
        kept.load("p1")


@pytest.mark.parametrize("put", [put for put, _ in INSTEAD])
def test_content_is_read_only_from_a_file_of_its_own(
    kept: SnapshotStore, put: Callable[[Path], object]
) -> None:
    (blob,) = (kept.root / "blobs").glob("??/*")
    sha256 = blob.parent.name + blob.name
    blob.unlink()
    put(blob)
    (damage,) = kept.damages(["p1"])["p1"]
    assert (damage.path, damage.why) == ("/workspace/a", "its content is missing or damaged")
    if not blob.is_file() or blob.is_symlink():
        with pytest.raises(SnapshotError, match="stands in the place of its file"):
            kept.open_blob(sha256)


def test_what_a_restore_left_behind_is_read_only_from_a_file(kept: SnapshotStore, tmp_path: Path) -> None:
    os.mkfifo(kept.root / "restoring")
    with (
        Workspace(tmp_path / "live", uid=None) as workspace,
        pytest.raises(SnapshotError, match=r"`.*restoring` is damaged"),
    ):
        kept.plan_restore(workspace, ["p1"])


def test_a_pipe_in_a_shared_store_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(DepotError, match="a pipe stands in the place"):
        DirectoryDepot(tmp_path).chunks("x")


def test_a_point_larger_than_any_that_is_read_is_not_taken(
    kept: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.sandbox.points.POINT_BYTES_MAX", 1000)
    kept.put_record("p2", {"a": "x" * 100})
    with pytest.raises(SnapshotError, match=r"point `p3` would have .* and may have 1000"):
        kept.put_record("p3", {"a": "x" * 1000})
    assert kept.load("p3") is None
