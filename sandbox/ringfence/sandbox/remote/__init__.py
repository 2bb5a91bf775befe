"""Sandboxes on another machine: a sandbox host runs them with the native backend, a kernel reaches it over mutual TLS.

`RemoteSandbox` is the kernel's side; `host.SandboxHost` is the other. Nothing is shared between the two but one connection.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringfence.sandbox.remote.backend import RemoteSandbox, used
    from ringfence.sandbox.remote.link import RemoteSettings

__all__ = ["RemoteSandbox", "RemoteSettings", "used"]


def __getattr__(name: str) -> Any:
    """Load the kernel's side at first use: what runs a host alone needs nothing of it."""
    if name in __all__:
        return getattr(importlib.import_module("ringfence.sandbox.remote.backend"), name)
    raise AttributeError(f"module `{__name__}` has no `{name}`")
