"""The store that nodes share, as a directory and as a bucket: what is put is there and right, or the call fails."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.kernel.journal import shared_blobs
from ringfence.kernel.journal.blobs import BlobError
from ringfence.kernel.journal.shared_blobs import SharedBlobs
from ringfence.sandbox.depot import Depot, DepotError, fetch, read
from ringfence.sandbox.depot_s3 import open_depot
from ringfence.sandbox.shared import SharedFiles
from ringfence.sandbox.shared_points import SharedSnapshots, restore_workspace
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.workspace import Workspace
from support.bucket import Bucket, a_bucket


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with a_bucket(tmp_path_factory.mktemp("bucket")) as made:
        yield made


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Depot:
    """An empty depot."""
    if request.param == "directory":
        (tmp_path / "shared").mkdir()
        return open_depot(f"file://{tmp_path / 'shared'}")
    bucket: Bucket = request.getfixturevalue("bucket").emptied()
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    return open_depot(bucket.url)


def test_what_is_put_is_there_until_it_is_removed(place: Depot, tmp_path: Path) -> None:
    depot = place
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * (48 << 10))
    depot.put("a/b/one", b"1")
    depot.put("a/large", large)
    depot.put("a/b/one", b"one")
    assert read(depot, "a/b/one") == b"one"
    assert read(depot, "a/none") is None
    assert depot.names("a") == ["a/b/one", "a/large"]
    assert depot.names("a/b") == ["a/b/one"]
    assert depot.names("none") == []
    right = hashlib.sha256(large.read_bytes()).hexdigest()
    assert fetch(depot, "a/large", right, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    with pytest.raises(DepotError, match="damaged"):
        fetch(depot, "a/large", "0" * 64, tmp_path / "wrong")
    assert not fetch(depot, "a/gone", right, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    depot.remove(["a/b/one", "a/never"])
    assert depot.names("a") == ["a/large"]
    for name in ("../a", "/a", "a//b", "a/../b", ".a", ""):
        with pytest.raises(DepotError):
            depot.put(name, b"")


def test_a_store_that_is_away_keeps_nothing(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.sandbox.depot_s3.RETRY_S", 0.1)
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    depot = open_depot(bucket.url)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = open_depot(bucket.url)
    with pytest.raises(DepotError, match="look at its server and the credentials"):
        stranger.put("a", b"1")
    bucket.stop()
    try:
        with pytest.raises(DepotError, match="can't be used"):
            depot.put("a", b"1")
        with pytest.raises(DepotError):
            depot.names("a")
    finally:
        bucket.start()
    (tmp_path / "shared").mkdir()
    shared = open_depot(str(tmp_path / "shared"))
    (tmp_path / "shared").rename(tmp_path / "unmounted")
    with pytest.raises(DepotError, match="is away"):
        shared.put("a", b"1")
    with pytest.raises(DepotError, match="is away"):
        shared.chunks("a")
    for wrong in (str(tmp_path / "none"), "relative", "s3://", "s3://b/p?secret=1", "file://host/dir"):
        with pytest.raises(DepotError):
            open_depot(wrong)


def test_artifacts_of_one_node_are_read_and_verified_on_another(place: Depot, tmp_path: Path) -> None:
    depot = place
    here, there = SharedBlobs(tmp_path / "a", depot), SharedBlobs(tmp_path / "b", depot)
    ref = here.put(b"x" * 100_000)
    assert there.get(ref) == b"x" * 100_000
    assert there.part(ref, 5, 3) == b"xxx"
    other = here.put(b"other")
    kept = f"artifacts/{other[:2]}/{other[2:]}"
    packed = read(depot, kept)
    assert packed is not None
    depot.put(kept, packed[:-1] + b"?")
    with pytest.raises(BlobError, match="shared store"):
        there.get(other)
    with pytest.raises(BlobError, match="does not exist"):
        there.get("0" * 64)


def test_what_is_known_to_be_shared_is_bounded(
    place: Depot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blobs, "KNOWN_MAX", 2)
    blobs = SharedBlobs(tmp_path / "a", place)
    refs = [blobs.put(b"%d" % number) for number in (1, 2, 3, 1, 2)]
    assert len(blobs._shared) <= 2  # pyright: ignore[reportPrivateUsage] - what it holds is what counts
    there = SharedBlobs(tmp_path / "b", place)
    assert [there.get(ref) for ref in refs] == [b"1", b"2", b"3", b"1", b"2"]


class Node:
    """One agent's files on one node."""

    def __init__(self, root: Path, depot: Depot, fence: int) -> None:
        self.root, self.files = root, SharedFiles(depot, "bot", fence)
        self.step = 0
        for part in ("live", "image", "staging"):
            (root / part).mkdir(parents=True, exist_ok=True)
        self.workspace = Workspace(root / "live")
        self.points = SharedSnapshots(root / "points", self.files, self.workspace)

    def base(self) -> None:
        self.files.keep_base(self.root / "live", self.root / "image", self.step, (), self.root / "staging")

    def taken_over(self, root: Path, fence: int) -> Node:
        """The same agent on another node, from the store alone."""
        other = Node(root, self.files.depot, fence)
        found = other.files.base()
        assert found is not None
        other.files.fetch_tree(found[1]["live"], root / "live", None, root / "staging")
        other.files.fetch_points(root / "points")
        restore_workspace(other.files, other.workspace, root / "points")
        other.base()
        other.step = self.step
        return other

    def change(self, change: Any, *paths: str, beneath: bool = True) -> str:
        """One change behind its point."""
        self.step += 1
        named = [f"/workspace/{path}" for path in paths]
        self.points.capture(f"p{self.step}", self.workspace, named, beneath=beneath)
        change(self.root / "live")
        self.points.push()
        return f"p{self.step}"


def picture(root: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        target = str(path.readlink()) if path.is_symlink() else None
        found[str(path.relative_to(root))] = (oct(facts.st_mode), facts.st_mtime_ns, content, target)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_workspace_comes_back_as_the_last_change_left_it(place: Depot, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - a test that can be repeated
    node = Node(tmp_path / "a", place, 1)
    for nr in range(6):
        (node.root / "live" / f"d{nr % 3}").mkdir(exist_ok=True)
        (node.root / "live" / f"d{nr % 3}" / f"f{nr}").write_bytes(b"start")
    node.base()
    for turn in range(12):
        if turn == 6 and chance.random() < 0.5:
            node = node.taken_over(tmp_path / "middle", 5)
        directory, name = f"d{chance.randrange(4)}", f"f{chance.randrange(6)}"
        data = chance.randbytes(chance.choice((3, 20_000)))

        def write(live: Path, path: str = f"{directory}/{name}", data: bytes = data) -> None:
            (live / path).parent.mkdir(exist_ok=True)
            (live / path).write_bytes(data)

        def away(live: Path, path: str = directory) -> None:
            shutil.rmtree(live / path, ignore_errors=True)

        def move(live: Path, path: str = directory, to: str = f"m{turn}") -> None:
            if (live / path).is_dir():
                (live / path).rename(live / to)

        def link(live: Path, path: str = f"link{chance.randrange(2)}", to: str = name) -> None:
            (live / path).unlink(missing_ok=True)
            (live / path).symlink_to(to)

        act, paths = chance.choice(
            [
                (write, (directory, f"{directory}/{name}")),
                (away, (directory,)),
                (move, (directory, f"m{turn}")),
                (link, ("link0", "link1")),
            ]
        )
        node.change(act, *paths, beneath=act is not write)
    other = node.taken_over(tmp_path / "b", 9)
    there, here = picture(other.root / "live"), picture(node.root / "live")
    assert {path: (mode, data, to) for path, (mode, _, data, to) in there.items()} == {
        path: (mode, data, to) for path, (mode, _, data, to) in here.items()
    }


def test_points_of_another_node_restore_here(place: Depot, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", place, 1)
    (node.root / "live" / "big").write_bytes(b"b" * 50_000)
    node.base()
    point = node.change(lambda live: (live / "big").unlink(), "big")
    other = node.taken_over(tmp_path / "b", 2)
    assert not (other.root / "live" / "big").exists()
    assert other.points.points() == [point]
    plan = other.points.plan_restore(other.workspace, [point])
    # Its content comes from the store when it is needed.
    assert not list((other.root / "points" / "blobs").rglob("*/*"))
    restored = [item.path for item in plan.items] or list(plan.conflicts)
    assert restored == ["/workspace/big"]
    assert other.points.verify(point)
    assert other.points.content(other.points.require(point).paths[0]) == b"b" * 50_000


def test_an_owner_that_slept_past_its_lease_changes_nothing_there(place: Depot, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", place, 1)
    node.base()
    node.change(lambda live: (live / "file").write_bytes(b"ours"), "file")
    other = node.taken_over(tmp_path / "b", 2)
    # It goes on writing, also a point of a number that the new owner uses too.
    late = node.change(lambda live: (live / "file").write_bytes(b"late"), "file")
    other.change(lambda live: (live / "other").write_bytes(b"new"), "other")
    assert late == f"p{other.step}"
    third = other.taken_over(tmp_path / "c", 3)
    found = picture(third.root / "live")
    assert {path: data for path, (_, _, data, _) in found.items()} == {"file": b"ours", "other": b"new"}
    assert [entry.path for entry in third.points.require(late).paths] == ["/workspace/other"]


def test_an_owner_that_slept_past_its_lease_removes_nothing_there(place: Depot, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", place, 1)
    (node.root / "live" / "old").write_bytes(b"o" * 20_000)
    node.base()
    first = node.change(lambda live: (live / "old").write_bytes(b"p" * 20_000), "old")
    other = node.taken_over(tmp_path / "b", 2)
    point = other.change(lambda live: (live / "old").unlink(), "old")
    kept = place.names("agents/bot")
    (node.root / "live" / "own").write_bytes(b"late")
    with pytest.raises(DepotError, match="another kernel owns the agent now"):
        node.base()
    with pytest.raises(SnapshotError, match="another kernel owns the agent now"):
        node.points.remove([first], ())
    assert set(kept) <= set(place.names("agents/bot"))
    third = other.taken_over(tmp_path / "c", 3)
    assert not (third.root / "live" / "old").exists()
    assert third.points.verify(point)


def test_without_the_store_no_point_is_taken_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    node = Node(tmp_path / "a", open_depot(str(tmp_path / "shared")), 1)
    node.base()
    node.step = 1
    node.points.capture("p1", node.workspace, ["/workspace/file"])
    (node.root / "live" / "file").write_bytes(b"1")
    (tmp_path / "shared").rename(tmp_path / "away")
    with pytest.raises(SnapshotError, match="is away"):
        node.points.push()
    with pytest.raises(SnapshotError, match="is away"):
        node.points.capture("p2", node.workspace, ["/workspace/file"])
    assert node.points.load("p2") is None
    (tmp_path / "away").rename(tmp_path / "shared")
    node.points.capture("p2", node.workspace, ["/workspace/file"])
    other = node.taken_over(tmp_path / "b", 2)
    assert (other.root / "live" / "file").read_bytes() == b"1"


def test_pruning_keeps_what_points_and_the_workspace_need(place: Depot, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", place, 1)
    (node.root / "live" / "old").write_bytes(b"o" * 20_000)
    node.base()
    first = node.change(lambda live: (live / "old").unlink(), "old")
    second = node.change(lambda live: (live / "new").write_bytes(b"n" * 20_000), "new")
    node.points.remove([first], node.points.content_of([second]))
    blobs = [Path(name).name for name in node.files.depot.names("agents/bot/blobs")]
    assert blobs == [hashlib.sha256(b"n" * 20_000).hexdigest()]
    other = node.taken_over(tmp_path / "b", 2)
    assert (other.root / "live" / "new").read_bytes() == b"n" * 20_000
    assert other.points.points() == [second]
    node.files.forget()
    assert node.files.depot.names("agents/bot") == []
