"""A program image is opened for a program that runs as another user, and nothing else of it changes."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
from ringfence.kernel import launch

if TYPE_CHECKING:
    from pathlib import Path


def test_what_the_owner_may_read_and_run_all_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o600)
    top = tmp_path / "image"
    (top / "d").mkdir(parents=True)
    for name, mode in (("d/key", 0o600), ("d/tool", 0o700), ("plain", 0o644), ("write-only", 0o200)):
        (top / name).write_text("x")
        (top / name).chmod(mode)
    (top / "link").symlink_to(outside)
    (top / "d").chmod(0o700)
    top.chmod(0o700)
    launch.open_image(top)
    modes = {
        path.relative_to(top).as_posix(): stat.S_IMODE(path.lstat().st_mode)
        for path in (top, *top.rglob("*"))
        if not path.is_symlink()
    }
    assert modes == {
        ".": 0o755,
        "d": 0o755,
        "d/key": 0o644,
        "d/tool": 0o755,
        "plain": 0o644,
        "write-only": 0o200,
    }
    assert stat.S_IMODE(outside.stat().st_mode) == 0o600
