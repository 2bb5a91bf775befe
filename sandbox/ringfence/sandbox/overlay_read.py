"""Reads an overlay's upper layer as the changes it stands for. The cost follows what changed, never the tree."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ringfence.sandbox import content
from ringfence.sandbox.changeset import Change, ChangesError, ChangeSet, Kind, Node
from ringfence.sandbox.names import WORKSPACE, BadNameError, normalise

FORMAT_NAME = "format"
"""File beside an upper layer that says whose attributes it uses: `trusted` or `user`."""
OVERLAY_USER_PREFIX = "user.overlay."
_DEEPEST = 200
_NO_ATTRIBUTE = {errno.ENODATA, errno.ENOTSUP}
_FILE_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


Mark = tuple[int, int, int, int, int]
"""What tells a file of the upper layer from a later one at the same path: number, mode, size, and when it was changed."""


def mark_of(facts: os.stat_result) -> Mark:
    """The mark of a file."""
    return (facts.st_ino, facts.st_mode, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def read_changes(
    upper: Path, lower: Path, settled: Mapping[str, Mark] | None = None, *, times: bool = True
) -> ChangeSet:
    """Find what differs between the lower layer alone and with the upper one on top.

    A copy-up that changed nothing is no change, nor is the time of a directory alone. Must not run while anything writes to either layer.
    Files and directories of the upper layer that their owner may not read are opened up; `Change.mode` keeps the bits.

    Args:
        upper: the upper layer.
        lower: the tree to compare it with.
        settled: files by path below the layer that are as in `lower`, as long as they have this mark.
        times: whether another time of a file is a change, be it written anew as it was.

    Raises:
        ChangesError: a layer can't be read, or a name in it can't be judged.
    """
    try:
        return ChangeSet(changes=tuple(_Reader(upper, lower, settled or {}, times=times).read()))
    except OSError as error:
        raise ChangesError(
            f"the command's changes can't be read ({error.strerror}: `{error.filename}`); nothing was applied"
        ) from error


def attributes(fd: int) -> dict[str, bytes]:
    """The `user.*` attributes of an open file that are its own and not the overlay's."""
    found = content.read_xattrs(fd)
    return {name: value for name, value in found.items() if not name.startswith(OVERLAY_USER_PREFIX)}


def open_up(path: Path, facts: os.stat_result) -> None:
    """Let the owner read a file, or list a directory, of the upper layer."""
    wanted = stat.S_IRUSR | (stat.S_IXUSR if stat.S_ISDIR(facts.st_mode) else 0)
    if os.geteuid() != 0 and facts.st_mode & wanted != wanted:
        path.chmod(stat.S_IMODE(facts.st_mode) | wanted)


def node_of(mode: int) -> Node:
    """Name the kind of a path by its st_mode."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISSOCK(mode):
        return "socket"
    return "fifo" if stat.S_ISFIFO(mode) else "device"


class _Reader:
    def __init__(self, upper: Path, lower: Path, settled: Mapping[str, Mark], *, times: bool) -> None:
        self._settled = settled
        self._times = times
        self._upper = upper
        self._lower = lower
        self._prefix = overlay_prefix(upper)

    def read(self) -> Iterator[Change]:
        facts = self._upper.lstat()
        open_up(self._upper, facts)
        yield from self._metadata("", facts, self._lower.lstat())
        yield from self._directory("", opaque=False, depth=0)

    def _directory(self, where: str, *, opaque: bool, depth: int) -> Iterator[Change]:
        """What is in one directory of the upper layer; `opaque` hides whatever the lower layer holds there."""
        if depth > _DEEPEST:
            raise ChangesError(f"the command made directories more than {_DEEPEST} deep; nothing was applied")
        here = _names(self._upper / where)
        for name in here:
            yield from self._entry(f"{where}{name}", opaque=opaque, depth=depth)
        if opaque and (below := self._below(where)) is not None and stat.S_ISDIR(below.st_mode):
            for name in sorted(set(_names(self._lower / where)) - set(here)):
                yield from self._removed(f"{where}{name}")

    def _entry(self, where: str, *, opaque: bool, depth: int) -> Iterator[Change]:
        path = self._upper / where
        facts = path.lstat()
        below = self._below(where)
        if self._is_whiteout(path, facts):
            if below is not None:
                yield from self._removed(where)
            return
        open_up_needed = stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)
        if open_up_needed:
            open_up(path, facts)
        if below is not None and stat.S_ISDIR(below.st_mode) != stat.S_ISDIR(facts.st_mode):
            yield from self._removed(where)
            below = None
        if stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode):
            self._require_plain(path)
        if not stat.S_ISDIR(facts.st_mode):
            yield from self._leaf(where, facts, below)
            return
        if below is None:
            yield self._change(where, "create", facts)
        else:
            yield from self._metadata(where, facts, below)
        hidden = opaque or self._is_opaque(path)
        yield from self._directory(f"{where}/", opaque=hidden and below is not None, depth=depth + 1)

    def _leaf(self, where: str, facts: os.stat_result, below: os.stat_result | None) -> Iterator[Change]:
        if below is not None and where in self._settled and self._settled[where] == mark_of(facts):
            return
        if below is None:
            yield self._change(where, "create", facts)
        elif stat.S_IFMT(below.st_mode) != stat.S_IFMT(facts.st_mode) or self._differs(where, facts, below):
            yield self._change(where, "modify", facts)
        elif stat.S_ISREG(facts.st_mode):
            if self._times and facts.st_mtime_ns != below.st_mtime_ns:
                # A copy-up keeps the time.
                yield self._change(where, "metadata", facts)
            else:
                yield from self._metadata(where, facts, below)

    def _differs(self, where: str, facts: os.stat_result, below: os.stat_result) -> bool:
        above_path, below_path = self._upper / where, self._lower / where
        if stat.S_ISLNK(facts.st_mode):
            return above_path.readlink() != below_path.readlink()
        if not stat.S_ISREG(facts.st_mode):
            return facts.st_rdev != below.st_rdev
        try:
            return facts.st_size != below.st_size or not _same_content(above_path, below_path)
        except PermissionError:
            # Not even its owner may read the one below, so it can't be shown to be the same.
            return True

    def _metadata(self, where: str, facts: os.stat_result, below: os.stat_result) -> Iterator[Change]:
        same_bits = stat.S_IMODE(facts.st_mode) == stat.S_IMODE(below.st_mode)
        # Other bits are enough; and where they are the same, both sides can be read as they are.
        if not same_bits or _own_attributes(self._upper / where) != _own_attributes(self._lower / where):
            yield self._change(where, "metadata", facts)

    def _removed(self, where: str) -> Iterator[Change]:
        """A path of the lower layer that is hidden now, and all beneath it."""
        pending = [where]
        while pending:
            current = pending.pop()
            path = self._lower / current
            facts = path.lstat()
            yield self._change(current, "remove", facts)
            if stat.S_ISDIR(facts.st_mode):
                pending += [f"{current}/{name}" for name in reversed(_names(path))]

    def _change(self, where: str, kind: Kind, facts: os.stat_result) -> Change:
        path = f"{WORKSPACE}/{where}" if where else WORKSPACE
        if not _can_be_judged(path):
            raise ChangesError(
                f"the command changed `{ascii(path)[1:-1]}`, whose name no rule can name; nothing was applied, "
                "use names in Unicode NFC (an accented letter is one character) without invisible characters"
            )
        node = node_of(facts.st_mode)
        setid = node == "file" and bool(facts.st_mode & (stat.S_ISUID | stat.S_ISGID))
        return Change(path=path, kind=kind, node=node, mode=stat.S_IMODE(facts.st_mode), setid=setid)

    def _below(self, where: str) -> os.stat_result | None:
        try:
            return (self._lower / where).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _is_whiteout(self, path: Path, facts: os.stat_result) -> bool:
        if stat.S_ISCHR(facts.st_mode):
            return facts.st_rdev == 0
        # Newer kernels know a whiteout that is an empty file with an attribute.
        empty = stat.S_ISREG(facts.st_mode) and facts.st_size == 0
        return empty and self._attribute(path, "whiteout") is not None

    def _require_plain(self, path: Path) -> None:
        for name in ("redirect", "metacopy"):
            if self._attribute(path, name) is not None:
                raise ChangesError(
                    f"the overlay uses `{name}`, which it was told not to; nothing was applied"
                )

    def _is_opaque(self, path: Path) -> bool:
        return self._attribute(path, "opaque") == b"y"

    def _attribute(self, path: Path, name: str) -> bytes | None:
        try:
            return os.getxattr(path, f"{self._prefix}{name}", follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_ATTRIBUTE:
                return None
            raise


def overlay_prefix(upper: Path) -> str:
    """Which attributes are the overlay's: with the other prefix they are data that a command may have written."""
    try:
        kind = (upper.parent / FORMAT_NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        kind = "trusted" if os.geteuid() == 0 else "user"
    return f"{kind}.overlay."


def _can_be_judged(path: str) -> bool:
    """Whether policy, the journal and the agent all mean the same by this name."""
    try:
        path.encode()
        return normalise(path) == path
    except (BadNameError, UnicodeEncodeError):
        return False


def _names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def _own_attributes(path: Path) -> dict[str, bytes]:
    fd = os.open(path, _FILE_READ)
    try:
        return attributes(fd)
    finally:
        os.close(fd)


def _same_content(one: Path, other: Path) -> bool:
    first = os.open(one, _FILE_READ)
    try:
        second = os.open(other, _FILE_READ)
        try:
            while True:
                data = os.read(first, content.CHUNK)
                if data != os.read(second, content.CHUNK):
                    return False
                if not data:
                    return True
        finally:
            os.close(second)
    finally:
        os.close(first)
