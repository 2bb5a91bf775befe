"""Points of HTTP calls as a rollback plans with them: what they hold is not in memory before it is sent."""

from __future__ import annotations

import base64
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.syscalls.http_undo import Kept, kept_point

POINTS = 40
BODY = bytes(range(256)) * 2048


def test_a_plan_of_many_points_holds_no_bodies(tmp_path: Path) -> None:
    """A rollback held all of them, so that an agent that may overwrite large things could use up the kernel's memory."""
    store = SnapshotStore(tmp_path / "points")
    for nr in range(POINTS):
        url = f"http://h/{nr}"
        kept = Kept(
            resource="r",
            keep_url=url,
            method="PUT",
            put_back_url=url,
            content_type="a/b",
            body=base64.b64encode(BODY).decode(),
        )
        store.put_record(f"p{nr}", msgspec.to_builtins(kept))
    tracemalloc.start()
    try:
        points = [kept_point(store, f"p{nr}") for nr in range(POINTS)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * len(BODY)
    assert [point.kept.body for point in points] == [""] * POINTS
    assert base64.b64decode(points[7].read().body) == BODY
    (tmp_path / "points").rename(tmp_path / "gone")
    with pytest.raises(SnapshotError):
        points[7].read()
