"""Paths of a program's overlay are put back to what was recorded of them, and nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.sandbox.laying import lay, of_tree
from ringfence.sandbox.tree import Tree

NAMES = ("a", "b", "d/a", "d/b", "d/e/a")
kinds = st.sampled_from(("absent", "file 1", "file 2", "program", "link", "directory"))
trees = st.fixed_dictionaries(dict.fromkeys(NAMES, kinds))


def make(root: Path, content: dict[str, str]) -> None:
    root.mkdir()
    for name, kind in content.items():
        path = root / name
        if kind == "absent" or any(
            (root / above).is_symlink() or (root / above).is_file() for above in path.parents
        ):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "directory":
            path.mkdir(mode=0o750, exist_ok=True)
        elif kind == "link":
            path.symlink_to("../outside")
        else:
            path.write_text(kind)
            path.chmod(0o755 if kind == "program" else 0o644)


def found(root: Path) -> dict[str, tuple[int, str]]:
    shown: dict[str, tuple[int, str]] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        text = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else ""
        shown[str(path.relative_to(root))] = (0 if path.is_symlink() else mode, text)
    return shown


@settings(max_examples=60, deadline=None)
@given(trees, trees)
def test_a_tree_becomes_another(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, str], other: dict[str, str]
) -> None:
    place = tmp_path_factory.mktemp("laying")
    make(place / "view", one)
    make(place / "wanted", other)
    tree = Tree(place / "wanted")
    paths = {*found(place / "view"), *found(place / "wanted")}
    images = [of_tree(tree, f"/workspace/{path}") for path in paths]
    lay(place / "view", images)
    assert found(place / "view") == found(place / "wanted")
    assert lay(place / "view", images) == []
    tree.close()


def test_no_link_leads_out_and_what_is_not_named_stays(tmp_path: Path) -> None:
    make(tmp_path / "wanted", {"d/a": "file 1"})
    make(tmp_path / "view", {"e/b": "file 2"})
    (tmp_path / "outside").mkdir()
    (tmp_path / "view/d").symlink_to(tmp_path / "outside")
    tree = Tree(tmp_path / "wanted")
    with pytest.raises(OSError, match="d"):
        lay(tmp_path / "view", [of_tree(tree, "/workspace/d/a")])
    assert list((tmp_path / "outside").iterdir()) == []
    # A directory that is to go stays with what nobody named.
    assert lay(tmp_path / "view", [of_tree(tree, "/workspace/e")]) == []
    assert [path.name for path in (tmp_path / "view/e").iterdir()] == ["b"]
    tree.close()
