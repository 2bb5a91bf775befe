"""Ends what kernels that are no more left on an engine, also what the engine is still making for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ringfence.sandbox.docker.engine import Engine, EngineError
from ringfence.sandbox.docker.places import LABEL_AGENT, LABEL_DATA, LABEL_KERNEL, Places, container_name
from ringfence.sandbox.docker.program import SHORT_ID, remove, remove_container
from ringfence.sandbox.types import SandboxError

_LIVE = ("running", "paused", "restarting")
_PAUSE_S = 0.1
_SLOW = 2


async def sweep(engine: Engine, places: Places) -> Sequence[str]:
    """End what earlier kernels of a data directory left on this engine.

    Returns:
        The agents whose programs still ran.

    Raises:
        SandboxError: the engine can't be reached, or something can't be ended.
    """
    # INVARIANT: fenced before anything is looked for: what the engine begins to make from here on it refuses, since a
    # directory is not there.
    launches = await asyncio.to_thread(places.fence, engine.host)
    wanted = {"label": f"{LABEL_DATA}={places.data()}"}
    agents: set[str] = set()
    found: list[dict[str, Any]] = await engine.call(lambda api: api.containers(all=True, filters=wanted))
    for known in found:
        labels: dict[str, str] = known["Labels"]
        if labels.get(LABEL_KERNEL) == places.kernel:
            continue
        if not await remove_container(engine, known["Id"]):
            raise SandboxError(
                f"container `{known['Id'][:SHORT_ID]}` of an earlier kernel can't be ended; end it yourself: docker rm -f {known['Id'][:SHORT_ID]}"
            )
        if known["State"] in _LIVE:
            agents.add(labels.get(LABEL_AGENT, ""))
    if launches:
        await _none_comes(engine, places, [container_name(launch) for launch in launches])
    answer: dict[str, Any] = await engine.call(lambda api: api.volumes(filters=wanted))
    volumes: list[dict[str, Any]] = answer.get("Volumes") or []
    for volume in volumes:
        own: dict[str, str] = volume.get("Labels") or {}
        if own.get(LABEL_KERNEL) != places.kernel:
            await remove(engine, "", [volume["Name"]])
    await asyncio.to_thread(places.forget_links, engine.host)
    return sorted(agents)


async def _none_comes(engine: Engine, places: Places, names: Sequence[str]) -> None:
    """See that no container comes of launches that a kernel died in.

    The engine goes on with a request whose sender is gone, and lists a container only at the end of making it. But it keeps
    the name from the beginning: who can have it knows that nothing else is being made under it.
    """
    images: list[str] = await engine.call(lambda api: api.images(quiet=True))
    if not images:
        return  # of nothing, nothing is made
    labels = places.labels("", "placeholder")
    request: dict[str, Any] = {
        "Image": images[0],
        "Entrypoint": ["none"],
        "Labels": labels,
        "NetworkDisabled": True,
        "HostConfig": {"NetworkMode": "none", "ReadonlyRootfs": True, "CapDrop": ["ALL"]},
    }
    for name in names:
        patience = time.monotonic() + _SLOW * engine.patience_s
        while not await _had(engine, request, name):
            if time.monotonic() > patience:
                raise SandboxError(
                    f"the docker engine is still making container `{name}` of an earlier kernel; look at its log and start it anew"
                )
            await remove_container(engine, name)
            await asyncio.sleep(_PAUSE_S)


async def _had(engine: Engine, request: dict[str, Any], name: str) -> bool:
    """Whether the name could be had; it is given back."""
    try:
        made: dict[str, Any] = await engine.call(
            lambda api: api.create_container_from_config(request, name), slow=True
        )
    except EngineError as error:
        if error.conflict:
            return False
        raise
    return await remove_container(engine, made["Id"])
