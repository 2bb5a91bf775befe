"""The docker backend: one hardened container per sandbox, through the engine's socket. Needs the `docker` package.

`engine` is the only module that imports that package, and only when it is used.
"""

from __future__ import annotations

from ringfence.sandbox.docker.backend import DockerSandbox, DockerSettings, all_used

__all__ = ["DockerSandbox", "DockerSettings", "all_used"]
