"""Trees at a host: made from entries and stored content, changed in place while nobody uses them.

INVARIANT: a tree that a sandbox sees never changes; its changes make another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ringfence.sandbox import content, openat
from ringfence.sandbox.remote import wire
from ringfence.sandbox.remote.store import Store
from ringfence.sandbox.remote.trees import Delta, Entry
from ringfence.sandbox.tree import purge

_OWNER = stat.S_IRWXU
_TREES_MAX = 64
"""Unused trees that are kept; the oldest go first."""


@dataclass(slots=True, eq=False)
class Mirror:
    """One tree of an agent."""

    name: str
    agent: str
    path: Path
    uid: int | None
    entries: dict[bytes, Entry] = field(default_factory=dict[bytes, Entry])
    users: int = 0

    def masks(self, inside: str) -> list[str]:
        """Where what it hides is seen, when its top is seen at `inside`."""
        hidden = (path for path, entry in self.entries.items() if entry.kind.startswith("hidden"))
        return [f"{inside}/{os.fsdecode(path)}" for path in hidden]


@dataclass(slots=True)
class Draft:
    """A tree that is being described."""

    base: Mirror | None
    agent: str
    entries: dict[bytes, Entry]
    changed: dict[bytes, Entry] = field(default_factory=dict[bytes, Entry])
    removed: set[bytes] = field(default_factory=set[bytes])

    def apply(self, delta: Delta) -> None:
        """Take a part of the description in.

        Raises:
            WireError: a path leads out of the tree, or its parent is no directory.
        """
        for path in delta.removed:
            if self.entries.pop(path, None) is not None:
                self.removed.add(path)
        for entry in delta.entries:
            self._check(entry)
            before = self.entries.get(entry.path)
            if before is not None and before.kind != entry.kind:
                self.removed.add(entry.path)
            self.entries[entry.path] = self.changed[entry.path] = entry

    def _check(self, entry: Entry) -> None:
        path = entry.path
        if b"\0" in path or any(part in {b"", b".", b".."} for part in path.split(b"/") if path):
            raise wire.WireError("a path of a tree is not plain")
        if path:
            above = self.entries.get(path.rpartition(b"/")[0])
            if above is None or above.kind != "directory":
                raise wire.WireError("a path of a tree lies below no directory")
        elif entry.kind != "directory":
            raise wire.WireError("the top of a tree is no directory")
        if entry.kind == "file" and len(entry.digest) != 32:  # noqa: PLR2004 - SHA-256
            raise wire.WireError("a file of a tree has no digest")

    def needs(self, store: Store) -> list[bytes]:
        """Digests that are not there."""
        wanted = {entry.digest for entry in self.changed.values() if entry.kind == "file"}
        return sorted(digest for digest in wanted if not store.holds(digest))


@dataclass(slots=True, kw_only=True)
class Plan:
    """How a tree is made: not at all, of an unused one in its place, or as a copy."""

    tree: Mirror
    draft: Draft
    work: Work | None
    in_place: bool = False


class Mirrors:
    """The trees of one kernel at this host. Only `make` may run outside the event loop.

    Args:
        root: directory to keep them in, on the file system of `store`; what lies there is removed.
        store: content.
        uid_of: the uid that an agent's files belong to; None: this process's own.
        released: told when an agent has no tree any more.
    """

    def __init__(
        self, root: Path, store: Store, uid_of: Callable[[str], int | None], released: Callable[[str], None]
    ) -> None:
        self._root = root
        self._store = store
        self._uid_of = uid_of
        self._released = released
        self._trees: dict[str, Mirror] = {}
        self._names = itertools.count(1)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in list(root.iterdir()):
            remove(left)

    def find(self, name: str, agent: str) -> Mirror | None:
        """A tree of this agent, or one of nobody in particular."""
        tree = self._trees.get(name)
        return tree if tree is not None and tree.agent in {agent, ""} else None

    def draft(self, base: Mirror | None, agent: str) -> Draft:
        """Begin to describe a tree."""
        return Draft(base=base, agent=agent, entries={} if base is None else dict(base.entries))

    def claim(self, draft: Draft) -> Plan:
        """Decide how a tree is made; from now on nobody else can use what it is made of.

        Raises:
            WireError: it has no top.
            SandboxError: no user is left for its agent.
        """
        if b"" not in draft.entries:
            raise wire.WireError("a tree has no top")
        base = draft.base
        if base is not None and not draft.changed and not draft.removed:
            if base.name in self._trees:
                self._trees[base.name] = self._trees.pop(base.name)  # used last
            return Plan(tree=base, draft=draft, work=None)
        uid = None if draft.agent == "" else self._uid_of(draft.agent)
        name = str(next(self._names))
        tree = Mirror(name=name, agent=draft.agent, path=self._root / name, uid=uid, entries=draft.entries)
        if base is not None and base.users == 0 and self._trees.pop(base.name, None) is not None:
            base.path.rename(tree.path)
            return Plan(tree=tree, draft=draft, work=Work(tree, self._store, None), in_place=True)
        return Plan(tree=tree, draft=draft, work=Work(tree, self._store, base))

    def make(self, plan: Plan) -> None:
        """Make the tree; all content is in the store. Blocks, and touches nothing else here.

        Raises:
            OSError: there is no room, or content went away; nothing is left of the tree.
        """
        if plan.work is None:
            return
        try:
            if plan.in_place:
                plan.work.make(plan.draft.changed.values(), plan.draft.removed)
            else:
                plan.work.make(plan.draft.entries.values(), set())
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                remove(plan.tree.path)
            raise

    def settle(self, plan: Plan) -> list[Mirror]:
        """Let the tree be found; answers the ones that are forgotten for it, to be removed."""
        self._trees[plan.tree.name] = plan.tree
        unused = [tree for tree in self._trees.values() if tree.users == 0]
        forgotten = unused[:-_TREES_MAX]
        for tree in forgotten:
            self._forget(tree)
        return forgotten

    def clear(self) -> list[Mirror]:
        """Forget all of them, nothing uses any; answers what is to be removed."""
        trees = list(self._trees.values())
        for tree in trees:
            self._forget(tree)
        return trees

    def _forget(self, tree: Mirror) -> None:
        del self._trees[tree.name]
        if tree.agent and not any(other.agent == tree.agent for other in self._trees.values()):
            self._released(tree.agent)


class Work:
    """Makes, or changes, the files of one tree. `other` is a tree with the same content that may not be touched."""

    def __init__(self, tree: Mirror, store: Store, other: Mirror | None) -> None:
        self._tree = tree
        self._top = os.fsencode(tree.path)
        self._store = store
        self._other = other
        self._touched: set[bytes] = set()

    def make(self, entries: Iterable[Entry], removed: set[bytes]) -> None:
        """Remove some paths, then make or replace others, parents first."""
        for path in sorted(removed, reverse=True):
            self._open_up(path.rpartition(b"/")[0])
            self._remove(path)
        for entry in entries:
            if entry.path:
                self._open_up(entry.path.rpartition(b"/")[0])
            self._place(entry)
        # A directory gets its bits and its time last, the innermost first: they may forbid what came before.
        for path in sorted(self._touched, reverse=True):
            entry = self._tree.entries.get(path)
            if entry is not None and entry.kind == "directory":
                self._finish(self._at(path), entry)

    def _at(self, path: bytes) -> bytes:
        return self._top + b"/" + path if path else self._top

    def _open_up(self, directory: bytes) -> None:
        if directory not in self._touched:
            self._touched.add(directory)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                where = self._at(directory)
                if os.geteuid() != 0 and stat.S_ISDIR(os.lstat(where).st_mode):
                    os.chmod(where, _OWNER)  # noqa: PTH101 - bytes

    def _remove(self, path: bytes) -> None:
        where = self._at(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            remove(Path(os.fsdecode(where)))

    def _place(self, entry: Entry) -> None:
        where = self._at(entry.path)
        match entry.kind:
            case "directory" | "hidden-directory":
                with contextlib.suppress(FileExistsError):
                    os.mkdir(where, _OWNER)  # noqa: PTH102 - bytes
                if entry.kind == "directory":
                    self._touched.add(entry.path)
                    return
                os.chmod(where, 0)  # noqa: PTH101 - bytes
                self._own(where)
            case "link":
                self._remove(entry.path)
                os.symlink(entry.target, where)  # noqa: PTH211 - bytes
                self._own(where)
            case "hidden":
                self._remove(entry.path)
                os.close(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0))
                self._own(where)
            case "file":
                self._remove(entry.path)
                self._file(where, entry)

    def _file(self, where: bytes, entry: Entry) -> None:
        target = os.open(where, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            source = self._source(entry)
            try:
                content.copy_content(source, target)
            finally:
                os.close(source)
        finally:
            os.close(target)
        self._finish(where, entry)

    def _source(self, entry: Entry) -> int:
        if self._other is not None:
            known = self._other.entries.get(entry.path)
            if known is not None and known.digest == entry.digest:
                path = os.fsencode(self._other.path) + b"/" + entry.path
                with contextlib.suppress(PermissionError):
                    return os.open(path, openat.FILE)
        return os.open(self._store.path(entry.digest), openat.FILE)

    def _finish(self, where: bytes, entry: Entry) -> None:
        fd = os.open(where, openat.DIRECTORY if entry.kind == "directory" else openat.FILE)
        try:
            content.write_xattrs(fd, entry.attributes)
            if self._tree.uid is not None:
                os.fchown(fd, self._tree.uid, self._tree.uid)
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    def _own(self, where: bytes) -> None:
        if self._tree.uid is not None:
            os.lchown(where, self._tree.uid, self._tree.uid)


def remove(path: Path) -> None:
    """Remove whatever stands at a path, all beneath it included."""
    above = os.open(path.parent, openat.DIRECTORY)
    try:
        purge(above, os.fsencode(path.name))
    finally:
        os.close(above)
