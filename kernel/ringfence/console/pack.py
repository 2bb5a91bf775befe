"""Packs a workspace directory as a tar, a part at a time: memory stays flat, whatever the directory holds."""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from typing import TYPE_CHECKING, BinaryIO

from ringfence.console.errors import ConsoleError, ExitCode, os_error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK_BYTES = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_KINDS = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "fifo", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


def pack(root: Path, *, left_out: Callable[[str, str], None]) -> Iterator[bytes]:
    """Pack what lies below a directory, in name order, as parts of about `CHUNK_BYTES`.

    Links stay links. Owners, set-id bits and hard links don't travel. Sockets, fifos, devices are left out.

    Args:
        root: the directory; itself not a member.
        left_out: told the path and kind of what is left out.

    Raises:
        ConsoleError: something can't be read, or a file changed its size while it was packed.
    """
    buffer = bytearray()
    for part in _members(root, left_out):
        buffer += part
        if len(buffer) >= CHUNK_BYTES:
            yield bytes(buffer)
            buffer.clear()
    buffer += bytes(2 * _BLOCK)
    buffer += bytes(-len(buffer) % tarfile.RECORDSIZE)
    yield bytes(buffer)


def packed_bytes(root: Path) -> int:
    """About how many bytes `pack` will make. What can't be read counts nothing: `pack` says what is wrong."""
    total = 0
    for folder, _, names in os.walk(root):
        total += _BLOCK
        for name in names:
            with contextlib.suppress(OSError):
                size = os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - a hundred thousand of them
                total += _BLOCK + size + -size % _BLOCK
    return total


def _members(root: Path, left_out: Callable[[str, str], None]) -> Iterator[bytes]:
    pending = _entries(root, root)
    while pending:
        path = pending.pop()
        name = path.relative_to(root).as_posix()
        try:
            facts = path.lstat()
            info = _info(path, name, facts)
            if info is None:
                left_out(name, _KINDS.get(stat.S_IFMT(facts.st_mode), "special file"))
                continue
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            if info.isreg():
                yield from _content(path, facts.st_size)
        except OSError as error:
            raise _unreadable(path, error) from None
        if stat.S_ISDIR(facts.st_mode):
            pending += _entries(path, root)


def _entries(folder: Path, root: Path) -> list[Path]:
    """List a directory, last name first: the list is used as a stack."""
    try:
        return sorted(folder.iterdir(), reverse=True)
    except OSError as error:
        raise _unreadable(folder if folder != root else root, error) from None


def _info(path: Path, name: str, facts: os.stat_result) -> tarfile.TarInfo | None:
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(facts.st_mode) & 0o777
    info.mtime = int(facts.st_mtime)
    if stat.S_ISREG(facts.st_mode):
        info.type, info.size = tarfile.REGTYPE, facts.st_size
    elif stat.S_ISDIR(facts.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(facts.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)  # noqa: PTH115 - a Path would tidy the target up
    else:
        return None
    return info


def _content(path: Path, size: int) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        left = size
        while left:
            part = file.read(min(CHUNK_BYTES, left))
            if not part:
                break
            left -= len(part)
            yield part
        if left or _more(file):
            raise ConsoleError(
                f"`{path}` changed while it was packed; submit again when nothing writes there"
            )
    yield bytes(-size % _BLOCK)


def _more(file: BinaryIO) -> bool:
    return bool(file.read(1))


def _unreadable(path: Path, error: OSError) -> ConsoleError:
    return ConsoleError(
        f"`{path}` can't be read for the workspace: {os_error_text(error)}; make it readable or move it out",
        ExitCode.USAGE,
    )
