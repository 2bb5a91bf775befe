"""What a diff shows of files, and what it reads for that."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ringfence.kernel.operations import diffs
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.workspace import Workspace

LARGE = 64 << 20


def test_a_large_file_is_not_read_for_its_diff(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live/a").touch()
    os.truncate(tmp_path / "live/a", LARGE)
    store = SnapshotStore(tmp_path / "points")
    with Workspace(tmp_path / "live") as workspace:
        (before,) = store.capture("p1", workspace, ["/workspace/a"]).paths
        (tmp_path / "live/a").write_text("short\n")
        thread: Any = SimpleNamespace(environment=SimpleNamespace(snapshots=store, workspace=workspace))
        tracemalloc.start()
        try:
            change = diffs._change(  # pyright: ignore[reportPrivateUsage] - a kernel for one path would be much
                thread, "/workspace/a", before, None
            )
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert change is not None
    assert (change["kind"], change["diff"]) == ("modified", None)
    assert peak < LARGE // 8
