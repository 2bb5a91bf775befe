"""A `direct` program that goes through its past again: at each recorded call its files are put back to what they were then.

It does its own edits again, and another run of a tool may have another result: a commit has another time and so another name.
What was recorded wins, up to the last call that is answered from the record. See decision 0038.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.kernel.journal.types import JournalError
from ringfence.sandbox import laying
from ringfence.sandbox.points import PointPath, SnapshotError
from ringfence.sandbox.types import SandboxError

if TYPE_CHECKING:
    from ringfence.kernel.core import Core
    from ringfence.kernel.journal.types import StoredRow
    from ringfence.kernel.thread import Thread

log = logging.getLogger(__name__)

COMMIT = "workspace.commit"


class Redo:
    """One start of one program, as long as it is before where an earlier start of it was.

    Args:
        core: the kernel.
        thread: whose program.
        hold: keeps it still while the block is entered.
    """

    def __init__(
        self, core: Core, thread: Thread, hold: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self._core = core
        self._thread = thread
        self._hold = hold
        self._points: list[tuple[int, tuple[PointPath, ...]]] | None = None
        self._done = 0
        self._over = False
        self._one_at_a_time = asyncio.Lock()

    @property
    def over(self) -> bool:
        """Whether nothing is put back any more."""
        return self._over

    def end(self) -> None:
        """Nothing is put back any more: the program has gone further than before."""
        self._over = True

    async def at(self, step: int) -> None:
        """Put back what boundaries before a recorded call had taken in since the last one. A failure ends it, and is logged."""
        async with self._one_at_a_time:
            if self._over or step <= self._done:
                return
            try:
                if self._points is None:
                    self._points = [found async for found in self._history()]
                if any(self._done < one < step for one, _ in self._points):
                    async with self._hold(), self._thread.environment.lock():
                        changed = await asyncio.to_thread(self._lay, self._points, step)
                    if changed:
                        log.info("%s: %d paths are put back to step %d", self._thread.id, len(changed), step)
            except (OSError, SnapshotError, SandboxError, JournalError) as error:
                log.warning(
                    "what %s had at step %d can't be put back: %s; what differs is judged at its next boundary",
                    self._thread.id,
                    step,
                    error,
                )
                self._over = True
            self._done = max(self._done, step - 1)

    async def _history(self) -> AsyncIterator[tuple[int, tuple[PointPath, ...]]]:
        store, thread = self._core.store, self._thread
        async for row in store.lineage_outcomes(thread.key, thread.lineage.parts, 0):
            point = _point_of(row)
            if point:
                manifest = await asyncio.to_thread(thread.environment.snapshots.require, point)
                yield row.step, manifest.paths

    def _lay(self, points: list[tuple[int, tuple[PointPath, ...]]], step: int) -> list[str]:
        environment = self._thread.environment
        wanted = {path.path for one, paths in points if self._done < one < step for path in paths}
        # INVARIANT: what rules withhold from reading now is not shown, though it was when it was recorded.
        wanted -= set(self._thread.rights.masks(wanted))
        later: dict[str, PointPath] = {}
        for one, paths in points:
            if one >= step:
                for path in paths:
                    later.setdefault(path.path, path)
        tree = environment.workspace.tree
        images = [
            laying.of_point(environment.snapshots, later[path])
            if path in later
            else laying.of_tree(tree, path)
            for path in wanted
        ]
        with _view_of(self._thread) as view:
            return laying.lay(view, images)


def _point_of(row: StoredRow) -> str:
    if row.action != COMMIT or row.outcome != "ok":
        return ""
    point: dict[str, Any] | None = msgspec.json.decode(row.body).get("point")
    return "" if point is None else point["id"]


@contextlib.contextmanager
def _view_of(thread: Thread) -> Generator[Path]:
    """The workspace as the program sees it.

    Raises:
        SandboxError: there is no process of it that this kernel may look into.
    """
    pid = None if thread.program is None else thread.program.identity.get("pid")
    for one in _processes(pid):
        try:
            apart = Path(f"/proc/{one}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()
            fd = _workspace_in(one) if apart else -1
        except OSError:
            continue
        if fd < 0:
            continue
        try:
            yield Path(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return
    raise SandboxError("this kernel may not look into its sandbox")


def _workspace_in(pid: int) -> int:
    """A descriptor of the overlay in a sandbox; -1 where what stands there is no mount of its own."""
    top = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # No link is followed: it would lead into this kernel's own world.
        fd = os.open("workspace", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
        if os.fstat(fd).st_dev == os.fstat(top).st_dev:
            os.close(fd)
            return -1
    finally:
        os.close(top)
    return fd


def _processes(pid: object) -> Iterator[int]:
    """The first process of a sandbox, which may not be looked into, and those that it started."""
    if isinstance(pid, int):
        yield pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        except OSError:
            return
        yield from map(int, children.split())
