"""Every way a syscall can fail, typed. The kernel's server turns them into gRPC status in one place.

A message is one lower-case line: what was refused, by which rule, and what to do. Input stands in backticks.
"""

from __future__ import annotations

from typing import ClassVar


class SyscallError(Exception):
    """Base of all refusals and failures of a syscall.

    Attributes:
        reason: stable name, the same in gRPC `ErrorInfo.reason`, in `Failure.reason` and in the agent library.
        outcome: what the journal records: `denied`, `refused`, `error`, `unknown`, `cancelled` or `parked`.
        metadata: facts as strings, such as `rule`, `audit_id`, `retry_after_ms`.
    """

    reason: ClassVar[str] = "Internal"
    outcome: ClassVar[str] = "error"

    def __init__(self, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = metadata


class InvalidRequest(SyscallError):
    """The request can't be decoded, is too large, or names something impossible."""

    reason = "InvalidRequest"
    outcome = "refused"


class BadCredential(SyscallError):
    """The token is not the one of this start."""

    reason = "BadCredential"
    outcome = "refused"


class Denied(SyscallError):
    """A rule denies it, or nothing allows it."""

    reason = "Denied"
    outcome = "denied"


class Revoked(SyscallError):
    """The permission was taken away, perhaps while the call ran."""

    reason = "Revoked"
    outcome = "denied"


class SnapshotFailed(SyscallError):
    """No verified rollback point could be taken, so the effect did not run."""

    reason = "SnapshotFailed"
    outcome = "refused"


class Stale(SyscallError):
    """What the agent had read is too old or was changed since."""

    reason = "Stale"
    outcome = "refused"


class Diverged(SyscallError):
    """A replayed step differs from what the journal holds."""

    reason = "Diverged"
    outcome = "refused"


class IdempotencyMismatch(SyscallError):
    """The same key came with other arguments."""

    reason = "IdempotencyMismatch"
    outcome = "refused"


class Fenced(SyscallError):
    """Another kernel owns the agent now."""

    reason = "Fenced"
    outcome = "refused"


class Conflict(SyscallError):
    """What was read is no longer current; names the keys and who changed them."""

    reason = "Conflict"
    outcome = "error"


class QuotaExceeded(SyscallError):
    """A rate or a window is full; `retry_after_ms` says when it refills."""

    reason = "QuotaExceeded"
    outcome = "refused"


class BudgetExhausted(SyscallError):
    """A total is spent; the operator can raise it."""

    reason = "BudgetExhausted"
    outcome = "refused"


class NoSuchResource(SyscallError):
    """The file, key, database or URL's resource does not exist."""

    reason = "NoSuchResource"
    outcome = "error"


class NoSuchSyscall(SyscallError):
    """The table has no such row."""

    reason = "NoSuchSyscall"
    outcome = "refused"


class Killed(SyscallError):
    """The operator ended the agent or cancelled the call."""

    reason = "Killed"
    outcome = "cancelled"


class Deadline(SyscallError):
    """The call took longer than its deadline."""

    reason = "Deadline"
    outcome = "error"


class JournalUnavailable(SyscallError):
    """The journal can't commit, so nothing ran."""

    reason = "JournalUnavailable"
    outcome = "refused"


class OutcomeUnknown(SyscallError):
    """A crash hid whether the effect happened; an operator settles it with `ringfence resolve`."""

    reason = "OutcomeUnknown"
    outcome = "unknown"


class AuditChainBroken(SyscallError):
    """The audit chain does not verify."""

    reason = "AuditChainBroken"
    outcome = "error"


class CallFailed(SyscallError):
    """The call ran and failed in an ordinary way: the target answered with an error."""

    reason = "CallFailed"
    outcome = "error"


class ReplyCut(SyscallError):
    """A model's reply ended too early: `partial` is what came, `tokens` and `usd` what was charged for it."""

    reason = "ReplyCut"
    outcome = "error"


class Internal(SyscallError):
    """A bug in Ringfence."""

    reason = "Internal"
    outcome = "error"
