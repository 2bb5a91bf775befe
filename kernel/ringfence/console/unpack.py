"""Unpacks a workspace that comes home. An agent chose every byte, name and link, so nothing is trusted."""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.console.outputs import STANDARD_OUTPUT, no_file

if TYPE_CHECKING:
    from collections.abc import Iterator

_COPY_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class Pulled:
    """What came home.

    Attributes:
        files: number of files and links.
        size_bytes: their content.
        skipped: (name, why) of members that were left behind.
    """

    files: int = 0
    size_bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def unpack(parts: Iterator[bytes], target: Path, *, force: bool) -> Pulled:
    """Unpack a tar into a directory.

    Everything is first unpacked beside the target and moved into place when it is complete, so that a broken
    connection leaves nothing behind.

    Args:
        parts: the tar.
        target: the directory; created where it doesn't exist.
        force: replace files that are there already.

    Raises:
        ConsoleError: a file is there already (exit 5), the tar is broken, or the target can't be written.
    """
    if target == STANDARD_OUTPUT:
        raise ConsoleError(
            "`-` is no directory; give one with `--to`, `./-` where it is named so", ExitCode.USAGE
        )
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_dir():
            raise ConsoleError(f"`{target}` is not a directory; give one with `--to`", ExitCode.CONFLICT)
        # Beside the target where it isn't there yet, else in it: a rename must not cross file systems.
        stage = Path(
            tempfile.mkdtemp(prefix=".ringfence-pull-", dir=target if target.is_dir() else target.parent)
        )
    except OSError as error:
        raise _unwritable(target, error) from None
    try:
        pulled = _extract(parts, stage)
        _place(stage, target, force=force)
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return pulled


def _extract(parts: Iterator[bytes], stage: Path) -> Pulled:
    pulled = Pulled()
    links: list[tuple[PurePosixPath, str]] = []
    folders: list[tuple[Path, tarfile.TarInfo]] = []
    try:
        with tarfile.open(fileobj=cast("Any", _Reader(parts)), mode="r|", bufsize=_COPY_BYTES) as tar:
            for member in tar:
                name = _relative(member.name)
                why = "its name leads out of the directory" if name is None else _why_not(member, name)
                if name is None or why:
                    pulled.skipped.append((member.name, why))
                    continue
                if member.issym():
                    links.append((name, member.linkname))
                elif member.isdir():
                    folder = stage / name
                    folder.mkdir(parents=True, exist_ok=True)
                    folders.append((folder, member))
                else:
                    _write(tar, member, stage, name, pulled)
    except (tarfile.TarError, EOFError) as error:
        raise ConsoleError(f"the kernel sent a broken archive: {str(error).lower()}; try again") from None
    # INVARIANT: links are made after every file and directory, so nothing is ever written through one.
    for name, where in links:
        _link(stage, name, where, pulled)
    for folder, member in reversed(folders):
        # The owner can always look into it and remove it.
        folder.chmod(member.mode & 0o777 | 0o700)
        _stamp(folder, member)
    return pulled


def _relative(name: str) -> PurePosixPath | None:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        return None
    return PurePosixPath(*parts)


def _why_not(member: tarfile.TarInfo, name: PurePosixPath) -> str:
    if member.issym():
        return _why_no_link(name, member.linkname)
    return (
        "" if member.isreg() or member.isdir() or member.islnk() else "it is neither file, directory nor link"
    )


def _why_no_link(name: PurePosixPath, target: str) -> str:
    """Refuse links that lead out. `..` may only lead it: further on, links could change its meaning."""
    if not target or target.startswith("/"):
        return "it links to an absolute path"
    steps = [part for part in target.split("/") if part not in ("", ".")]
    up = next((index for index, part in enumerate(steps) if part != ".."), len(steps))
    if up > len(name.parts) - 1 or ".." in steps[up:]:
        return "it links out of the directory"
    return ""


def _write(
    tar: tarfile.TarFile, member: tarfile.TarInfo, stage: Path, name: PurePosixPath, pulled: Pulled
) -> None:
    path = stage / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.islnk():
        first = _relative(member.linkname)
        if first is None or not (stage / first).is_file():
            pulled.skipped.append((member.name, "what it is linked to did not come"))
            return
        shutil.copyfile(stage / first, path)
    else:
        source = tar.extractfile(member)
        if source is None:
            pulled.skipped.append((member.name, "it has no content"))
            return
        with path.open("wb") as file:
            shutil.copyfileobj(source, file, _COPY_BYTES)
    path.chmod(member.mode & 0o777)
    _stamp(path, member)
    pulled.files += 1
    pulled.size_bytes += path.stat().st_size


def _stamp(path: Path, member: tarfile.TarInfo) -> None:
    with contextlib.suppress(OverflowError, ValueError):
        os.utime(path, (member.mtime, member.mtime))


def _link(stage: Path, name: PurePosixPath, where: str, pulled: Pulled) -> None:
    path = stage / name
    # INVARIANT: a link's directory is a real one, else its `..` would count from elsewhere.
    if any((stage / parent).is_symlink() for parent in name.parents):
        pulled.skipped.append((str(name), "it lies behind a link"))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.symlink_to(where)
    except FileExistsError:
        pulled.skipped.append((str(name), "its name came twice"))
        return
    pulled.files += 1


def _place(stage: Path, target: Path, *, force: bool) -> None:
    if not target.exists():
        stage.chmod(0o777 & ~_umask())
        stage.rename(target)
        return
    files, folders = _collect(stage)
    _check_free(target, files, folders, force=force)
    made = [name for name in folders if not (target / name).exists()]
    for name in made:
        (target / name).mkdir()
    for name in files:
        (stage / name).replace(target / name)
    for name in reversed(made):
        shutil.copystat(stage / name, target / name)


def _check_free(target: Path, files: list[Path], folders: list[Path], *, force: bool) -> None:
    """Refuse before anything moves."""
    for name in folders:
        there = target / name
        if there.is_symlink() or (there.exists() and not there.is_dir()):
            raise _in_the_way(there, "it is no directory; move it away first")
    for name in files:
        there = target / name
        kind = no_file(there)
        if kind and not there.is_symlink():
            raise _in_the_way(there, f"it is {kind}; move it away first")
        if os.path.lexists(there) and not force:
            raise _in_the_way(there, "pull into an empty directory, or use `--force` to replace files")


def _collect(stage: Path) -> tuple[list[Path], list[Path]]:
    files: list[Path] = []
    folders: list[Path] = []
    for base, folder_names, file_names in os.walk(stage):
        here = Path(base).relative_to(stage)
        for name in folder_names:
            (files if (Path(base) / name).is_symlink() else folders).append(here / name)
        files += [here / name for name in file_names]
    return files, folders


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _in_the_way(path: Path, advice: str) -> ConsoleError:
    return ConsoleError(f"`{path}` is there already; {advice}", ExitCode.CONFLICT)


def _unwritable(target: Path, error: OSError) -> ConsoleError:
    place = error.filename if isinstance(error.filename, str) else target
    return ConsoleError(
        f"`{place}` can't be written: {os_error_text(error)}; give another directory with `--to`"
    )


class _Reader:
    """Reads a stream of parts as tarfile reads a file."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._held: bytes = b""

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes; fewer only at the end."""
        pieces: list[bytes] = []
        wanted = size
        while wanted:
            if not self._held:
                part = next(self._parts, None)
                if part is None:
                    break
                self._held = part
                continue
            piece, self._held = self._held[:wanted], self._held[wanted:]
            pieces.append(piece)
            wanted -= len(piece)
        return b"".join(pieces)
