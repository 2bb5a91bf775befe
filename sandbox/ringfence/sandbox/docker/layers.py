"""The workspace of a command: an overlay that the engine mounts, whose upper layer the kernel reads afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfence.sandbox.docker.containers import Shown
from ringfence.sandbox.native.job import FORMAT_NAME, UPPER_NAME, WORK_NAME
from ringfence.sandbox.types import SandboxError

HIDDEN_NAME = "hidden"
_UNSPEAKABLE = ":,\\"
_BLOCK = 512
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """An overlay that is yet to be mounted.

    Attributes:
        options: for the mount.
        covers: what is laid over hidden paths.
        upper: the upper layer.
    """

    options: str
    covers: Sequence[Shown]
    upper: Path


def prepare(
    lower: Path, scratch: Path, masks: Sequence[str], cover: tuple[Path, Path], *, trusted: bool
) -> Layers:
    """Make the layers of a command in its empty scratch directory.

    Args:
        lower: the live workspace.
        scratch: the command's own directory.
        masks: absolute paths below `/workspace` to hide.
        cover: a file and a directory to lay over them.
        trusted: whether the kernel, being root, can read attributes that no one else can forge.

    Raises:
        SandboxError: the overlay can't be had.
    """
    for path in (lower, scratch):
        _require_speakable(path, "use another --data")
    facts = lower.stat()
    upper = scratch / UPPER_NAME
    try:
        (scratch / WORK_NAME).mkdir(mode=0o700)
        upper.mkdir(mode=0o700)
        # The root of an overlay shows the upper layer's own owner, mode and times.
        if trusted:
            os.chown(upper, facts.st_uid, facts.st_gid)
        upper.chmod(stat.S_IMODE(facts.st_mode))
        os.utime(upper, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        with (scratch / FORMAT_NAME).open("x", encoding="ascii") as file:
            file.write("trusted" if trusted else "user")
    except OSError as error:
        raise SandboxError(
            f"the sandbox's wall `scratch directory` can't be raised: `{error.filename}`: {error.strerror}; "
            "it must be empty and writable for the kernel"
        ) from error
    covers, links = _covers(lower, masks, cover)
    lowers = str(lower)
    if links:
        _stand_in(lower, scratch / HIDDEN_NAME, links, trusted=trusted)
        lowers = f"{scratch / HIDDEN_NAME}:{lower}"
    options = f"lowerdir={lowers},upperdir={upper},workdir={scratch / WORK_NAME},index=off"
    # Without redirects a renamed directory is copied and removed, so the upper layer alone tells what happened. What `volatile`
    # leaves behind belongs to the engine's user, and only root can remove it.
    options += ",redirect_dir=off,metacopy=off,volatile" if trusted else ",userxattr"
    return Layers(options=options, covers=covers, upper=upper)


def beneath(source: Path, target: str, nothing: Path) -> str:
    """Options of an overlay that shows a directory of this host, read-only.

    In one, a socket or a pipe is only a name; a bind, read-only or not, would let the program connect to what listens there on the
    host. Nor do mounts below the directory come along.

    Raises:
        SandboxError: the overlay can't be had.
    """
    if not source.is_dir():
        raise SandboxError(
            f"the sandbox's wall `mount {target}` can't be raised: `{source}` is not a directory; mount another one"
        )
    for path in (source, nothing):
        _require_speakable(path, "mount another directory")
    return f"lowerdir={source}:{nothing},index=off"


def _require_speakable(path: Path, fix: str) -> None:
    if any(character in str(path) for character in _UNSPEAKABLE):
        raise SandboxError(
            f"an overlay can't be made of `{path}`, because of a colon, comma or backslash in its path; {fix}"
        )


def tidy(scratch: Path) -> bool:
    """Remove what only the mount needed; whether that could be done."""
    work = scratch / WORK_NAME
    with contextlib.suppress(OSError):
        # Root's, and closed to everybody; but empty, so whoever has the directory above may remove it.
        (work / "work").rmdir()
    for place in (work, scratch / HIDDEN_NAME):
        shutil.rmtree(place, ignore_errors=True)
    return not work.exists()


def closed_bytes(top: str) -> int:
    """Blocks taken below directories that their owner may not read; they are opened for the look. Root needs none of this."""
    total = 0
    opened: list[tuple[str, int]] = []
    pending = [(top, False)]
    try:
        while pending:
            path, closed = pending.pop()
            with contextlib.suppress(OSError):
                mode = stat.S_IMODE(os.lstat(path).st_mode)
                if mode & stat.S_IRWXU != stat.S_IRWXU:
                    Path(path).chmod(mode | stat.S_IRWXU)
                    opened.append((path, mode))
                    closed = True
                for entry in os.scandir(path):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        pending.append((entry.path, closed))
                    total += facts.st_blocks * _BLOCK if closed else 0
    finally:
        for path, mode in reversed(opened):
            with contextlib.suppress(OSError):
                Path(path).chmod(mode)
    return total


def _covers(lower: Path, masks: Sequence[str], cover: tuple[Path, Path]) -> tuple[list[Shown], list[str]]:
    """What to lay over which paths, and those of them that are links."""
    found: list[Shown] = []
    links: list[str] = []
    hidden: list[str] = []
    for mask in sorted(masks):
        if any(mask.startswith(f"{above}/") for above in hidden):
            continue
        mode = _mode(lower, mask)
        if mode is None:
            continue
        hidden.append(mask)
        found.append(Shown(source=cover[stat.S_ISDIR(mode)], target=mask))
        if stat.S_ISLNK(mode):
            links.append(mask)
    return found, links


def _mode(lower: Path, mask: str) -> int | None:
    """What stands at a masked path; None: nothing does. Never follows a link, so what is covered is what was named."""
    names = mask.strip("/").split("/")[1:]
    handle = os.open(lower, _DIRECTORY)
    try:
        for name in names[:-1]:
            step = os.open(name, _DIRECTORY, dir_fd=handle)
            os.close(handle)
            handle = step
        return os.lstat(names[-1], dir_fd=handle).st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SandboxError(
            f"the sandbox's wall `masks` can't be raised: `{mask}`: {error.strerror}; "
            "the paths to hide must not lead through links; report this"
        ) from error
    finally:
        os.close(handle)


def _stand_in(lower: Path, layer: Path, links: Sequence[str], *, trusted: bool) -> None:
    """A layer over the workspace with a plain file for each hidden link: engines follow a link where they lay something over it."""
    _copy_facts(lower, layer, trusted=trusted)
    for link in links:
        names = link.strip("/").split("/")[1:]
        place, source = layer, lower
        for name in names[:-1]:
            place, source = place / name, source / name
            if not place.exists():
                _copy_facts(source, place, trusted=trusted)
        (place / names[-1]).touch(mode=0)
    # Again, now that nothing is put into them any more.
    for directory, _, _ in os.walk(layer):
        facts = (lower / os.path.relpath(directory, layer)).stat()
        os.utime(directory, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _copy_facts(source: Path, target: Path, *, trusted: bool) -> None:
    facts = source.stat()
    target.mkdir(mode=0o700, exist_ok=True)
    if trusted:
        os.chown(target, facts.st_uid, facts.st_gid)
    target.chmod(stat.S_IMODE(facts.st_mode) | (0 if trusted else stat.S_IRWXU))
