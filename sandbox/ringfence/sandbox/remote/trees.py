"""A directory tree as a kernel describes it to a host: entries with digests, and what changed since the last time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from ringfence.sandbox import openat
from ringfence.sandbox.overlay_read import attributes
from ringfence.sandbox.remote import content
from ringfence.sandbox.types import SandboxError

Kind = Literal["file", "directory", "link", "hidden", "hidden-directory"]
Version = tuple[int, int, int, int, int]

BATCH = 400
BATCH_BYTES_MAX = 1 << 20
ENTRIES_MAX = 2_000_000


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One path of a tree.

    Attributes:
        path: relative, as bytes; empty for the top.
        kind: a hidden one stands for what must not be seen; nothing of it is told but whether it is a directory.
        mode: permission bits.
        mtime_ns: as the kernel's file system has it; only ever compared with itself.
        digest: of a file's content.
        target: of a link.
        attributes: `user.*` extended attributes.
    """

    path: bytes
    kind: Kind
    mode: int = 0
    mtime_ns: int = 0
    digest: bytes = b""
    target: bytes = b""
    attributes: dict[str, bytes] = {}


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A part of what makes one tree of another; parents come before what they hold."""

    entries: list[Entry] = []
    removed: list[bytes] = []


@dataclass(slots=True)
class Known:
    """What a kernel knows of a tree that a host has.

    Attributes:
        tree: its name at the host.
        entries: what it holds.
        versions: of the files it was read from, so that what did not change is not read again.
    """

    tree: str = ""
    entries: dict[bytes, Entry] = field(default_factory=dict[bytes, Entry])
    versions: dict[bytes, Version] = field(default_factory=dict[bytes, Version])


def scan(top: Path, known: Known, hidden: frozenset[bytes] = frozenset()) -> Known:
    """Read a tree. Content is read only where it is new; nothing hidden is opened.

    Args:
        top: the tree. Nothing else may change it meanwhile.
        known: what was read of it the last time.
        hidden: relative paths that the host must not learn more of than that they are there.

    Raises:
        SandboxError: it can't be read.
    """
    found = Known(tree=known.tree)
    try:
        for path, facts in _walk(os.fsencode(top), hidden):
            entry = _entry(os.fsencode(top), path, facts, known, found, hidden)
            if entry is not None:
                found.entries[path] = entry
            if len(found.entries) > ENTRIES_MAX:
                raise SandboxError(f"`{top}` holds more than {ENTRIES_MAX} paths; nothing was sent")
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename is not None else top
        raise SandboxError(
            f"`{where}` can't be sent to the sandbox host: {(error.strerror or str(error)).lower()}; "
            "let the kernel's user read it"
        ) from error
    except content.ChangedError as error:
        raise SandboxError(f"`{top}` can't be sent to the sandbox host: {error}; try again") from error
    _require_plain(found, hidden)
    return found


def _require_plain(found: Known, hidden: frozenset[bytes]) -> None:
    """INVARIANT: what is to be hidden is what stands at its path, so no path to it leads through anything but directories."""
    for path in hidden - found.entries.keys():
        above = path
        while b"/" in above:
            above = above.rpartition(b"/")[0]
            entry = found.entries.get(above)
            if entry is not None:
                if entry.kind in {"link", "file"}:
                    raise SandboxError(
                        f"the sandbox's wall `masks` can't be raised: `{os.fsdecode(above)}` is no directory; "
                        "the paths to hide must not lead through links; report this"
                    )
                break


def changes(old: Known, new: Known) -> Iterator[Delta]:
    """What a host that has `old` must be told to have `new`, in parts."""
    entries: list[Entry] = []
    removed: list[bytes] = []
    size = 0
    for path in sorted(old.entries.keys() - new.entries.keys()):
        removed.append(path)
        if len(removed) == BATCH:
            yield Delta(removed=removed)
            removed = []
    if removed:
        yield Delta(removed=removed)
    for path, entry in new.entries.items():
        if old.entries.get(path) == entry:
            continue
        weight = sum(len(value) for value in entry.attributes.values())
        if len(entries) == BATCH or size + weight > BATCH_BYTES_MAX // 4:
            yield Delta(entries=entries)
            entries, size = [], 0
        entries.append(entry)
        size += weight
    if entries:
        yield Delta(entries=entries)


def _walk(top: bytes, hidden: frozenset[bytes]) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every path with its facts, parents first; nothing beneath a hidden one."""
    yield b"", os.lstat(top)
    pending = [b""]
    while pending:
        directory = pending.pop()
        with os.scandir(os.path.join(top, directory)) as entries:  # noqa: PTH118 - bytes
            names = sorted(entry.name for entry in entries)
        for name in names:
            path = os.path.join(directory, name)  # noqa: PTH118 - bytes
            facts = os.lstat(os.path.join(top, path))  # noqa: PTH118 - bytes
            yield path, facts
            if stat.S_ISDIR(facts.st_mode) and path not in hidden:
                pending.append(path)


def _entry(
    top: bytes, path: bytes, facts: os.stat_result, known: Known, found: Known, hidden: frozenset[bytes]
) -> Entry | None:
    mode = stat.S_IMODE(facts.st_mode)
    if path in hidden:
        return Entry(path=path, kind="hidden-directory" if stat.S_ISDIR(facts.st_mode) else "hidden")
    if stat.S_ISLNK(facts.st_mode):
        return Entry(path=path, kind="link", target=os.readlink(os.path.join(top, path)))  # noqa: PTH115, PTH118
    if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
        return None
    version = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    before = known.entries.get(path)
    if before is not None and known.versions.get(path) == version:
        found.versions[path] = version
        return before
    kind: Kind = "directory" if stat.S_ISDIR(facts.st_mode) else "file"
    flags = openat.DIRECTORY if kind == "directory" else openat.FILE
    fd = os.open(os.path.join(top, path), flags)  # noqa: PTH118 - bytes
    try:
        digest = content.digest(fd) if kind == "file" else b""
        own = attributes(fd)
    finally:
        os.close(fd)
    found.versions[path] = version
    return Entry(path=path, kind=kind, mode=mode, mtime_ns=facts.st_mtime_ns, digest=digest, attributes=own)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Delta)


def encode(delta: Delta) -> bytes:
    """A part as a frame of a listing."""
    body = _encoder.encode(delta)
    return len(body).to_bytes(4, "big") + body


def decode(body: bytes) -> Delta:
    """Read one back.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _decoder.decode(body)
