"""An independent look at a tree: every fact of every path, by system calls of its own and none of the code it checks.

Names are bytes. What a rollback has to bring back is all in `Seen`; `differences` says in words where two looks differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

Tree = dict[bytes, "Seen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One path, links not followed.

    Attributes:
        kind: the file type bits of its mode.
        mode: permission bits with set-id and sticky ones.
        owner: uid and gid.
        mtime_ns: nanoseconds since the epoch.
        attributes: every extended attribute that can be listed.
        target: of a link.
        sha256: of a file's content.
        data: where a file holds data, as pairs of start and end.
        names: all paths of the tree that are this very file, and how many names it has in all.
    """

    kind: int
    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    attributes: tuple[tuple[str, bytes], ...] = ()
    target: bytes = b""
    sha256: str = ""
    data: tuple[tuple[int, int], ...] = ()
    names: tuple[tuple[bytes, ...], int] = ((), 1)


def look(top: Path) -> Tree:
    """Everything below a directory, and itself under the empty name."""
    root = os.fsencode(top)
    found: Tree = {b"": _seen(root)}
    inodes: dict[int, list[bytes]] = {}
    links: dict[int, int] = {}
    pending = [b""]
    while pending:
        here = pending.pop()
        for name in os.listdir(os.path.join(root, here)):  # noqa: PTH208, PTH118 - bytes
            path = os.path.join(here, name)  # noqa: PTH118 - bytes
            full = os.path.join(root, path)  # noqa: PTH118 - bytes
            found[path] = _seen(full)
            facts = os.lstat(full)
            if stat.S_ISDIR(facts.st_mode):
                pending.append(path)
            elif facts.st_nlink > 1:
                inodes.setdefault(facts.st_ino, []).append(path)
                links[facts.st_ino] = facts.st_nlink
    for inode, names in inodes.items():
        for path in names:
            group = (tuple(sorted(names)), links[inode])
            found[path] = dataclasses.replace(found[path], names=group)
    return found


def _seen(path: bytes) -> Seen:
    facts = os.lstat(path)
    names = os.listxattr(path, follow_symlinks=False)
    seen = Seen(
        kind=stat.S_IFMT(facts.st_mode),
        mode=stat.S_IMODE(facts.st_mode),
        owner=(facts.st_uid, facts.st_gid),
        mtime_ns=facts.st_mtime_ns,
        attributes=tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names)),
    )
    if stat.S_ISLNK(facts.st_mode):
        return dataclasses.replace(seen, target=os.readlink(path))  # noqa: PTH115 - bytes
    if not stat.S_ISREG(facts.st_mode):
        return seen
    with open(path, "rb") as file:  # noqa: PTH123 - bytes
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        data = _data(file.fileno(), facts.st_size)
    return dataclasses.replace(seen, sha256=digest, data=data)


def _data(fd: int, size: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:
            break
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        found.append((start, end))
    return tuple(found)


def without(tree: Tree, *facts: str) -> Tree:
    """The same look without some facts, named as the attributes of `Seen`."""
    blank = Seen(kind=0, mode=0, owner=(0, 0), mtime_ns=0)
    return {
        path: dataclasses.replace(seen, **{fact: getattr(blank, fact) for fact in facts})
        for path, seen in tree.items()
    }


def differences(now: Tree, then: Tree, skip: Collection[bytes] = ()) -> list[str]:
    """What differs, one line for each fact; nothing at or beneath `skip` counts."""
    lines: list[str] = []
    for path in sorted(now.keys() | then.keys()):
        if any(path == top or path.startswith(top + b"/") for top in skip):
            continue
        one, other = now.get(path), then.get(path)
        if one is None or other is None:
            lines.append(f"{path!r}: {'missing' if one is None else 'should not be there'}")
            continue
        for field in dataclasses.fields(Seen):
            is_, was = getattr(one, field.name), getattr(other, field.name)
            if is_ != was:
                lines.append(f"{path!r}: {field.name} is {is_!r}, was {was!r}")
    return lines
