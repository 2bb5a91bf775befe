"""Whether an engine can raise the walls: asked before the first container, and one by one for `doctor`."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.sandbox.docker.engine import Engine, EngineError
from ringfence.sandbox.docker.refusals import no_image
from ringfence.sandbox.types import CommandSpec, Limits, ProgramSpec, Sandbox, SandboxError, Wall

RUNTIMES = ("runc", "runsc")
_API_LEAST = (1, 41)
_PROBE_UID = 65534
_PROBE_S = 60.0
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
_UPDATE = "use Docker 20.10 or newer"
_GROUPS_FIX = "let the host mount the control group `{}` and start the engine anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What the engine says of itself."""

    info: dict[str, Any]
    version: dict[str, Any]
    image: dict[str, Any] | None


def require(api: Any, image: str, runtime: str) -> None:
    """Ask the engine for what it can do.

    Raises:
        SandboxError: a wall can't be raised.
    """
    if not image:
        raise SandboxError(
            "the kernel file names no image for the docker backend; run `ringfence image build` and write the digest it prints "
            "as `sandbox.docker.image`"
        )
    for wall in _walls_of(_facts(api, image), image, runtime):
        if wall.required and not wall.ok:
            if wall.name == "docker image" and "not on the engine" in wall.detail:
                raise no_image(image)
            raise SandboxError(f"the sandbox's wall `{wall.name}` can't be raised: {wall.detail}; {wall.fix}")


def walls(sandbox: Sandbox, engine: Engine, image: str, runtime: str) -> Sequence[Wall]:
    """Every wall with its fix: what the engine says, then what a container shows. Blocks."""
    try:
        facts = engine.ask(lambda api: _facts(api, image))
    except SandboxError as error:
        what, _, fix = str(error).partition("; ")
        return [Wall(name="docker engine", ok=False, detail=what, fix=fix)]
    found = [
        Wall(name="docker engine", ok=True, detail=f"{facts.version.get('Version')} at {engine.socket}"),
        *_walls_of(facts, image, runtime),
    ]
    if any(wall.required and not wall.ok for wall in found):
        return found
    return [*found, *asyncio.run(_tried(sandbox))]


def _facts(api: Any, image: str) -> _Facts:
    try:
        known = api.inspect_image(image) if image else None
    except EngineError:
        known = None
    except Exception as error:
        if getattr(getattr(error, "response", None), "status_code", 0) != 404:  # noqa: PLR2004
            raise
        known = None
    return _Facts(info=api.info(), version=api.version(), image=known)


def _walls_of(facts: _Facts, image: str, runtime: str) -> list[Wall]:
    info = facts.info
    options = [
        str(option).split(",")[0].removeprefix("name=") for option in info.get("SecurityOptions") or ()
    ]
    version = tuple(int(part) for part in str(facts.version.get("ApiVersion", "0.0")).split(".")[:2])
    known = sorted(info.get("Runtimes") or {})
    checks: list[Wall] = [
        _wall("docker api", version >= _API_LEAST, str(facts.version.get("ApiVersion")), _UPDATE),
        _wall(
            "docker runtime",
            runtime in known and runtime in RUNTIMES,
            f"{runtime} of {', '.join(known)}",
            f"install `{runtime}` and add it to the engine's `runtimes`, or write `runtime: runc`",
        ),
        _wall(
            "docker seccomp",
            "seccomp" in options,
            ", ".join(options) or "none",
            "use an engine built with seccomp",
        ),
        _wall(
            "docker root",
            "rootless" not in options,
            "rootless" if "rootless" in options else "the engine is root",
            "agents keep their uid only under an engine that is root; use one, or `backend: native`",
        ),
        _wall(
            "docker userns",
            True,
            "userns-remap, left aside for sandboxes" if "userns" in options else "no remapping",
            "",
        ),
        Wall(name="docker storage", ok=True, detail=str(info.get("Driver")), required=False),
        *_groups(info),
        _image_wall(facts.image, image),
    ]
    return checks


def _groups(info: dict[str, Any]) -> list[Wall]:
    version = f"version {info.get('CgroupVersion', '1')} by {info.get('CgroupDriver')}"
    found = [
        _wall(f"docker cgroup {name}", bool(info.get(key)), version, _GROUPS_FIX.format(group))
        for name, key, group in (
            ("memory", "MemoryLimit", "memory"),
            ("pids", "PidsLimit", "pids"),
            ("cpu", "CpuCfsQuota", "cpu"),
        )
    ]
    swap = _swap_bytes()
    counted = bool(info.get("SwapLimit"))
    detail = "counted" if counted else "not counted, and there is none" if not swap else "not counted"
    fix = "boot with `swapaccount=1`, or switch swap off: an agent could use it beyond its memory limit"
    return [*found, _wall("docker swap", counted or not swap, detail, fix)]


def _image_wall(known: dict[str, Any] | None, image: str) -> Wall:
    fix = "run `ringfence image build` and put the digest it prints into the kernel file as `sandbox.docker.image`"
    if known is None:
        return _wall(
            "docker image", False, f"{image} is not on the engine" if image else "none is named", fix
        )
    config: dict[str, Any] = known.get("Config") or {}
    if config.get("Volumes"):
        places = ", ".join(sorted(config["Volumes"]))
        return _wall(
            "docker image",
            False,
            f"it declares volumes ({places}), which nothing bounds",
            "build it without VOLUME",
        )
    return _wall("docker image", True, str(known.get("Id", image)), fix)


def _swap_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:"))


def _wall(name: str, ok: bool, detail: str, fix: str) -> Wall:
    return Wall(name=name, ok=ok, detail=detail, fix="" if ok else fix)


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


async def _tried(sandbox: Sandbox) -> list[Wall]:
    """Start a program and run a command."""
    uid = _PROBE_UID if os.geteuid() == 0 else None
    place = _place(uid)
    try:
        return [
            await _try("docker container", lambda: _program(sandbox, place, uid)),
            await _try("docker overlay", lambda: _command(sandbox, place, uid)),
        ]
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
    return "no network, no rights, read-only root, filter and own user stand"


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
