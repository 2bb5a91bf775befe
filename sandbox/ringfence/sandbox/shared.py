"""One agent's files in a depot: rollback points, and the workspace as it stands after each change.

    agents/ID/base/FENCE.json          a whole workspace and image; the one with the largest fence counts
    agents/ID/trees/SHA256.tar         what it names
    agents/ID/log/FENCE/NUMBER.json    paths as a change left them, in order
    agents/ID/points/FENCE/POINT.json  rollback points
    agents/ID/blobs/SHA256             contents of both

INVARIANT: what a fence below that of the counting base wrote after it counts for nothing: an owner that slept past its lease may go on
writing here, and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ringfence.sandbox import points
from ringfence.sandbox.depot import Depot, DepotError, fetch, hash_of, pieces_of, read
from ringfence.sandbox.points import Damage, PointManifest, PointPath, SnapshotError
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.sandbox.trees import extract_tar, make_tar

FORMAT: Final = 1
LOG_MAX: Final = 2000
"""Changes behind a base from which on a kernel that starts writes a new base."""


class SharedFiles:
    """The depot's side of one agent, as one kernel writes it.

    Args:
        depot: where.
        agent: id.
        fence: larger than that of every owner before; a new agent's is its kernel's.
    """

    def __init__(self, depot: Depot, agent: str, fence: int) -> None:
        self.depot = depot
        self._root = f"agents/{agent}"
        self._fence = f"{fence:020d}"
        self._next: int | None = None
        self._kept: set[str] = set()

    # -- writing --------------------------------------------------------------------------------------------------

    def keep_blobs(self, manifest: PointManifest, path_of: Callable[[str], Path]) -> None:
        """Keep the contents that a manifest needs.

        Raises:
            DepotError: they are not kept for sure.
        """
        for entry in manifest.paths:
            if entry.kind == "file" and entry.inline is None and entry.blob not in self._kept:
                self.depot.put(f"{self._root}/blobs/{entry.blob}", path_of(entry.blob))
                self._kept.add(entry.blob)

    def keep_point(self, manifest: PointManifest) -> None:
        """Keep a rollback point whose contents are kept.

        Raises:
            DepotError: it is not kept for sure.
        """
        self.depot.put(f"{self._root}/points/{self._fence}/{manifest.point}.json", points.dump(manifest))

    def keep_points(self, store: SnapshotStore) -> None:
        """Keep all points of a store that is nowhere else yet.

        Raises:
            DepotError: they are not kept for sure.
            SnapshotError: one is damaged.
        """
        for point in store.points():
            manifest = store.require(point)
            self.keep_blobs(manifest, store.blob_path)
            self.keep_point(manifest)

    def keep_change(self, manifest: PointManifest) -> None:
        """Keep how a change left its paths, behind those before it.

        Raises:
            DepotError: it is not kept for sure.
        """
        if self._next is None:
            mine = self.depot.names(f"{self._root}/log/{self._fence}")
            self._next = int(Path(mine[-1]).stem) + 1 if mine else 1
        self.depot.put(f"{self._root}/log/{self._fence}/{self._next:012d}.json", points.dump(manifest))
        self._next += 1

    def keep_base(self, live: Path, image: Path, step: int, unfinished: Sequence[int], staging: Path) -> None:
        """Keep the whole workspace and the image. From its last line on, it counts instead of all before it.

        Args:
            live: the workspace; nothing changes it meanwhile.
            image: the program's image.
            step: newest step whose effects are in it.
            unfinished: steps up to there that have not ended.
            staging: an empty directory.

        Raises:
            DepotError: it is not kept for sure, or the agent is another kernel's now.
            OSError, WorkspaceError: the trees can't be read.
        """
        trees = {"live": self._keep_tree(live, staging), "image": self._keep_tree(image, staging)}
        log = self.depot.names(f"{self._root}/log/{self._fence}")
        known = [*self.point_names().values()]
        base = {
            "format": FORMAT,
            "step": step,
            "open": list(unfinished),
            "log": log[-1] if log else "",
            "points": known,
            **trees,
        }
        old = self.depot.names(f"{self._root}/base")
        name = f"{self._root}/base/{self._fence}.json"
        self.depot.put(name, json.dumps(base).encode())
        self._refuse_outlived()
        # What counts no more. Contents stay: points may need them.
        gone = [one for one in old if one < name]
        gone += [
            one
            for one in self.depot.names(f"{self._root}/log")
            if one <= f"{self._root}/log/{self._fence}" or one in log
        ]
        gone += [
            one for one in self.depot.names(f"{self._root}/trees") if Path(one).stem not in trees.values()
        ]
        self.depot.remove(gone)

    def _keep_tree(self, root: Path, staging: Path) -> str:
        file = staging / "tree.tar"
        with file.open("wb") as out:
            for piece in make_tar(root):
                out.write(piece)
        sha256 = hash_of(pieces_of(file))
        self.depot.put(f"{self._root}/trees/{sha256}.tar", file)
        file.unlink()
        return sha256

    def forget_points(self, gone: Collection[str], needed: Collection[str]) -> None:
        """Remove points, and contents that neither others nor the log need.

        Raises:
            DepotError: not all are removed, or the agent is another kernel's now.
        """
        names = self.depot.names(f"{self._root}/points")
        blobs = self.depot.names(f"{self._root}/blobs")
        # INVARIANT: looked at after the contents: an owner of a larger fence writes its base before any of its own.
        self._refuse_outlived()
        self.depot.remove(name for name in names if Path(name).stem in gone)
        kept = {*needed, *(entry.blob for _, change in self.changes() for entry in change.paths)}
        unneeded = [name for name in blobs if Path(name).name not in kept]
        self._kept.difference_update(Path(name).name for name in unneeded)
        self.depot.remove(unneeded)

    def _refuse_outlived(self) -> None:
        """Refuse to remove what the owner after this one may need: of contents and trees nothing says whose they are."""
        found = self.base()
        if found is not None and found[0] > int(self._fence):
            raise DepotError("another kernel owns the agent now; nothing was removed from the shared store")

    def forget(self) -> None:
        """Remove all of the agent.

        Raises:
            DepotError: not all is removed.
        """
        self.depot.remove(self.depot.names(self._root))

    # -- reading --------------------------------------------------------------------------------------------------

    def base(self) -> tuple[int, Mapping[str, Any]] | None:
        """The base that counts, with its fence; None: there is none.

        Raises:
            DepotError: the depot is away, or it is damaged.
        """
        names = self.depot.names(f"{self._root}/base")
        if not names:
            return None
        try:
            found: dict[str, Any] = json.loads(read(self.depot, names[-1]) or b"")
            if found["format"] != FORMAT:
                raise DepotError(f"`{names[-1]}` has format {found['format']}, this release reads {FORMAT}")
        except (ValueError, KeyError, TypeError) as error:
            raise DepotError(f"`{names[-1]}` in the shared store `{self.depot.place}` is damaged") from error
        return int(Path(names[-1]).stem), found

    def changes(self) -> Iterator[tuple[str, PointManifest]]:
        """The changes behind the base, in order.

        Raises:
            DepotError: the depot is away, or one is damaged.
        """
        found = self.base()
        if found is None:
            return
        fence, base = found
        for name in self.depot.names(f"{self._root}/log"):
            if int(Path(name).parent.name) >= fence and name > str(base["log"]):
                yield name, self._manifest(name)

    def point_names(self) -> dict[str, str]:
        """Where each rollback point that counts is kept, by its id.

        Raises:
            DepotError: the depot is away.
        """
        found = self.base()
        fence, known = (0, ()) if found is None else (found[0], frozenset(found[1]["points"]))
        names = self.depot.names(f"{self._root}/points")
        return {Path(n).stem: n for n in names if n in known or int(Path(n).parent.name) >= fence}

    def fetch_blob(self, sha256: str, target: Path) -> bool:
        """Bring one content here; False: it is not there.

        Raises:
            DepotError: the depot is away, or it is damaged.
        """
        return fetch(self.depot, f"{self._root}/blobs/{sha256}", sha256, target)

    def damages(self, ids: Sequence[str]) -> dict[str, list[Damage]]:
        """Read points back from the store, all content included.

        Raises:
            DepotError: the store is away.
        """
        names = self.point_names()
        whole: dict[str, bool] = {}

        def is_whole(sha256: str) -> bool:
            if sha256 not in whole:
                pieces = self.depot.chunks(f"{self._root}/blobs/{sha256}")
                whole[sha256] = pieces is not None and hash_of(pieces) == sha256
            return whole[sha256]

        def of(point: str) -> list[Damage]:
            if point not in names:
                return [Damage(path="", where="store", why="its manifest is missing")]
            try:
                entries = self._manifest(names[point]).paths
            except DepotError as error:
                return [Damage(path="", where="store", why=str(error))]
            bad = [e.path for e in entries if e.kind == "file" and e.inline is None and not is_whole(e.blob)]
            why = "its content is missing or damaged"
            return [Damage(path=path, where="store", why=why) for path in bad]

        return {point: of(point) for point in ids}

    def fetch_tree(self, sha256: str, target: Path, uid: int | None, staging: Path) -> None:
        """Unpack a tree that a base names.

        Raises:
            DepotError: it is not there, or damaged.
            OSError, WorkspaceError: it can't be unpacked.
        """
        file = staging / "tree.tar"
        if not fetch(self.depot, f"{self._root}/trees/{sha256}.tar", sha256, file):
            raise DepotError(f"a tree of `{self._root}` is missing in the shared store `{self.depot.place}`")
        extract_tar(file, target, uid=uid)
        file.unlink()

    def fetch_points(self, root: Path) -> None:
        """Bring the manifests of all points here; their contents come when they are needed.

        Raises:
            DepotError: the depot is away, or one is damaged.
            OSError: they can't be written.
        """
        store = SnapshotStore(root)
        for name in self.point_names().values():
            store.adopt_manifest(self._manifest(name))

    def _manifest(self, name: str) -> PointManifest:
        text = read(self.depot, name)
        try:
            point = str(json.loads((text or b"").split(b"\n")[0])["point"])
            return points.parse(text or b"", point)
        except (SnapshotError, ValueError, KeyError, TypeError) as error:
            raise DepotError(
                f"`{name}` in the shared store `{self.depot.place}` is damaged: {error}"
            ) from error


def merged(changes: Iterator[tuple[str, PointManifest]]) -> tuple[dict[str, PointPath], dict[str, int]]:
    """How some changes, one after the other, leave each path, and the times of the directories around them."""
    found: dict[str, PointPath] = {}
    times: dict[str, int] = {}
    for _, change in changes:
        times |= change.parents
        for entry in change.paths:
            if entry.kind != "directory":
                for beneath in [path for path in found if path.startswith(entry.path + "/")]:
                    found[beneath] = points.absent(beneath)
            found[entry.path] = entry
    return found, times
