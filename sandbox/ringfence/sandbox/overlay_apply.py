"""Applies the changes in an overlay's upper layer to the live workspace, so that it may be cut off and run again.

INVARIANT: no file of the live workspace is changed in place: content is staged beside it, made durable, and renamed in.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ringfence.sandbox import content, openat
from ringfence.sandbox.changeset import Change, ChangesError, ChangeSet
from ringfence.sandbox.names import WORKSPACE, parent, relative, shown
from ringfence.sandbox.overlay_read import attributes, node_of, open_up
from ringfence.sandbox.tree import SYNC_ONE_BY_ONE, Tree, purge

_OWNER = stat.S_IRWXU
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


def sync_upper(upper: Path) -> None:
    """Make an upper layer durable, so that it can still be applied after a crash of the machine.

    Raises:
        OSError: the disk failed.
    """
    found: list[Path] = []
    for directory, _, names in os.walk(upper):
        found.append(Path(directory))
        found += [Path(directory, name) for name in names]
        if len(found) > SYNC_ONE_BY_ONE:
            break
    top = os.open(upper, openat.DIRECTORY)
    try:
        if len(found) > SYNC_ONE_BY_ONE:
            openat.sync_filesystem(top)
            return
    finally:
        os.close(top)
    for path in found:
        if node_of(path.lstat().st_mode) in {"file", "directory"}:
            _sync(path)


def expected(upper: Path, changes: ChangeSet) -> dict[str, str]:
    """The fingerprint that each changed path will have.

    Raises:
        OSError: the upper layer can't be read.
    """
    prints: dict[str, str] = {}
    for change in changes.changes:
        source = _source(upper, change)
        if change.kind == "remove":
            prints[change.path] = content.ABSENT
        elif change.node == "directory":
            prints[change.path] = content.directory_fingerprint(change.mode, _attributes_of(source))
        elif change.node == "link":
            prints[change.path] = content.link_fingerprint(os.fsdecode(source.readlink()))
        elif change.node == "file":
            fd = os.open(source, openat.FILE)
            try:
                digest = content.hash_fd(fd)
                prints[change.path] = content.file_fingerprint(change.mode, digest, attributes(fd))
            finally:
                os.close(fd)
        else:
            prints[change.path] = content.other_fingerprint(source.lstat().st_mode)
    return prints


def content_of(upper: Path, change: Change, limit: int) -> bytes | None:
    """The content of a changed file in the upper layer; None where it is no file or longer than `limit` bytes."""
    if change.kind == "remove" or change.node != "file":
        return None
    fd = os.open(upper / change.path.removeprefix(WORKSPACE).lstrip("/"), openat.FILE)
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
        data = file.read(limit + 1)
    return data if len(data) <= limit else None


def link_target(upper: Path, change: Change) -> str | None:
    """Where a changed link points; None where it is no link."""
    if change.kind == "remove" or change.node != "link":
        return None
    return os.fsdecode(_source(upper, change).readlink())


def apply_changes(upper: Path, live: Path, changes: ChangeSet, *, uid: int | None) -> None:
    """Make the live workspace what the overlay showed. Durable on return; may be run again from the start.

    Args:
        upper: the upper layer.
        live: root of the live workspace.
        changes: as `read_changes` gave them.
        uid: host uid that new files get; None: the kernel's own.

    Raises:
        ChangesError: a device, socket or pipe is among them, or the workspace is not what the changes were made on; some of
            them may be applied.
    """
    for change in changes.changes:
        if change.kind != "remove" and change.node not in {"file", "directory", "link"}:
            raise ChangesError(f"`{shown(change.path)}` is a {change.node}, which can't be applied")
    tree = Tree(live, uid=uid)
    try:
        _Applier(upper, tree, changes).run()
    except OSError as error:
        raise ChangesError(
            f"the command's changes can't be applied ({error.strerror}: `{error.filename or live}`)"
        ) from error
    finally:
        tree.close()


def discard(scratch: Path) -> None:
    """Remove a command's scratch directory, whatever bits its directories have. Content if it is gone already.

    Raises:
        OSError: something in it can't be removed.
    """
    try:
        above = os.open(scratch.parent, openat.DIRECTORY)
    except FileNotFoundError:
        return
    try:
        purge(above, os.fsencode(scratch.name))
    except FileNotFoundError:
        return
    finally:
        os.close(above)


class _Applier:
    def __init__(self, upper: Path, tree: Tree, changes: ChangeSet) -> None:
        self._upper = upper
        self._tree = tree
        self._changes = changes.changes
        self._staged: dict[str, bytes] = {}
        self._touched: set[str] = set()
        self._opened: dict[str, int] = {}

    def run(self) -> None:
        try:
            self._stage()
            self._open_parents()
            # What goes, innermost first; then what comes, outermost first.
            for change in reversed(self._changes):
                if change.kind == "remove":
                    self._remove(change)
            for change in self._changes:
                if change.kind != "remove":
                    self._write(change)
        finally:
            for name in self._staged.values():
                self._tree.drop(name)
        self._finish_directories()
        self._tree.sync_directories(self._touched)

    def _stage(self) -> None:
        leaves = [
            change for change in self._changes if change.kind != "remove" and change.node != "directory"
        ]
        one_by_one = len(leaves) <= SYNC_ONE_BY_ONE
        for change in leaves:
            if change.node == "link":
                self._stage_link(change)
            else:
                self._stage_file(change, sync=one_by_one)
        if not one_by_one:
            openat.sync_filesystem(self._tree.staging_fd)

    def _stage_file(self, change: Change, *, sync: bool) -> None:
        path = _source(self._upper, change)
        facts = path.lstat()
        open_up(path, facts)
        source = os.open(path, openat.FILE)
        try:
            fd, name = self._tree.temporary()
            self._staged[change.path] = name
            try:
                content.copy_content(source, fd)
                self._tree.own(fd)
                content.write_xattrs(fd, attributes(source) | self._access_lists(change))
                os.fchmod(fd, change.mode)
                os.utime(fd, ns=(facts.st_atime_ns, facts.st_mtime_ns))
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            os.close(source)

    def _access_lists(self, change: Change) -> dict[str, bytes]:
        """The access lists of the file that is replaced. Those that a command made name users of another world: they stay out."""
        if change.kind == "create":
            return {}
        try:
            fd = self._tree.open(change.path, openat.FILE)
        except OSError as error:
            if error.errno in _GONE | {errno.EACCES}:
                return {}
            raise
        try:
            found = content.read_xattrs(fd, lists=True)
        finally:
            os.close(fd)
        return {name: value for name, value in found.items() if not name.startswith("user.")}

    def _stage_link(self, change: Change) -> None:
        path = _source(self._upper, change)
        facts = path.lstat()
        name = self._tree.temporary_name()
        staging = self._tree.staging_fd
        os.symlink(os.fsencode(path.readlink()), name, dir_fd=staging)
        self._staged[change.path] = name
        if self._tree.uid is not None:
            os.chown(name, self._tree.uid, self._tree.uid, dir_fd=staging, follow_symlinks=False)
        os.utime(name, ns=(facts.st_atime_ns, facts.st_mtime_ns), dir_fd=staging, follow_symlinks=False)

    def _open_parents(self) -> None:
        """Let the owner change directories whose bits forbid it; they get their bits back at the end."""
        if os.geteuid() == 0:
            return
        changed = {change.path for change in self._changes}
        for change in self._changes:
            for path in {parent(change.path), change.path} - {""}:
                facts = self._tree.find(path)
                if facts is None or not stat.S_ISDIR(facts.st_mode):
                    continue
                mode = stat.S_IMODE(facts.st_mode)
                if mode & _OWNER != _OWNER:
                    self._opened.setdefault(path, mode)
                    self._chmod(path, mode | _OWNER)
                elif path not in changed and (kept := self._bits_above(path)) | _OWNER == mode != kept:
                    # Opened by an apply that was cut off: the overlay has the bits that it had.
                    self._opened.setdefault(path, kept)

    def _bits_above(self, path: str) -> int:
        """The bits of a directory that the command changed something in, as it saw them: those of before."""
        above = self._upper if path == WORKSPACE else self._upper / os.fsdecode(relative(path))
        try:
            return stat.S_IMODE(above.lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return _OWNER

    def _remove(self, change: Change) -> None:
        facts = self._tree.find(change.path)
        # What is of another kind by now was put there by an earlier run.
        if facts is not None and node_of(facts.st_mode) == change.node:
            self._tree.remove(change.path, sync=False)
            self._touched.add(parent(change.path))
        self._opened.pop(change.path, None)

    def _write(self, change: Change) -> None:
        if change.node != "directory":
            self._tree.place(self._staged.pop(change.path), change.path, sync=False)
            self._touched.add(parent(change.path))
        elif change.kind == "create":
            self._tree.make_directory(change.path, _OWNER, sync=False)
            self._touched.add(parent(change.path))

    def _finish_directories(self) -> None:
        """Bits, attributes and times of directories come last, since they may forbid what came before."""
        for change in reversed(self._changes):
            if change.kind == "remove" or change.node != "directory":
                continue
            path = _source(self._upper, change)
            facts = path.lstat()
            own = _attributes_of(path)
            fd = self._tree.open(change.path, openat.DIRECTORY)
            try:
                content.write_xattrs(fd, own)
                os.utime(fd, ns=(facts.st_atime_ns, facts.st_mtime_ns))
                os.fchmod(fd, change.mode)
            finally:
                os.close(fd)
            self._touched.add(change.path)
            self._opened.pop(change.path, None)
        for path, mode in self._opened.items():
            self._chmod(path, mode)

    def _chmod(self, path: str, mode: int) -> None:
        handle = self._tree.open(path, openat.LOOK)
        try:
            openat.chmod_handle(handle, mode)
        finally:
            os.close(handle)


def _source(upper: Path, change: Change) -> Path:
    return upper if change.path == WORKSPACE else upper / os.fsdecode(relative(change.path))


def _attributes_of(directory: Path) -> dict[str, bytes]:
    fd = os.open(directory, openat.DIRECTORY)
    try:
        return attributes(fd)
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
