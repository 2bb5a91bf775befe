"""What the tests of commands share: a workspace with something of everything, and how to look at it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Box

FILES = {
    "a.txt": "hello\n",
    "dir/x": "x",
    "dir/sub/y": "y",
    "opaque/1": "1",
    "opaque/2": "2",
    "same": "same",
    "bits": "bits",
    "file-to-dir": "f",
    "dir-to-file/q": "q",
    "touched/t": "t",
    "moved/m": "m",
}


def facts_of(top: Path) -> dict[str, tuple[Any, ...]]:
    """Everything of a tree that a rollback or an agent could notice."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(top.rglob("*")):
        facts = path.lstat()
        what: Any = None
        if stat.S_ISREG(facts.st_mode):
            what = path.read_bytes()
        elif stat.S_ISLNK(facts.st_mode):
            what = str(path.readlink())
        found[str(path.relative_to(top))] = (
            facts.st_mode,
            facts.st_uid,
            facts.st_mtime_ns if what is not None else 0,
            what,
        )
    return found


def workspace_of(box: Box, files: dict[str, str] | None = None) -> Path:
    top = box.directory(box.fresh("workspace"), FILES if files is None else files)
    if files is None:
        (top / "link").symlink_to("a.txt")
        box.give(top)
    return top


def apply(box: Box, upper: Path, workspace: Path, text: str) -> None:
    box.host.call("apply", upper=str(upper), live=str(workspace), changes_json=text, uid=box.uid)
