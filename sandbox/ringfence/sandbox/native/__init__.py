"""The native backend: Linux namespaces, Landlock, seccomp, and cgroups or rlimits; needs nothing installed.

`NativeSandbox` is loaded when it is asked for, because the launcher imports this package too and has to start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.sandbox.native.backend import NativeSandbox

__all__ = ["NativeSandbox"]


def __getattr__(name: str) -> object:
    """Load the backend on first use."""
    if name == "NativeSandbox":
        return importlib.import_module("ringfence.sandbox.native.backend").NativeSandbox
    raise AttributeError(name)
