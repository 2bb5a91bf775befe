"""What every backend asks of a specification before it makes anything: limits, words, places. One text for one mistake."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringfence.sandbox.types import Limits, SandboxError

FORBIDDEN = ("/proc", "/sys", "/dev", "/etc", "/program", "/workspace", "/run/ringfence")
"""Places inside that nothing of the host may take."""


def checked_uid(uid: int | None) -> int | None:
    """The uid that a specification asks for.

    Raises:
        SandboxError: this kernel can't give it, or nobody should have it.
    """
    if uid is not None and os.geteuid() != 0:
        raise SandboxError(f"only root can run a sandbox as uid {uid}; leave the uid out")
    if uid == 0:
        raise SandboxError("a sandbox never runs as uid 0; give the agent a uid of its own")
    return uid


def checked_limits(limits: Limits) -> Limits:
    """Zero is the default, never unlimited.

    Raises:
        SandboxError: one is negative.
    """
    usual = Limits()
    values = {
        name: getattr(limits, name) for name in ("memory_bytes", "pids", "cpu", "disk_bytes", "timeout_s")
    }
    for name, value in values.items():
        if value < 0:
            raise SandboxError(f"the limit `{name}` is negative; give a positive one, or 0 for the default")
    return Limits(**{name: value or getattr(usual, name) for name, value in values.items()})


def checked_words(argv: Sequence[str]) -> list[str]:
    """The words of a command.

    Raises:
        SandboxError: no program can be started with them.
    """
    words = list(argv)
    if not words or not words[0]:
        raise SandboxError("the command is empty; name a program")
    if any("\0" in word for word in words):
        raise SandboxError("the command holds a NUL character; leave it out")
    return words


def checked_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program.

    Raises:
        SandboxError: no program can have it.
    """
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise SandboxError(f"the environment variable `{name!r}` can't exist; rename it")
    return dict(env)


def checked_directory(path: Path, what: str) -> str:
    """A directory of this host.

    Raises:
        SandboxError: it isn't one.
    """
    if not path.is_dir():
        raise SandboxError(f"the {what} `{path}` is not a directory; create it first")
    return str(path.resolve())


def checked_readonly(path: Path, source: Path | None = None) -> str:
    """A place inside for a directory that is shown read-only.

    Args:
        path: the place inside.
        source: the directory of this host; None: it has the same path.

    Raises:
        SandboxError: it can't be there, or there is no such directory.
    """
    text = os.path.normpath(path)
    if not path.is_absolute() or text == "/" or _forbidden(text):
        raise SandboxError(f"`{path}` can't be shown read-only inside a sandbox; choose another directory")
    if not (source or path).is_dir():
        raise SandboxError(
            f"`{path}` is to be shown inside the sandbox but is not a directory; create it first"
        )
    return text


def checked_mount(at: Path) -> str:
    """A place inside for a directory that a manifest mounts.

    Raises:
        SandboxError: it can't be there.
    """
    if not at.is_absolute() or str(at) != os.path.normpath(at) or str(at) == "/" or _forbidden(str(at)):
        raise SandboxError(f"nothing can be mounted at `{at}` inside a sandbox; choose another directory")
    return str(at)


def _forbidden(path: str) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in FORBIDDEN)


def checked_inside(path: str, what: str) -> str:
    """A path below `/workspace`.

    Raises:
        SandboxError: it isn't one.
    """
    if os.path.normpath(path) != path or not (path == "/workspace" or path.startswith("/workspace/")):
        raise SandboxError(f"the {what} `{path}` is not a plain path below `/workspace`; correct it")
    if what == "mask" and path == "/workspace":
        raise SandboxError("the whole workspace is hidden from commands; allow a part of it first")
    return path
