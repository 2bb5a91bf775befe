"""Change sets as records, and what reading and applying refuses, without an overlay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ringfence.sandbox.changes import (
    Change,
    ChangesError,
    ChangeSet,
    apply_changes,
    discard,
    expected,
    read_changes,
)
from ringfence.sandbox.workspace import Workspace


def layers(tmp_path: Path) -> tuple[Path, Path]:
    upper, live = tmp_path / "scratch" / "upper", tmp_path / "live"
    upper.mkdir(parents=True)
    live.mkdir()
    (upper.parent / "format").write_text("user")
    return upper, live


def test_json_is_deterministic_and_comes_back(tmp_path: Path) -> None:
    upper, live = layers(tmp_path)
    (upper / "b").write_text("b")
    (upper / "a").mkdir()
    (upper / "a" / "é").write_text("x")
    changes = read_changes(upper, live)
    assert [change.path for change in changes.changes] == ["/workspace/a", "/workspace/a/é", "/workspace/b"]
    assert ChangeSet.from_json(changes.to_json()) == changes
    assert changes.to_json() == read_changes(upper, live).to_json()
    assert changes
    assert not ChangeSet()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version":1}', '{"version":9,"changes":[]}', '{"version":1,"changes":[["a"]]}']
)
def test_damaged_json_is_an_error(text: str) -> None:
    with pytest.raises(ChangesError):
        ChangeSet.from_json(text)


def test_what_will_be_there_is_what_is_there_afterwards(tmp_path: Path) -> None:
    upper, live = layers(tmp_path)
    (live / "old").write_text("old")
    (upper / "old").write_text("new")
    (upper / "directory").mkdir(mode=0o750)
    (upper / "link").symlink_to("old")
    (upper / "old").chmod(0o640)
    changes = read_changes(upper, live)
    wanted = expected(upper, changes)
    apply_changes(upper, live, changes, uid=None)
    with Workspace(live) as workspace:
        assert {path: workspace.fingerprint(path) for path in wanted} == wanted
    assert read_changes(upper, live) == ChangeSet()


def test_attributes_of_the_other_kind_of_overlay_are_data(tmp_path: Path) -> None:
    upper, live = layers(tmp_path)
    (live / "d").mkdir()
    (live / "d" / "x").write_text("x")
    (upper / "d").mkdir()
    try:
        os.setxattr(upper / "d", "user.overlay.opaque", b"y")
    except OSError:
        pytest.skip("this file system has no attributes")
    assert [change.kind for change in read_changes(upper, live).changes] == ["remove"]
    (upper.parent / "format").write_text("trusted")
    assert read_changes(upper, live) == ChangeSet()


def test_features_that_were_switched_off_stop_the_reading(tmp_path: Path) -> None:
    upper, live = layers(tmp_path)
    (upper / "d").mkdir()
    try:
        os.setxattr(upper / "d", "user.overlay.redirect", b"/elsewhere")
    except OSError:
        pytest.skip("this file system has no attributes")
    with pytest.raises(ChangesError, match="redirect"):
        read_changes(upper, live)


def test_devices_sockets_and_pipes_are_never_applied(tmp_path: Path) -> None:
    upper, live = layers(tmp_path)
    os.mkfifo(upper / "p")
    (upper / "a").write_text("a")
    changes = read_changes(upper, live)
    assert [change.node for change in changes.changes] == ["file", "fifo"]
    with pytest.raises(ChangesError, match="fifo"):
        apply_changes(upper, live, changes, uid=None)
    assert list(live.iterdir()) == []


def test_a_link_in_the_way_is_never_followed(tmp_path: Path) -> None:
    upper, live = layers(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (upper / "d").mkdir()
    (upper / "d" / "x").write_text("x")
    changes = ChangeSet(changes=(Change(path="/workspace/d/x", kind="create", node="file", mode=0o644),))
    (live / "d").symlink_to(outside)
    with pytest.raises(ChangesError):
        apply_changes(upper, live, changes, uid=None)
    assert list(outside.iterdir()) == []


def test_a_directory_that_others_filled_is_not_removed(tmp_path: Path) -> None:
    upper, live = layers(tmp_path)
    (live / "d").mkdir()
    (live / "d" / "theirs").write_text("x")
    changes = ChangeSet(changes=(Change(path="/workspace/d", kind="remove", node="directory", mode=0o755),))
    with pytest.raises(ChangesError):
        apply_changes(upper, live, changes, uid=None)
    assert (live / "d" / "theirs").exists()


def test_very_deep_trees_are_refused_and_can_be_discarded(tmp_path: Path) -> None:
    upper, live = layers(tmp_path)
    deep = upper
    for _ in range(300):
        deep = deep / "d"
        deep.mkdir()
    with pytest.raises(ChangesError, match="deep"):
        read_changes(upper, live)
    deep.chmod(0)
    discard(upper.parent)
    assert not upper.parent.exists()
    discard(upper.parent)
