"""Starting a program in a container, beside the docker SDK's own create and start of the same container."""

from __future__ import annotations

import asyncio
import importlib
import time
import uuid
from typing import Any

from ringfence.sandbox.types import Limits, ProgramSpec, SandboxError

from bench.host import Bench, median
from bench.report import Target
from bench.sandbox.place import UID, Place
from bench.sandbox.starts import row

OF_SDK = 1.3


async def measure(bench: Bench, place: Place) -> tuple[list[dict[str, Any]], list[Target], list[str]]:
    """Rows, targets and notes; a note alone where there is no engine, image or package."""
    try:
        docker, image = _part(""), _part(".image")
        engine = _part(".engine").Engine(_part(".engine").usual_host())
        found = await asyncio.to_thread(image.find, engine, image.TAG)
    except (SandboxError, ImportError) as error:
        return [], [], [f"docker: {error}"]
    if not found:
        return [], [], ["docker: there is no base image on the engine (`ringfence image build`)"]
    sandbox = docker.DockerSandbox(place.home / "k", docker.DockerSettings(image=found))
    times = 5 if bench.quick else 15
    ours: list[float] = []
    sdk: list[float] = []
    try:
        for turn in range(times):
            bench.say(f"containers, {turn + 1} of {times}")
            ours.append(await _ours(sandbox, place))
            sdk.append(await asyncio.to_thread(_sdk, engine, found))
    finally:
        await sandbox.close()
    rows = [row("docker: until the program runs", ours, "the SDK: create and start", sdk)]
    ratio = median(ours) / median(sdk)
    return rows, [Target(name="docker start in the bare SDK's", got=ratio, wanted=OF_SDK, at_least=False)], []


def _part(name: str) -> Any:
    """A module of the backend: the SDK is imported where it is used only."""
    return importlib.import_module(f"ringfence.sandbox.docker{name}")


async def _ours(sandbox: Any, place: Place) -> float:
    with open("/dev/null", "wb") as null:  # noqa: PTH123 - a descriptor is all that is wanted
        spec = ProgramSpec(
            agent="bench",
            argv=["/bin/sleep", "1000"],
            env={"PATH": "/usr/bin:/bin"},
            image=place.image,
            socket_dir=place.closed,
            uid=place.uid,
            stdout_fd=null.fileno(),
            stderr_fd=null.fileno(),
        )
        began = time.perf_counter()
        program = await sandbox.start(spec)
        taken = time.perf_counter() - began
    await program.kill()
    return taken


def _sdk(engine: Any, image: str) -> float:
    """The same walls and limits by the SDK alone: no link to a first process, nothing but a `sleep`."""
    containers = _part(".containers")
    box = containers.Box(image=image, runtime="runc", uid=UID, limits=Limits(), labels={}, shown=())
    wanted = {**containers.container(box), "Entrypoint": ["/bin/sleep", "1000"]}

    def work(api: Any) -> float:
        began = time.perf_counter()
        made = api.create_container_from_config(wanted, f"bench-{uuid.uuid4().hex}")["Id"]
        try:
            api.start(made)
            return time.perf_counter() - began
        finally:
            api.remove_container(made, force=True)

    return float(engine.ask(work))
