"""What a direct program's layer says changed: against the live workspace, with what was committed before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ringfence.sandbox import overlay_read
from ringfence.sandbox.changes import ChangeSet
from ringfence.sandbox.direct import DirectLayer

LONG_AGO = 1_000_000_000


def layer_in(home: Path, *, own: bool = False) -> DirectLayer:
    """A layer whose live workspace and base hold the file `kept`; the program has written nothing."""
    for name in ("live", "image"):
        (home / name).mkdir()
        (home / name / "kept").write_text("kept")
    layer = DirectLayer(home, own=own)
    begin(layer)
    return layer


def begin(layer: DirectLayer) -> None:
    layer.renew(lambda base: base.mkdir())
    layer.upper.mkdir()
    (layer.place / "format").write_text("user")


def found(layer: DirectLayer) -> set[tuple[str, str]]:
    return {
        (c.kind, c.path.removeprefix("/workspace/"))
        for c in layer.changes().changes
        if c.path != "/workspace"
    }


def commit(layer: DirectLayer, home: Path) -> ChangeSet:
    """Take what changed in, for files alone."""
    changes = layer.changes()
    layer.committing(changes)
    for change in changes.changes:
        place = change.path.removeprefix("/workspace/")
        if change.kind == "remove":
            (home / "live" / place).unlink()
        elif change.node == "file":
            (home / "live" / place).write_bytes((layer.upper / place).read_bytes())
    layer.settle()
    return changes


def test_what_was_committed_and_is_gone_is_removed_without_a_whiteout(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    (layer.upper / "made").write_text("1")
    assert found(layer) == {("create", "made")}
    commit(layer, tmp_path)
    assert found(layer) == set()
    (layer.upper / "made").unlink()
    assert found(layer) == {("remove", "made")}
    commit(layer, tmp_path)
    assert found(layer) == set()
    assert (tmp_path / "live/kept").exists()


def test_a_program_that_does_its_work_again_has_changed_nothing(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    (layer.upper / "first").write_text("1")
    (layer.upper / "second").write_text("2")
    commit(layer, tmp_path)
    again = DirectLayer(tmp_path, own=False)
    begin(again)
    assert again.redoing
    (again.upper / "first").write_text("1")
    # Not yet done again is no change; left out in the end is.
    assert found(again) == set()
    again.redoing = False
    assert found(again) == {("remove", "second")}
    (again.upper / "second").write_text("other")
    assert found(again) == {("modify", "second")}


def test_a_list_that_a_crash_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    (layer.upper / "made").write_text("1")
    commit(layer, tmp_path)
    with (tmp_path / "direct-paths").open("a") as file:
        file.write('"/workspace/ne')
    again = DirectLayer(tmp_path, own=False)
    begin(again)
    again.redoing = False
    assert found(again) == {("remove", "made")}


def test_one_that_resumes_by_itself_begins_with_nothing_to_do_again(tmp_path: Path) -> None:
    layer = layer_in(tmp_path, own=True)
    (layer.upper / "made").write_text("1")
    commit(layer, tmp_path)
    again = DirectLayer(tmp_path, own=True)
    begin(again)
    assert not again.redoing
    assert found(again) == set()
    assert not (tmp_path / "direct-paths").exists()


def test_what_a_program_leaves_alone_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_in(tmp_path)
    monkeypatch.setattr(layer, "_notes_changes", True)
    monkeypatch.setattr(
        "ringfence.sandbox.direct._TICKS_NS", -1_000_000_000_000
    )  # whatever the clock's grain
    for name in ("still", "touched"):
        (layer.upper / name).write_text("1")
    commit(layer, tmp_path)
    read: list[str] = []
    same = overlay_read._same_content

    def noted(one: Path, other: Path) -> bool:
        read.append(one.name)
        return same(one, other)

    monkeypatch.setattr(overlay_read, "_same_content", noted)
    (layer.upper / "touched").write_text("2")
    os.utime(layer.upper / "touched", ns=(LONG_AGO, LONG_AGO))
    assert found(layer) == {("modify", "touched")}
    assert read == ["touched"]


def test_what_was_written_just_now_is_read_again(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    (layer.upper / "made").write_text("1")
    commit(layer, tmp_path)
    inode = (layer.upper / "made").stat().st_ino
    with (layer.upper / "made").open("r+") as file:
        file.write("2")
    assert (layer.upper / "made").stat().st_ino == inode
    assert found(layer) == {("modify", "made")}
