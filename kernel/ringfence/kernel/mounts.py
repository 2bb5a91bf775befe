"""Directories of the host that agents see read-only: what the operator allows, with all links resolved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ringfence.policy.demands import TREES_OF_THE_SYSTEM
from ringfence.policy.manifest_types import Mount


class MountRefused(Exception):
    """A directory can't be shown. `line` and `column` are those of the manifest.

    Args:
        mount: which.
        text: why, and what to do.
    """

    def __init__(self, mount: Mount, text: str) -> None:
        super().__init__(f"`sandbox.mounts` names `{mount.path}`, {text}")
        self.line = mount.line
        self.column = mount.column


def resolve(wanted: Iterable[Mount], allowed: Sequence[Mount], closed: Sequence[Path]) -> dict[Path, Path]:
    """Where what a manifest names really lies, by each path at which it is to be seen: as it is named, and where it lies.

    Args:
        wanted: what manifests name.
        allowed: what the kernel file allows, and all beneath.
        closed: files and directories that no agent may see.

    Raises:
        MountRefused: one is missing, isn't allowed, or would show what is closed.
    """
    roots = [Path(os.path.realpath(mount.path)) for mount in allowed]
    kept = [Path(os.path.realpath(path)) for path in closed]
    found: dict[Path, Path] = {}
    for mount in wanted:
        try:
            real = Path(mount.path).resolve(strict=True)
        except (OSError, RuntimeError):
            real = Path(mount.path)
        if not real.is_dir():
            raise MountRefused(mount, "which is no directory on this host; make it, or leave the mount out")
        # INVARIANT: judged is where it really lies, and that very path is what is mounted.
        there = "" if str(real) == mount.path else f" (it lies at `{real}`)"
        if not any(real.is_relative_to(root) for root in roots):
            names = ", ".join(f"`{one.path}`" for one in allowed) or "nothing"
            raise MountRefused(
                mount,
                f"which the kernel file does not allow{there}: its `spec.sandbox.mounts` allows {names}; "
                "ask the operator, or leave the mount out",
            )
        if real.parts[1:2] == () or real.parts[1] in TREES_OF_THE_SYSTEM:
            raise MountRefused(mount, f"which is never shown to an agent{there}; leave it out")
        for path in kept:
            if real.is_relative_to(path) or path.is_relative_to(real):
                raise MountRefused(
                    mount, f"where the kernel keeps what no agent may see (`{path}`); name another directory"
                )
        found[Path(mount.path)] = real
        found[real] = real
    return found
