"""What differs between how the world of an agent stood after two of its steps, of whatever branches: files, rows and keys."""

from __future__ import annotations

import asyncio
import difflib
import io
from collections.abc import Sequence
from typing import Any

from ringfence.kernel.journal.types import StoredRow
from ringfence.kernel.operations.diff_keys import key_changes
from ringfence.kernel.operations.diff_rows import row_changes
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.problems import conflict
from ringfence.kernel.rollback_cuts import done_since, point_of, pruned_before, refuse_pruned
from ringfence.kernel.thread import Thread
from ringfence.sandbox.points import PointPath
from ringfence.sandbox.snapshots import SnapshotError
from ringfence.sandbox.workspace import WorkspaceError

DIFF_BYTES_MAX = 256 << 10
_NO_NEWLINE = "\n\\ No newline at end of file\n"
"""What a unified diff says of a last line without its end."""


async def diff(kernel: Kernel, name: str, start: str, end: str) -> dict[str, Any]:
    """What differs between two points, steps or times, each of any branch; without `start` since the beginning, without `end` now.

    Returns:
        changes: of the workspace; rows: of databases, as the agent's own writes say; keys: of the shared state.

    Raises:
        Problem: no such point or step, or a point between them is gone or damaged.
    """
    thread = await kernel.with_files(name)
    find = kernel.rollback.plans.cut_for
    low = (await find(thread, start or "0")).step
    high = (await find(thread, end)).step if end else None
    since = await done_since(kernel.core.store, thread, low if high is None else min(low, high))
    oldest_first = list(reversed(since))
    return {
        "changes": await _files(kernel, thread, oldest_first, low, high),
        "rows": await row_changes(kernel, thread, oldest_first, low, high),
        "keys": await key_changes(kernel.core.store, thread, oldest_first, low, high),
    }


def _after(rows: Sequence[StoredRow], step: int | None) -> list[StoredRow]:
    """What is undone by going back to a step; None: nothing."""
    return [] if step is None else [row for row in rows if row.step > step]


# -- files ----------------------------------------------------------------------------------------------------------------


async def _files(
    kernel: Kernel, thread: Thread, rows: Sequence[StoredRow], low: int, high: int | None
) -> list[dict[str, Any]]:
    pruned = await pruned_before(kernel.core.store, thread)
    manifests: dict[int, Sequence[PointPath]] = {}
    for row in rows:
        point = point_of(row)
        if point is None or point["kind"] not in ("workspace", "rollback"):
            continue
        refuse_pruned(point, row.step, pruned)
        try:
            manifest = await asyncio.to_thread(thread.environment.snapshots.require, point["id"])
        except SnapshotError as error:
            raise conflict(str(error)) from error
        manifests[row.step] = manifest.paths

    def images(step: int | None) -> dict[str, PointPath]:
        found: dict[str, PointPath] = {}
        for row in _after(rows, step):
            for entry in manifests.get(row.step, ()):
                found.setdefault(entry.path, entry)
        return found

    before, later = images(low), images(high)
    changes = [
        await asyncio.to_thread(_change, thread, path, before.get(path), later.get(path))
        for path in sorted({*before, *later})
    ]
    return [change for change in changes if change is not None]


def _change(
    thread: Thread, path: str, before: PointPath | None, later: PointPath | None
) -> dict[str, Any] | None:
    """One path; None on a side: as it is now."""
    stands = (
        None if before is not None and later is not None else thread.environment.workspace.fingerprint(path)
    )
    was = before.before if before is not None else str(stands)
    after = later.before if later is not None else str(stands)
    if was == after:
        return None
    kind = "created" if was == "absent" else "removed" if after == "absent" else "modified"
    return {
        "path": path,
        "kind": kind,
        "before": was,
        "after": after,
        "diff": _text(thread, path, before, later),
    }


def _text(thread: Thread, path: str, before: PointPath | None, later: PointPath | None) -> str | None:
    """A unified diff where both sides are short text."""
    store = thread.environment.snapshots
    # Looked at before anything is read: what a point has is of any length.
    if any(one is not None and one.size > DIFF_BYTES_MAX for one in (before, later)):
        return None
    try:
        old, new = (_current(thread, path) if one is None else store.content(one) for one in (before, later))
        if max(len(old), len(new)) > DIFF_BYTES_MAX:
            return None
        sides = [io.StringIO(side.decode(), newline="\n").readlines() for side in (old, new)]
    except (UnicodeDecodeError, SnapshotError, WorkspaceError):
        return None
    lines = difflib.unified_diff(sides[0], sides[1], f"before{path}", f"after{path}")
    return "".join(line if line.endswith("\n") else line + _NO_NEWLINE for line in lines) or None


def _current(thread: Thread, path: str) -> bytes:
    try:
        return thread.environment.workspace.read(path).data
    except WorkspaceError as error:
        if error.reason == "NoSuchResource":
            return b""
        raise
