"""Removes what the engine left in a directory and an ordinary user's kernel can't: an overlay's work directory is root's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringfence.sandbox.docker.engine import Engine
from ringfence.sandbox.docker.profile import profile
from ringfence.sandbox.docker.program import remove_container

_PLACE = "/scrub"
_CODE = (
    f"import os, shutil\nfor name in os.listdir('{_PLACE}'): shutil.rmtree(os.path.join('{_PLACE}', name))"
)
_MEMORY_BYTES = 128 << 20


async def scrub(engine: Engine, image: str, labels: Mapping[str, str], directory: Path) -> None:
    """Empty a directory from within a container of its own that sees nothing else.

    Raises:
        SandboxError: the engine refuses or can't be reached.
    """
    made: dict[str, Any] = await engine.call(
        lambda api: api.create_container_from_config(_request(image, labels, directory)), slow=True
    )
    try:
        await engine.call(lambda api: api.start(made["Id"]), slow=True)
        await engine.call(lambda api: api.wait(made["Id"]), slow=True)
    finally:
        await remove_container(engine, made["Id"])


def _request(image: str, labels: Mapping[str, str], directory: Path) -> dict[str, Any]:
    return {
        "Image": image,
        "Entrypoint": ["python3", "-I", "-S", "-c", _CODE],
        "Cmd": [],
        # The one container that is root inside, with the one right it needs; no agent's program ever runs in it.
        "User": "0:0",
        "Labels": dict(labels),
        "NetworkDisabled": True,
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": ["DAC_OVERRIDE"],
            "SecurityOpt": ["no-new-privileges:true", f"seccomp={profile()}"],
            "Memory": _MEMORY_BYTES,
            "MemorySwap": _MEMORY_BYTES,
            "PidsLimit": 8,
            "LogConfig": {"Type": "none"},
            "UsernsMode": "host",
            "Mounts": [{"Type": "bind", "Source": str(directory), "Target": _PLACE}],
        },
    }
