"""Rollback points of one agent: before-images that are durable and read back before an effect may start.

The store lies outside every sandbox. A point's cost follows what its call touches, never the size of the workspace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringfence.sandbox import content, points, restore
from ringfence.sandbox.blobs import Batch, BlobStore, Underway, sha256_of, store_error, sync_directory
from ringfence.sandbox.capture import capture_path, expand, parent_times
from ringfence.sandbox.names import WORKSPACE, BadNameError, shown
from ringfence.sandbox.pointlog import ENTRY_MAX, log_of
from ringfence.sandbox.points import (
    Damage,
    PointManifest,
    PointPath,
    RestoreItem,
    RestorePlan,
    SnapshotError,
)
from ringfence.sandbox.records import WorkspaceError, workspace_error
from ringfence.sandbox.workspace import Workspace

__all__ = ["PointManifest", "PointPath", "RestoreItem", "RestorePlan", "SnapshotError", "SnapshotStore"]

_INLINE_POINT = 128 << 10  # bytes of small files that one manifest holds itself
_POINT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SnapshotStore:
    """The points of one agent.

    Args:
        root: directory of this agent's points; made when first needed, mode 0700.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._blobs = BlobStore(root)
        self._log = log_of(root, self._blobs)
        self._changing = threading.Lock()  # of points that are kept without the workspace's lock
        self._underway = Underway(self._blobs, root / "restoring")

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
        """Take the before-images of some paths. On return they are durable and were read back and compared.

        Args:
            point: id; a point of the same id is replaced.
            workspace: where the paths are.
            paths: canonical paths; one where nothing stands is kept as absent.
            expect: fingerprint that each path is expected to have after the effect, by path; or how to find them
                from the before-images.
            extra: JSON to keep with it.
            beneath: a directory stands for all beneath it; False: for itself only.

        Raises:
            SnapshotError: something can't be read, kept or read back. The effect must not start.
        """
        with self._guard():
            self._blobs.prepare()
            wanted = list(expand(workspace, paths, beneath=beneath))
            batch = Batch(self._blobs, len(wanted))
            room = _INLINE_POINT
            entries: list[PointPath] = []
            for path in wanted:
                entry = capture_path(workspace.tree, path, batch, room)
                room -= len(entry.inline or b"")
                entries.append(entry)
            batch.finish()
            manifest = PointManifest(
                point=point,
                paths=tuple(entries),
                size_bytes=sum(entry.size for entry in entries),
                expect=dict(expect(entries) if callable(expect) else expect or {}),
                parents=parent_times(workspace.tree, wanted),
                extra=dict(extra or {}),
            )
            return self._save(manifest)

    def put_record(self, point: str, record: Mapping[str, Any]) -> PointManifest:
        """Keep a point that has only JSON, such as the before-images of rows. Durable and read back on return.

        Raises:
            SnapshotError: it can't be kept.
        """
        with self._guard():
            self._blobs.prepare()
            text = points.dump(PointManifest(point=point, extra=record))
            size = len(text)
            manifest = PointManifest(point=point, extra=dict(record), size_bytes=size)
            return self._save(manifest, points.sized(text, size), logged=True)

    def keep(self, manifest: PointManifest, open_blob: Callable[[str], int]) -> PointManifest:
        """Take over a point of another store, with its content. Durable and read back on return.

        Args:
            manifest: the point.
            open_blob: opens the content with a SHA-256 for reading.

        Raises:
            SnapshotError: it can't be kept, or the content is not the one that the point names.
        """
        with self._changing, self._guard():
            self._blobs.prepare()
            wanted = {e.blob: e.size for e in manifest.paths if e.kind == "file" and e.inline is None}
            batch = Batch(self._blobs, len(wanted))
            for blob, size in wanted.items():
                fd = open_blob(blob)
                try:
                    if os.fstat(fd).st_size != size or content.hash_fd(fd) != blob:
                        raise SnapshotError(
                            f"the saved content `{blob[:12]}` of point `{manifest.point}` is damaged"
                        )
                    batch.add(fd, blob)
                finally:
                    os.close(fd)
            batch.finish()
            return self._save(manifest)

    def open_blob(self, sha256: str) -> int:
        """Open content for reading; the caller closes it, and verifies it.

        Raises:
            SnapshotError: it is not there.
        """
        with self._guard():
            return self._blobs.open(sha256)

    def adopt_manifest(self, manifest: PointManifest) -> None:
        """Take over a point whose content comes when it is needed. Durable on return.

        Raises:
            SnapshotError: it can't be kept.
        """
        with self._guard():
            self._blobs.prepare()
            SnapshotStore._save(self, manifest)

    def blob_path(self, sha256: str) -> Path:
        """Where a content is kept here."""
        return self._blobs.path(sha256)

    def touch(self, point: str) -> None:
        """Say, under the workspace's lock, that what a point covers is about to change: for stores that others share."""

    def load(self, point: str) -> PointManifest | None:
        """Read a point's manifest; None where there is none, so that its effect never started.

        Raises:
            SnapshotError: there is one, but it is damaged or can't be read.
        """
        with self._guard():
            try:
                return points.read(self._manifest(point), point)
            except FileNotFoundError:
                text = self._log.text(point)
                return None if text is None else points.parse(text, point)

    def require(self, point: str) -> PointManifest:
        """Read the manifest of a point that is known to have been taken.

        Raises:
            SnapshotError: it is gone, damaged, or can't be read.
        """
        manifest = self.load(point)
        if manifest is None:
            raise SnapshotError(
                f"rollback point `{point}` is gone: `{self._manifest(point)}` does not exist; "
                "restore the points directory from a backup"
            )
        return manifest

    def set_expect(self, point: str, expect: Mapping[str, str]) -> None:
        """Replace the fingerprints expected after the effect. Durable on return.

        Raises:
            SnapshotError: there is no such point, or it can't be kept.
        """
        manifest = self.require(point)
        with self._guard():
            self._save(dataclasses.replace(manifest, expect=dict(expect)))

    def verify(self, point: str) -> bool:
        """Read a point back: whether its manifest and all content are there, whole and right."""
        return not self.damages([point])[point]

    def damages(self, ids: Sequence[str]) -> dict[str, list[Damage]]:
        """Read points back, all content included: what of each is missing or not as it was kept."""
        return {point: self._damage(point) for point in ids}

    def _damage(self, point: str) -> list[Damage]:
        try:
            bad = [entry.path for entry in self.require(point).paths if not self._is_whole(entry)]
        except (SnapshotError, OSError) as error:
            return [Damage(path="", why=str(error))]
        return [Damage(path=path, why="its content is missing or damaged") for path in bad]

    def points(self) -> list[str]:
        """Ids of all points, in the order of their numbers.

        Raises:
            SnapshotError: the store can't be read.
        """
        with self._guard():
            try:
                found = {entry.stem for entry in self.root.glob("*.json")}.union(self._log.points())
            except FileNotFoundError:
                return []
        return sorted(
            found,
            key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)],
        )

    def taken_at(self, point: str) -> float:
        """When a point was taken, in seconds since the epoch; now for one that is gone meanwhile."""
        return self._taken(point)[0]

    def size_of(self, point: str) -> int:
        """Bytes that a point's manifest takes on the disk."""
        return self._taken(point)[1]

    def _taken(self, point: str) -> tuple[float, int]:
        with self._guard():
            try:
                facts = self._manifest(point).lstat()
            except FileNotFoundError:
                return self._log.taken(point) or (time.time(), 0)
        return facts.st_mtime, facts.st_size

    def content_of(self, points_kept: Collection[str]) -> frozenset[str]:
        """Hashes of all content that some points need.

        Raises:
            SnapshotError: one of them is gone or damaged.
        """
        return frozenset(
            entry.blob for point in points_kept for entry in self.require(point).paths if entry.blob
        )

    def remove(self, gone: Collection[str], needed: Collection[str]) -> int:
        """Remove points, and all content but what others need. Nothing may be captured meanwhile; points may be kept.

        Args:
            gone: ids; those that are not there are passed over.
            needed: hashes of the content that stays; that of points which stay does anyway.

        Returns:
            Bytes that were freed.

        Raises:
            SnapshotError: the store can't be changed; it can be tried again.
        """
        freed = 0
        with self._changing, self._guard():
            # INVARIANT: looked at here, where none is kept: the caller may not know of the newest.
            needed = {*needed, *self.content_of([point for point in self.points() if point not in gone])}
            for point in gone:
                freed += content.remove_file(self._manifest(point))
            freed += self._log.remove(gone)
            # INVARIANT: the points go before their content, durably: one that is there is whole, also after a crash.
            if self.root.is_dir():
                sync_directory(self.root)
            freed += sum(
                content.remove_file(path) for sha256, path in self._blobs.all() if sha256 not in needed
            )
        return freed

    def plan_restore(
        self,
        workspace: Workspace,
        points_newest_first: Sequence[str],
        path: str | None = None,
        *,
        torn: bool = False,
    ) -> RestorePlan:
        """Say what undoing some points would do: per path the oldest before-image against what the newest left.

        Args:
            workspace: where the paths are.
            points_newest_first: ids of points that were taken.
            path: canonical path; only it and what lies beneath.
            torn: whether an effect was cut off, so that its paths may be between two states.

        Raises:
            SnapshotError: a point is gone or damaged, or the workspace can't be read.
        """
        manifests = [self.require(point) for point in points_newest_first]
        with self._guard():
            cut_off = self._underway.paths()
            made = restore.plan(workspace, manifests, path, lambda name: torn or name in cut_off)
            if cut_off <= set(made.unchanged):
                restore.settle(workspace, self._underway)  # it was cut off after its last change, if at all
            return made

    def restore(self, workspace: Workspace, plan: Sequence[RestoreItem]) -> None:
        """Bring paths back exactly: content, modes, owners (as root), times, attributes, links, empty directories.

        The directories around them get their times back too.

        All content is verified and staged before anything is touched, so a damaged store or a full disk changes nothing. A
        restore that a crash cut off can be run again with the same items.

        Args:
            workspace: where the paths are.
            plan: items of a plan; all of them, or those of some paths with all beneath.

        Raises:
            SnapshotError: content is missing or damaged, a path changed since the plan, or no space.
        """
        with self._guard(workspace=True):
            damaged = [
                item.path for item in plan if item.action != "remove" and not self._is_whole(item.before)
            ]
            if damaged:
                raise SnapshotError(
                    f"the saved content of `{shown(damaged[0])}` is damaged; nothing was changed; roll back without it"
                )
            restore.run(workspace, self._blobs, plan, self._underway)

    def content(self, entry: PointPath) -> bytes:
        """The bytes of a file as a point has them; empty where it has no file there.

        Raises:
            SnapshotError: they are not in the store, or not the ones that were kept.
        """
        if entry.kind != "file":
            return b""
        with self._guard():
            if not self._is_whole(entry):
                raise SnapshotError(
                    f"the content of `{entry.path}` is damaged in the store; restore the store"
                )
            if entry.inline is not None:
                return entry.inline
            with open(self._blobs.open(entry.blob), "rb") as file:  # noqa: PTH123 - a descriptor
                return file.read()

    def _is_whole(self, entry: PointPath) -> bool:
        if entry.kind != "file":
            return True
        if entry.inline is not None:
            return sha256_of(entry.inline) == entry.blob
        return self._blobs.holds(entry.blob, entry.size)

    def _manifest(self, point: str) -> Path:
        if not _POINT_ID.fullmatch(point):
            raise SnapshotError(f"`{shown(point)}` is no id of a rollback point; list those there are")
        return self.root / f"{point}.json"

    def _save(
        self, manifest: PointManifest, text: bytes | None = None, *, logged: bool = False
    ) -> PointManifest:
        target = self._manifest(manifest.point)
        text = points.dump(manifest) if text is None else text
        # INVARIANT: where a point has a file, that counts, whatever the log says.
        if logged and len(text) <= ENTRY_MAX and not os.path.lexists(target):
            self._log.append(manifest.point, text)
            return manifest
        with self._blobs.temporary() as (fd, path):
            content.write_all(fd, text)
            os.fsync(fd)
            # INVARIANT: the manifest is the last thing written, so that a point with a manifest is whole.
            path.rename(target)
        sync_directory(self.root)
        if not points.holds(target, text, manifest.point):
            raise SnapshotError(
                f"rollback point `{manifest.point}` reads back wrong; check the disk, then try again"
            )
        return manifest

    @contextlib.contextmanager
    def _guard(self, *, workspace: bool = False) -> Generator[None]:
        try:
            yield
        except (WorkspaceError, BadNameError) as error:
            raise SnapshotError(str(error)) from error
        except OSError as error:
            if workspace:
                raise SnapshotError(str(workspace_error(error, str(error.filename or WORKSPACE)))) from error
            raise store_error(error, self.root) from error
