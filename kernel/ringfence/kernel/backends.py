"""Chooses the sandbox backend: from the kernel file and a manifest to a `Sandbox`. Each is made at first use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ringfence.kernel.config import Layout
from ringfence.kernel.environment import command_environment, interpreter_directories, warm_environment
from ringfence.policy.engines import DockerSpec, RemoteSpec
from ringfence.policy.kernel_file import KernelFile
from ringfence.policy.manifest_types import SandboxSpec
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import Sandbox, SandboxError

if TYPE_CHECKING:
    from ringfence.sandbox.docker import DockerSandbox, DockerSettings
    from ringfence.sandbox.remote import RemoteSandbox

log = logging.getLogger(__name__)

DEFAULT: Final = "native"
DOCKER_PLACE: Final = "sandboxes/docker"
"""Where in a data directory the docker backend keeps what it needs; not there where it was never used."""
REMOTE_PLACE: Final = "remote"
"""The same of the remote backend."""


class Backends:
    """The backends of one kernel.

    Args:
        layout: of its data directory.

    Attributes:
        file: answers the kernel file in force; set as soon as there is one.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.file: Callable[[], KernelFile] = KernelFile
        self._native = NativeSandbox(layout.data, warm_environment(layout.interpreter))
        self._docker: DockerSandbox | None = None
        self._remote: RemoteSandbox | None = None

    def name_for(self, boxes: Sequence[SandboxSpec]) -> str:
        """The backend of an agent: what its manifest names, else its parent's, else the kernel file's, else the native one.

        Args:
            boxes: of the agent and of all above it, nearest first.
        """
        named = next((box.backend for box in boxes if box.backend is not None), None)
        return named or self.file().sandbox.backend or DEFAULT

    def named(self, name: str) -> Sandbox:
        """A backend by its name."""
        if name == "docker":
            return self._with_docker()
        if name == "remote":
            # Made once: what runs elsewhere stays with its host, whatever a kernel file says later.
            self._remote = self._remote or remote_of(self._layout.data, self.file().remote)
            return self._remote
        return self._native

    def shown(self, name: str) -> Sequence[Path]:
        """What a backend's sandboxes have to see of this host for the interpreter; an image has its own."""
        return () if name == "docker" else (self._layout.interpreter, *interpreter_directories())

    def environment(self, name: str) -> Mapping[str, str]:
        """What every program and command is given, before what its manifest says."""
        if name == "docker":
            path = "/usr/local/bin:/usr/bin:/bin"
            return {"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108 - inside
        return command_environment(self._layout.interpreter)

    async def sweep(self) -> Sequence[str]:
        """End what earlier kernels of this data directory left, with whatever backend; a kernel adopts nothing.

        An engine that can't be asked now is asked again before its first sandbox; until then nothing of it starts.
        """
        ended = [*await self._native.sweep(), *await self._swept_elsewhere()]
        if (self._layout.data / DOCKER_PLACE).is_dir():
            package = import_module("ringfence.sandbox.docker")
            for sandbox in package.all_used(self._layout.data):
                try:
                    ended += await sandbox.sweep()
                except SandboxError as error:
                    log.warning(
                        "containers of an earlier kernel, if there are any, are not ended yet: %s", error
                    )
                finally:
                    await sandbox.close()
        return sorted(set(ended))

    async def _swept_elsewhere(self) -> Sequence[str]:
        package = (
            import_module("ringfence.sandbox.remote") if (self._layout.data / REMOTE_PLACE).is_dir() else None
        )
        sandbox = None if package is None else package.used(self._layout.data)
        if sandbox is None:
            return []
        try:
            return await sandbox.sweep()
        finally:
            await sandbox.close()

    def reconfigure(self) -> None:
        """The kernel file was read again: what starts from now on follows it."""
        if self._docker is not None:
            self._docker.configure(_settings(self.file().docker))

    async def close(self) -> None:
        """Let go of all of them."""
        await self._native.close()
        if self._docker is not None:
            await self._docker.close()
        if self._remote is not None:
            await self._remote.close()

    def _with_docker(self) -> DockerSandbox:
        if self._docker is None:
            self._docker = docker_of(self._layout.data, self.file().docker)
        return self._docker


def docker_of(data: Path, spec: DockerSpec) -> DockerSandbox:
    """The docker backend of a data directory. Loading it costs a while, so nobody pays who has no use for it."""
    package = import_module("ringfence.sandbox.docker")
    return package.DockerSandbox(data, _settings(spec))


def remote_of(data: Path, spec: RemoteSpec) -> RemoteSandbox:
    """The remote backend of a data directory."""
    package = import_module("ringfence.sandbox.remote")
    return package.RemoteSandbox(data, package.RemoteSettings(address=spec.address, certs=Path(spec.certs)))


def _settings(spec: DockerSpec) -> DockerSettings:
    package = import_module("ringfence.sandbox.docker")
    return package.DockerSettings(image=spec.image, runtime=spec.runtime, host=spec.host)
