"""What of an agent's environment is about the sandboxes of its commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ringfence.sandbox.direct import DirectLayer
from ringfence.sandbox.types import Limits, Sandbox


class Confined(Protocol):
    """How an agent's commands are confined."""

    @property
    def sandbox(self) -> Sandbox:
        """Backend for exec.run."""
        ...

    @property
    def limits(self) -> Limits:
        """Limits of the agent's sandboxes."""
        ...

    @property
    def command_env(self) -> Mapping[str, str]:
        """Environment of commands."""
        ...

    @property
    def readonly(self) -> Sequence[Path]:
        """Host directories seen inside sandboxes."""
        ...

    @property
    def mounts(self) -> Mapping[Path, Path]:
        """Directories of the host that its manifest names, by path inside.

        Raises:
            SandboxError: the kernel file in force allows one no longer, or it is gone.
        """
        ...

    @property
    def require(self) -> Sequence[str]:
        """Walls that its sandboxes have to have, as `CommandSpec.require`."""
        ...

    @property
    def uid(self) -> int | None:
        """Host uid of the agent's sandboxes; None: the kernel's own."""
        ...

    @property
    def direct(self) -> DirectLayer | None:
        """The overlay that its program works on; None: the program sees an image, and changes files by calls alone."""
        ...

    @property
    def scratch_root(self) -> Path:
        """Directory for the scratch of commands, on the workspace's file system."""
        ...
