"""Sandboxes on another machine: a sandbox host runs them with the native backend, a kernel reaches it over mutual TLS.

`RemoteSandbox` is the kernel's side; `host.serve` is the other. Nothing is shared between the two but one connection.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringfence.sandbox.remote.backend import RemoteSandbox

__all__ = ["RemoteSandbox"]


def __getattr__(name: str) -> Any:
    """Load the backend at first use: what runs a host alone needs nothing of it."""
    if name == "RemoteSandbox":
        return importlib.import_module("ringfence.sandbox.remote.backend").RemoteSandbox
    raise AttributeError(f"module `{__name__}` has no `{name}`")
