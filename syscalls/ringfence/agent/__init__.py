"""The library that agents import: every effect goes to the kernel as a judged, journaled, reversible call.

    from ringfence import agent

    with agent.boot() as rf:
        text = rf.fs.read_text("notes.md")

The connection, and with it gRPC, is imported at the first `boot`: importing this package costs next to
nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringfence.agent.errors import (
    AuditChainBroken,
    BadCredential,
    BudgetExhausted,
    CallFailed,
    CheckpointUnreadable,
    CommandFailed,
    Conflict,
    Deadline,
    Denied,
    Diverged,
    Fenced,
    IdempotencyMismatch,
    Internal,
    InvalidRequest,
    JournalUnavailable,
    KernelGone,
    Killed,
    NoLane,
    NoSuchResource,
    NoSuchSyscall,
    OutcomeUnknown,
    QuotaExceeded,
    ReplyCut,
    Revoked,
    RingfenceError,
    SnapshotFailed,
    Stale,
)

if TYPE_CHECKING:
    from ringfence.agent.aio import AsyncRingfence, boot_async
    from ringfence.agent.runtime import Ringfence, boot

_LATER = {
    "boot": "ringfence.agent.runtime",
    "Ringfence": "ringfence.agent.runtime",
    "boot_async": "ringfence.agent.aio",
    "AsyncRingfence": "ringfence.agent.aio",
}

__all__ = [
    "AsyncRingfence",
    "AuditChainBroken",
    "BadCredential",
    "BudgetExhausted",
    "CallFailed",
    "CheckpointUnreadable",
    "CommandFailed",
    "Conflict",
    "Deadline",
    "Denied",
    "Diverged",
    "Fenced",
    "IdempotencyMismatch",
    "Internal",
    "InvalidRequest",
    "JournalUnavailable",
    "KernelGone",
    "Killed",
    "NoLane",
    "NoSuchResource",
    "NoSuchSyscall",
    "OutcomeUnknown",
    "QuotaExceeded",
    "ReplyCut",
    "Revoked",
    "Ringfence",
    "RingfenceError",
    "SnapshotFailed",
    "Stale",
    "boot",
    "boot_async",
]


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(importlib.import_module(module), name)
