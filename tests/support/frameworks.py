"""The frameworks of the examples, unmodified, in an environment that an operator would make: installed once for a lock file.

It is kept in `.recipes` of the repository, beside nothing that the kernel runs from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import ENDED, Scene, scene_of_its_own
from support.vendors import VendorHost

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DECLARED = "/srv/frameworks"
SITE = f"python{sys.version_info.major}.{sys.version_info.minor}"
"""Where packages lie beneath `lib`, for the Python of the kernel."""
LOCK = ROOT / "examples/requirements.lock"
# Imported once by the operator, so that what they are compiled to lies where no sandbox may write.
IMPORTED = (
    "minisweagent.run.mini",
    "minisweagent.models.litellm_model",
    "minisweagent.agents.interactive",
    "minisweagent.environments.local",
    "agents.mcp",
    "pydantic_ai.mcp",
    "pydantic_ai.models.openai",
    "langgraph.prebuilt",
    "langchain_openai",
)
QUIET = {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def installed() -> Path:
    """The environment's directory; skips, or in CI fails, where it can't be made."""
    digest = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:12]
    place = ROOT / ".recipes" / f"frameworks-{digest}"
    place.parent.mkdir(exist_ok=True)
    with (place.parent / "frameworks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "ready").exists():
            shutil.rmtree(place, ignore_errors=True)
            _install(place)
    return place


def _install(place: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    python = place / "bin/python"
    _run(uv, "venv", "--quiet", "--python", sys.executable, place)
    try:
        _run(uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", python, "-r", LOCK)
    except subprocess.CalledProcessError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"the frameworks can't be installed from a registry: {error.stderr.strip()[-300:]}")
    _run(python, "-c", "\n".join(f"import {name}" for name in IMPORTED))
    (place / "ready").touch()


def _run(*words: str | Path) -> None:
    subprocess.run(
        [str(word) for word in words],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **QUIET},
    )


class Recipe:
    """An example that runs, with the host of its model."""

    def __init__(self, name: str, place: Path, scene: Scene, host: VendorHost) -> None:
        self.directory = EXAMPLES / name
        self.place, self.scene, self.host = place, scene, host

    def other(self, name: str) -> Recipe:
        """Another example beside the same kernel and host."""
        return Recipe(name, self.place, self.scene, self.host)

    def submit(self, *, changed: Callable[[str], str] = str, files: dict[str, str] | None = None) -> str:
        """Submits the example's directory as `ringfence submit` would, from where the frameworks really lie; `files` come in place of its own."""
        manifest = (self.directory / "manifest.yaml").read_text().replace(DECLARED, str(self.place))
        inside = [path for path in self.directory.rglob("*") if path.is_file()]
        own = {str(path.relative_to(self.directory)): path.read_text() for path in inside}
        return self.scene.operator.submit(changed(manifest), {**own, **(files or {})})

    def reach(self, true: Callable[[], bool], message: str) -> None:
        """Waits for a state, for as long as anything below the kernel works: frameworks take their time to import."""
        assert self.scene.kernel.process
        eventually(true, message, of=self.scene.kernel.process.pid)

    def held(self) -> None:
        """Waits until the host holds a reply back."""
        self.reach(self.host.holding.is_set, "it does not ask so often")

    def end(self, agent: str, expect: str = "done") -> None:
        """Waits for the end."""
        self.reach(lambda: self.scene.show(agent)["state"] in ENDED, f"{agent} does not end")
        self.scene.await_end(agent, expect)


@contextlib.contextmanager
def recipe(name: str, server: Any, template: str, *, resources: str = "") -> Iterator[Recipe]:
    """An example's kernel, by its own kernel file and with more `resources`, lines of it, beside a scripted host."""
    place = installed()
    declared = (EXAMPLES / name / "ringfence.yaml").read_text()
    with contextlib.closing(VendorHost()) as host:
        config = declared.replace(DECLARED, str(place)).replace("http://127.0.0.1:8080/v1", host.base)
        config = config.replace("  resources:\n", f"  resources:\n{resources}")
        with scene_of_its_own(server, template, config=config) as scene:
            yield Recipe(name, place, scene, host)
