"""Rollback points here and in a depot, and a workspace brought back from there."""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringfence.sandbox.blobs import BlobStore
from ringfence.sandbox.depot import DepotError
from ringfence.sandbox.names import parent
from ringfence.sandbox.points import Damage, PointManifest, PointPath, RestoreItem, SnapshotError
from ringfence.sandbox.records import WorkspaceError
from ringfence.sandbox.regular import IrregularError
from ringfence.sandbox.shared import SharedFiles, merged
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.workspace import Workspace


class _FetchingBlobs(BlobStore):
    """Blobs that are brought from the depot where they are not here."""

    def __init__(self, root: Path, files: SharedFiles) -> None:
        super().__init__(root)
        self._files = files

    def holds(self, sha256: str, size: int) -> bool:
        return super().holds(sha256, size) or (self._bring(sha256) and super().holds(sha256, size))

    def open(self, sha256: str) -> int:
        try:
            return super().open(sha256)
        except (FileNotFoundError, IrregularError):
            if not self._bring(sha256):
                raise
            return super().open(sha256)

    def _bring(self, sha256: str) -> bool:
        self.prepare()
        target = self.path(sha256)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            return self._files.fetch_blob(sha256, target)
        except DepotError as error:
            raise SnapshotError(str(error)) from error


class SharedSnapshots(SnapshotStore):
    """The points of one agent, here and in a depot: one that is not in both refuses the effect.

    After each change the caller says `push`, while it still keeps others from changing the workspace.
    """

    def __init__(self, root: Path, files: SharedFiles, workspace: Workspace) -> None:
        super().__init__(root)
        self._blobs = _FetchingBlobs(root, files)
        self._files = files
        self._workspace = workspace
        self._after = SnapshotStore(root / "after")
        self._pending: dict[str, None] = {}

    @property
    def pending(self) -> bool:
        """Whether the depot may lack what changes have left."""
        return bool(self._pending)

    def touch(self, point: str) -> None:
        """What a point covers is about to change, or has."""
        self._pending[point] = None

    def capture(
        self,
        point: str,
        workspace: Workspace,
        paths: Sequence[str],
        *,
        expect: Mapping[str, str] | Callable[[Sequence[PointPath]], Mapping[str, str]] | None = None,
        extra: Mapping[str, Any] | None = None,
        beneath: bool = True,
    ) -> PointManifest:
        """As of the base class; first what earlier changes left and the depot lacks is brought there."""
        self.push()
        manifest = super().capture(point, workspace, paths, expect=expect, extra=extra, beneath=beneath)
        self.touch(point)
        return manifest

    def push(self) -> None:
        """Keep in the depot how changes left the workspace.

        Raises:
            SnapshotError: the depot lacks some; they stay pending.
        """
        for point in list(self._pending):
            try:
                self._push(point)
            except DepotError as error:
                raise SnapshotError(str(error)) from error
            del self._pending[point]

    def _push(self, point: str) -> None:
        manifest = self.load(point)
        if manifest is None:
            return  # it was never taken, so nothing changed
        paths: list[str] = []
        for entry in manifest.paths:
            paths.append(entry.path)
            facts = self._workspace.tree.find(entry.path)
            if entry.kind != "directory" and facts is not None:
                paths += (
                    [name for name, _ in self._workspace.names(entry.path)]
                    if stat.S_ISDIR(facts.st_mode)
                    else []
                )
        change = self._after.capture(point, self._workspace, list(dict.fromkeys(paths)), beneath=False)
        self._files.keep_blobs(change, self._after.blob_path)
        self._files.keep_change(change)
        self._after.remove(self._after.points(), ())

    def _save(
        self, manifest: PointManifest, text: bytes | None = None, *, logged: bool = False
    ) -> PointManifest:
        # INVARIANT: in the depot before here: after a crash a point that is here is there too.
        try:
            self._files.keep_blobs(manifest, self.blob_path)
            self._files.keep_point(manifest)
        except DepotError as error:
            raise SnapshotError(str(error)) from error
        return super()._save(manifest, text, logged=logged)

    def damages(self, ids: Sequence[str]) -> dict[str, list[Damage]]:
        """As of the base class, and in the depot. What lacks here is brought from there first."""
        found = super().damages(ids)
        try:
            there = self._files.damages(ids)
        except DepotError as error:
            there = {point: [Damage(path="", where="store", why=str(error))] for point in ids}
        return {point: [*found[point], *there[point]] for point in ids}

    def remove(self, gone: Collection[str], needed: Collection[str]) -> int:
        """As of the base class, in the depot first."""
        try:
            with self._changing:
                stay = self.content_of([point for point in self.points() if point not in gone])
                self._files.forget_points(gone, {*needed, *stay})
        except DepotError as error:
            raise SnapshotError(str(error)) from error
        return super().remove(gone, needed)


def restore_workspace(files: SharedFiles, workspace: Workspace, points_root: Path) -> None:
    """Bring a workspace from its base to how the newest change left it.

    Raises:
        DepotError: the depot is away, or something in it is damaged.
        SnapshotError: content is missing, or the workspace can't be written.
    """
    store = SharedSnapshots(points_root, files, workspace)
    items: list[RestoreItem] = []
    found, times = merged(files.changes())
    for path, entry in sorted(found.items(), key=lambda one: one[0].split("/")):
        try:
            current = workspace.fingerprint(path)
        except WorkspaceError as error:
            raise SnapshotError(str(error)) from error
        action = "remove" if entry.kind == "absent" else "create" if current == "absent" else "restore"
        if current != entry.before or action != "remove":
            time_ns = times.get(parent(path))
            items.append(
                RestoreItem(path=path, action=action, current=current, before=entry, parent_mtime_ns=time_ns)
            )
    store.restore(workspace, items)
