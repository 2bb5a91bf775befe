"""Tries the walls of an engine in containers that are made for it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfence.sandbox.types import CommandSpec, Limits, ProgramSpec, Sandbox, SandboxError, Wall

TRIED = ("namespaces", "no_new_privs", "read-only image", "overlay")
"""Walls that show only in a container."""

_PROBE_UID = 65534
_PROBE_S = 60.0
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


def _place(uid: int | None) -> Path:
    """A place of its own for trying."""
    place = Path(tempfile.mkdtemp(prefix="ringfence-walls-"))
    place.chmod(0o755)
    for name in ("image", "sockets", "workspace", "scratch"):
        (place / name).mkdir(mode=0o755)
    (place / "workspace" / "old").write_text("old")
    if uid is not None:
        for path in (place / "workspace", place / "workspace" / "old"):
            os.chown(path, uid, uid)
    return place


async def tried(sandbox: Sandbox) -> list[Wall]:
    """Start a program and run a command."""
    uid = _PROBE_UID if os.geteuid() == 0 else None
    place = _place(uid)
    try:
        container = await _try("", lambda: _program(sandbox, place, uid))
        overlay = await _try("overlay", lambda: _command(sandbox, place, uid))
        return [*(dataclasses.replace(container, name=name) for name in TRIED if name != "overlay"), overlay]
    finally:
        await sandbox.close()
        shutil.rmtree(place, ignore_errors=True)


async def _try(name: str, work: Callable[[], Any]) -> Wall:
    try:
        return Wall(name=name, ok=True, detail=await work())
    except SandboxError as error:
        what, _, fix = str(error).partition("; ")
        return Wall(name=name, ok=False, detail=what, fix=fix or "see the engine's log")


async def _program(sandbox: Sandbox, place: Path, uid: int | None) -> str:
    """A program whose first process looks at its walls before it starts anything."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        spec = ProgramSpec(
            agent="walls",
            argv=["python3", "-I", "-S", "-c", "pass"],
            env=_ENV,
            image=place / "image",
            socket_dir=place / "sockets",
            uid=uid,
            limits=Limits(timeout_s=_PROBE_S),
            stdout_fd=null,
            stderr_fd=null,
        )
        program = await sandbox.start(spec)
    finally:
        os.close(null)
    ended = await program.wait()
    if ended.code != 0:
        raise SandboxError(
            f"a program that does nothing ended with {ended.reason} {ended.code}; see the engine's log"
        )
    return "looked at from within a container"


async def _command(sandbox: Sandbox, place: Path, uid: int | None) -> str:
    spec = CommandSpec(
        agent="walls",
        argv=["python3", "-I", "-S", "-c", "import os; os.unlink('old'); open('new', 'w').close()"],
        env=_ENV,
        lower=place / "workspace",
        scratch=place / "scratch",
        uid=uid,
        limits=Limits(timeout_s=_PROBE_S),
    )
    done = await sandbox.run_command(spec)
    names = {path.name for path in done.upper.iterdir()} if done.upper.is_dir() else set[str]()
    if done.exit.code != 0 or names != {"old", "new"} or not (place / "workspace" / "old").exists():
        raise SandboxError("what a command changes does not stay in its upper layer; see the engine's log")
    return "changes stay in the upper layer"
