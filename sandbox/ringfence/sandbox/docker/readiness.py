"""Whether an engine can raise the walls: asked before the first container, and one by one for `doctor`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.sandbox.docker.engine import Engine, EngineError
from ringfence.sandbox.docker.refusals import no_image
from ringfence.sandbox.docker.trials import TRIED, tried
from ringfence.sandbox.types import Sandbox, SandboxError, Wall, meets

RUNTIMES = ("runc", "runsc")
_API_LEAST = (1, 41)
_NOT_THERE = "is not on the engine"
_ENGINES_FIX = "it is what this engine has; write the wall's name alone to accept it"
_FIXES = {
    "files": "Landlock is the native backend's; write `files` to accept it, or `backend: native`",
    "uid": "run the kernel as root",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The walls of an engine: all names, and the form of those that have several."""

    names: frozenset[str]
    forms: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What an engine says of itself, and of the image; None: it has none."""

    info: dict[str, Any]
    version: dict[str, Any]
    image: dict[str, Any] | None


def require(engine: Engine, image: str, runtime: str) -> Held:
    """Ask the engine for what it can do. Blocks.

    Raises:
        SandboxError: a wall can't be raised.
    """
    if not image:
        raise SandboxError(
            "the kernel file names no image for the docker backend; run `ringfence image build` and write the digest it prints "
            "as `sandbox.docker.image`"
        )
    found = _walls_of(_facts(engine, image), image, runtime)
    for wall in found:
        if wall.required and not wall.ok:
            if _NOT_THERE in wall.detail:
                raise no_image(image)
            raise SandboxError(f"the sandbox's wall `{wall.name}` can't be raised: {wall.detail}; {wall.fix}")
    return Held(
        names=frozenset({"docker engine", *TRIED, *(wall.name for wall in found)}),
        forms={wall.name: wall.form for wall in found if wall.form},
    )


def demand(wanted: Sequence[str], held: Held) -> None:
    """See that what was demanded stands.

    Raises:
        SandboxError: it names the wall and the fix.
    """
    for text in wanted:
        wall, colon, form = text.partition(":")
        if text == "all":
            continue  # every wall stands in a form that is accepted, or nothing starts
        if wall in held.forms and bool(colon) == bool(form):
            if not meets(held.forms[wall], form):
                raise SandboxError(
                    f"the wall `{wall}` stands as `{held.forms[wall]}` here, and `{form}` is required; "
                    f"{_FIXES.get(wall, _ENGINES_FIX)}"
                )
        elif text not in held.names or text in held.forms:
            known = ", ".join(sorted(held.names))
            raise SandboxError(f"the docker sandbox has no wall `{text}`; it has: {known}")


def walls(sandbox: Sandbox, engine: Engine, image: str, runtime: str) -> Sequence[Wall]:
    """Every wall with its fix: what the engine says, then what a container shows. Blocks."""
    try:
        facts = _facts(engine, image)
    except SandboxError as error:
        what, _, fix = str(error).partition("; ")
        return [Wall(name="docker engine", ok=False, detail=what, fix=fix)]
    found = [
        Wall(name="docker engine", ok=True, detail=f"{facts.version.get('Version')} at {engine.socket}"),
        *_walls_of(facts, image, runtime),
    ]
    if any(wall.required and not wall.ok for wall in found):
        return found
    return [*found, *asyncio.run(tried(sandbox))]


def _facts(engine: Engine, image: str) -> _Facts:
    version = engine.ask(lambda api: api.version())
    known = None
    if image:
        try:
            known = engine.ask(lambda api: api.inspect_image(image))
        except EngineError as error:
            if not error.not_found:
                raise
    return _Facts(info=engine.ask(lambda api: api.info()), version=version, image=known)


def _walls_of(facts: _Facts, image: str, runtime: str) -> list[Wall]:
    info = facts.info
    options = [str(one).split(",")[0].removeprefix("name=") for one in info.get("SecurityOptions") or ()]
    api = str(facts.version.get("ApiVersion", "0.0"))
    known = sorted(info.get("Runtimes") or {})
    root = os.geteuid() == 0
    return [
        _wall("docker api", _numbers(api) >= _API_LEAST, api, "use Docker 20.10 or newer"),
        _wall(
            "docker runtime",
            runtime in known and runtime in RUNTIMES,
            f"{runtime} of {', '.join(known)}",
            f"install `{runtime}` and add it to the engine's `runtimes`, or write `runtime: runc`",
        ),
        _wall(
            "docker root",
            "rootless" not in options,
            "rootless" if "rootless" in options else "the engine is root",
            "agents keep their uid only under an engine that is root; use one, or `backend: native`",
        ),
        Wall(name="docker storage", ok=True, detail=str(info.get("Driver")), required=False),
        _image_wall(facts.image, image),
        _wall(
            "seccomp", "seccomp" in options, ", ".join(options) or "none", "use an engine built with seccomp"
        ),
        Wall(
            name="files", ok=True, detail="a root of its own, read-only", form="mounts", fix=_FIXES["files"]
        ),
        Wall(
            name="uid",
            ok=True,
            detail="each agent has one of its own" if root else "the kernel's own",
            form="own" if root else "kernel",
            fix="" if root else _FIXES["uid"],
        ),
        *_groups(info),
    ]


def _groups(info: dict[str, Any]) -> list[Wall]:
    form = f"cgroup-v{info.get('CgroupVersion', '1')}"
    driver = f"by {info.get('CgroupDriver')}"
    found = [
        Wall(
            name=name,
            ok=bool(info.get(key)),
            detail=driver,
            form=form,
            fix=""
            if info.get(key)
            else f"let the host mount the control group `{name}`, and start the engine anew",
        )
        for name, key in (("memory", "MemoryLimit"), ("pids", "PidsLimit"), ("cpu", "CpuCfsQuota"))
    ]
    counted, swap = bool(info.get("SwapLimit")), _swap_bytes()
    detail = "counted" if counted else "not counted" if swap else "not counted, and there is none"
    fix = "boot with `swapaccount=1`, or switch swap off: an agent could use it beyond its memory limit"
    return [
        *found,
        Wall(name="pause", ok=True, detail=driver, form=form),
        _wall("swap", counted or not swap, detail, fix),
    ]


def _image_wall(known: dict[str, Any] | None, image: str) -> Wall:
    fix = "run `ringfence image build` and put the digest it prints into the kernel file as `sandbox.docker.image`"
    if known is None:
        return _wall("docker image", False, f"`{image}` {_NOT_THERE}" if image else "none is named", fix)
    config: dict[str, Any] = known.get("Config") or {}
    if config.get("Volumes"):
        places = ", ".join(sorted(config["Volumes"]))
        detail = f"it declares volumes ({places}), which nothing bounds"
        return _wall("docker image", False, detail, "build it without VOLUME")
    return _wall("docker image", True, str(known.get("Id", image)), fix)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _swap_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:"))


def _wall(name: str, ok: bool, detail: str, fix: str) -> Wall:
    return Wall(name=name, ok=ok, detail=detail, fix="" if ok else fix)
