"""The one place where typed errors become gRPC status."""

from __future__ import annotations

from typing import Any

from google.protobuf import any_pb2
from google.protobuf.message import Message
from ringfence.kernel.problems import Problem
from ringfence.kernel.server.stream import Stream
from ringfence.kernel.server.wire import Context, details, rpc, statuses
from ringfence.syscalls.errors import SyscallError

DOMAIN = "ringfence"

CODES: dict[str, Any] = {
    "InvalidRequest": rpc.StatusCode.INVALID_ARGUMENT,
    "BadCredential": rpc.StatusCode.UNAUTHENTICATED,
    "Denied": rpc.StatusCode.PERMISSION_DENIED,
    "Revoked": rpc.StatusCode.PERMISSION_DENIED,
    "SnapshotFailed": rpc.StatusCode.FAILED_PRECONDITION,
    "Stale": rpc.StatusCode.FAILED_PRECONDITION,
    "Diverged": rpc.StatusCode.FAILED_PRECONDITION,
    "IdempotencyMismatch": rpc.StatusCode.FAILED_PRECONDITION,
    "CallFailed": rpc.StatusCode.FAILED_PRECONDITION,
    "ReplyCut": rpc.StatusCode.FAILED_PRECONDITION,
    "Fenced": rpc.StatusCode.ABORTED,
    "Conflict": rpc.StatusCode.ABORTED,
    "QuotaExceeded": rpc.StatusCode.RESOURCE_EXHAUSTED,
    "BudgetExhausted": rpc.StatusCode.RESOURCE_EXHAUSTED,
    "NoSuchResource": rpc.StatusCode.NOT_FOUND,
    "NoSuchSyscall": rpc.StatusCode.UNIMPLEMENTED,
    "Killed": rpc.StatusCode.CANCELLED,
    "Deadline": rpc.StatusCode.DEADLINE_EXCEEDED,
    "JournalUnavailable": rpc.StatusCode.UNAVAILABLE,
    "OutcomeUnknown": rpc.StatusCode.UNKNOWN,
    "AuditChainBroken": rpc.StatusCode.DATA_LOSS,
    "Internal": rpc.StatusCode.INTERNAL,
}
"""gRPC status by reason; a test holds it against every error of `ringfence.syscalls.errors`."""

PROBLEM_CODES: dict[int, Any] = {
    1: rpc.StatusCode.FAILED_PRECONDITION,
    2: rpc.StatusCode.INVALID_ARGUMENT,
    3: rpc.StatusCode.PERMISSION_DENIED,
    4: rpc.StatusCode.NOT_FOUND,
    5: rpc.StatusCode.ABORTED,
    6: rpc.StatusCode.UNAVAILABLE,
}
"""gRPC status by the exit code that a command ends with."""


def rich_status(error: SyscallError) -> Any:
    """The status of an error with its `ErrorInfo`, and `RetryInfo` where a quota refills."""
    code = CODES[error.reason]
    parts = [_packed(details.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))]
    retry_ms = error.metadata.get("retry_after_ms")
    if retry_ms is not None:
        retry = details.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(retry_ms))
        parts.append(_packed(retry))
    number: int = code.value[0]
    return statuses.Status(code=number, message=error.message, details=parts)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def end_with(stream: Stream, error: SyscallError) -> None:
    """End an agent's call with an error."""
    status = rich_status(error)
    stream.end(status.code, status.message, status.SerializeToString())


async def abort_with_problem(context: Context, problem: Problem) -> None:
    """End an operator's call with one line and the exit code its command should use."""
    metadata = (("ringfence-reason", problem.reason), ("ringfence-exit-code", str(problem.exit_code)))
    await context.abort(PROBLEM_CODES[problem.exit_code], problem.message, metadata)
