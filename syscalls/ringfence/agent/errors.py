"""What a call can raise inside an agent. Names are the kernel's: `Failure.reason` is the name of the class.

A message is one line that says what was refused, by which rule or limit, and what can be done about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


class RingfenceError(Exception):
    """Base of everything that this library raises. Reasons this version doesn't know come as this class.

    Attributes:
        message: one line for people.
        reason: the kernel's name for it, such as `Denied`.
        metadata: facts as strings, such as `rule`, `audit_id`, `retry_after_ms`.
        step: thread-wide sequence number of the call, as in `ringfence steps`; None where no call was made.
    """

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        step: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.step = step
        self.reason = reason or type(self).__name__

    def again(self) -> Self:
        """Give a fresh copy, for another thread or task that failed for the same cause."""
        return type(self)(self.message, metadata=self.metadata, step=self.step, reason=self.reason)


class InvalidRequest(RingfenceError):
    """The request can't be encoded or decoded, is too large, or names something impossible."""


class BadCredential(RingfenceError):
    """The token is not the one of this start."""


class Denied(RingfenceError):
    """A rule denies it, or nothing allows it."""


class Revoked(RingfenceError):
    """The permission was taken away, perhaps while the call ran."""


class SnapshotFailed(RingfenceError):
    """No verified rollback point could be taken, so the effect did not run."""


class Stale(RingfenceError):
    """What the agent had read is too old or was changed since."""


class Diverged(RingfenceError):
    """A replayed step differs from what the journal holds: the program isn't deterministic."""


class IdempotencyMismatch(RingfenceError):
    """The same key came with other arguments."""


class Fenced(RingfenceError):
    """Another kernel owns the agent now."""


class Conflict(RingfenceError):
    """What was read is no longer current, or a claim is lost or another's; names the keys and who changed them.

    `metadata["keys"]` names the keys, `metadata["conflicts"]` and `metadata["claims"]` say as JSON which version or fence each has
    now, and by which agent and step.
    """


class QuotaExceeded(RingfenceError):
    """A rate or a window is full; `metadata["retry_after_ms"]` says when it refills."""


class BudgetExhausted(RingfenceError):
    """A total is spent; the operator can raise it."""


class NoSuchResource(RingfenceError):
    """The file, key, database or URL's resource does not exist."""


class NoSuchSyscall(RingfenceError):
    """The kernel has no such action."""


class Killed(RingfenceError):
    """The operator ended the agent or cancelled the call."""


class Deadline(RingfenceError):
    """The call took longer than its deadline."""


class JournalUnavailable(RingfenceError):
    """The journal can't commit, so nothing ran."""


class OutcomeUnknown(RingfenceError):
    """A crash hid whether the effect happened; an operator settles it with `ringfence resolve`."""


class AuditChainBroken(RingfenceError):
    """The audit chain does not verify."""


class CallFailed(RingfenceError):
    """The call ran and failed in an ordinary way: the target answered with an error."""


class ReplyCut(RingfenceError):
    """A model's reply ended too early: `metadata["partial"]` is what came, `tokens` and `usd` what was charged."""


class CommandFailed(CallFailed):
    """A command of `exec.run(…, check=True)` did not exit with 0.

    Attributes:
        result: the whole result, a `ringfence.agent.values.Command`.
    """

    result: Any = None


class Internal(RingfenceError):
    """A bug in Ringfence."""


class KernelGone(RingfenceError):
    """There is no kernel: not inside a sandbox, or the connection could not be made again in time."""


class NoLane(RingfenceError):
    """The caller is a thread, task or process whose order of creation the library doesn't know."""


class CheckpointUnreadable(RingfenceError):
    """The checkpoint was saved by a newer program, or there is no upgrader from its version."""


def _kernel_reasons() -> dict[str, type[RingfenceError]]:
    local = {KernelGone, NoLane, CheckpointUnreadable, CommandFailed}
    return {kind.__name__: kind for kind in RingfenceError.__subclasses__() if kind not in local}


BY_REASON: Mapping[str, type[RingfenceError]] = _kernel_reasons()
"""Class of each reason that a kernel gives."""


def from_reason(
    reason: str, message: str, metadata: Mapping[str, str] | None = None, step: int | None = None
) -> RingfenceError:
    """Make the typed error for a failure; an unknown reason gives a `RingfenceError` that keeps it."""
    kind = BY_REASON.get(reason, RingfenceError)
    return kind(message, metadata=metadata, step=step, reason=reason)
