"""The one place where typed errors become gRPC status."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status
from ringfence.kernel.problems import Problem
from ringfence.syscalls.errors import SyscallError

DOMAIN = "ringfence"

CODES: dict[str, grpc.StatusCode] = {
    "InvalidRequest": grpc.StatusCode.INVALID_ARGUMENT,
    "BadCredential": grpc.StatusCode.UNAUTHENTICATED,
    "Denied": grpc.StatusCode.PERMISSION_DENIED,
    "Revoked": grpc.StatusCode.PERMISSION_DENIED,
    "SnapshotFailed": grpc.StatusCode.FAILED_PRECONDITION,
    "Stale": grpc.StatusCode.FAILED_PRECONDITION,
    "Diverged": grpc.StatusCode.FAILED_PRECONDITION,
    "IdempotencyMismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "CallFailed": grpc.StatusCode.FAILED_PRECONDITION,
    "Fenced": grpc.StatusCode.ABORTED,
    "Conflict": grpc.StatusCode.ABORTED,
    "QuotaExceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "BudgetExhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NoSuchResource": grpc.StatusCode.NOT_FOUND,
    "NoSuchSyscall": grpc.StatusCode.UNIMPLEMENTED,
    "Killed": grpc.StatusCode.CANCELLED,
    "Deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "JournalUnavailable": grpc.StatusCode.UNAVAILABLE,
    "OutcomeUnknown": grpc.StatusCode.UNKNOWN,
    "AuditChainBroken": grpc.StatusCode.DATA_LOSS,
    "Internal": grpc.StatusCode.INTERNAL,
}
"""gRPC status by reason; a test holds it against every error of `ringfence.syscalls.errors`."""

PROBLEM_CODES: dict[int, grpc.StatusCode] = {
    1: grpc.StatusCode.FAILED_PRECONDITION,
    2: grpc.StatusCode.INVALID_ARGUMENT,
    3: grpc.StatusCode.PERMISSION_DENIED,
    4: grpc.StatusCode.NOT_FOUND,
    5: grpc.StatusCode.ABORTED,
    6: grpc.StatusCode.UNAVAILABLE,
}
"""gRPC status by the exit code that a command ends with."""


def rich_status(error: SyscallError) -> grpc.Status:
    """The status of an error with its `ErrorInfo`, and `RetryInfo` where a quota refills."""
    code = CODES[error.reason]
    details = [
        _packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    ]
    retry_ms = error.metadata.get("retry_after_ms")
    if retry_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(retry_ms))
        details.append(_packed(retry))
    number: int = code.value[0]
    return rpc_status.to_status(status_pb2.Status(code=number, message=error.message, details=details))


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def abort_with(context: aio.ServicerContext, error: SyscallError) -> None:
    """End a unary call of an agent with its error."""
    await context.abort_with_status(rich_status(error))


async def abort_with_problem(context: aio.ServicerContext, problem: Problem) -> None:
    """End an operator's call with one line and the exit code its command should use."""
    metadata = (("ringfence-reason", problem.reason), ("ringfence-exit-code", str(problem.exit_code)))
    await context.abort(PROBLEM_CODES[problem.exit_code], problem.message, metadata)
