"""gRPC statuses → typed errors. The kernel puts `google.rpc.ErrorInfo` into the status details."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import grpc
from ringfence.agent.errors import RingfenceError, from_reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DETAILS_KEY: Final = "grpc-status-details-bin"
ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"
LENGTH_DELIMITED: Final = 2
STATUS_DETAILS: Final = 3  # field of google.rpc.Status
INFO_METADATA: Final = 3  # field of google.rpc.ErrorInfo: a map, entries of key 1 and value 2
MORE: Final = 0x80  # a varint goes on

_CODES: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: "InvalidRequest",
    grpc.StatusCode.UNAUTHENTICATED: "BadCredential",
    grpc.StatusCode.PERMISSION_DENIED: "Denied",
    grpc.StatusCode.ABORTED: "Conflict",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "QuotaExceeded",
    grpc.StatusCode.NOT_FOUND: "NoSuchResource",
    grpc.StatusCode.UNIMPLEMENTED: "NoSuchSyscall",
    grpc.StatusCode.CANCELLED: "Killed",
    grpc.StatusCode.DEADLINE_EXCEEDED: "Deadline",
    grpc.StatusCode.UNAVAILABLE: "KernelGone",
    grpc.StatusCode.DATA_LOSS: "AuditChainBroken",
    grpc.StatusCode.INTERNAL: "Internal",
}

PASSING: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
"""How a stream ends when the kernel goes away: worth connecting again."""

PASSING_REASONS: Final = frozenset({"JournalUnavailable"})
"""Typed ends of a stream that pass by themselves."""


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """Give the status code; UNKNOWN where gRPC gives none."""
    code = getattr(error, "code", None)
    found = code() if callable(code) else None
    return found if isinstance(found, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def detail_of(error: grpc.RpcError) -> str:
    """Give the status text in one line."""
    details = getattr(error, "details", None)
    text = details() if callable(details) else ""
    return " ".join(str(text or "").split())


def failure_of(error: grpc.RpcError) -> RingfenceError | None:
    """Give the typed error of a status, None where it carries no `ErrorInfo`."""
    metadata = getattr(error, "trailing_metadata", None)
    pairs = cast("Any", metadata() if callable(metadata) else None) or ()
    for key, value in pairs:
        if key == DETAILS_KEY:
            info = _error_info(bytes(value))
            if info is not None:
                return from_reason(info[0], detail_of(error), info[1])
    return None


def by_code(code: grpc.StatusCode, detail: str) -> RingfenceError:
    """Give the typed error that a bare status code stands for."""
    return from_reason(_CODES.get(code, code.name.title().replace("_", "")), detail or code.name.lower())


def _error_info(data: bytes) -> tuple[str, dict[str, str]] | None:
    """Find `ErrorInfo` in a `google.rpc.Status`, whose messages are no dependency of an agent."""
    try:
        for number, value in _fields(data):
            if number == STATUS_DETAILS:
                message = dict(_fields(value))
                if message.get(1) == ERROR_INFO.encode():
                    return _reason(message.get(2, b""))
    except (ValueError, IndexError):
        return None
    return None


def _reason(data: bytes) -> tuple[str, dict[str, str]]:
    reason, metadata = "", dict[str, str]()
    for number, value in _fields(data):
        if number == 1:
            reason = value.decode()
        elif number == INFO_METADATA:
            entry = dict(_fields(value))
            metadata[entry.get(1, b"").decode()] = entry.get(2, b"").decode()
    return reason, metadata


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Walk the length-delimited fields of a protobuf message; varints are skipped."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == LENGTH_DELIMITED:
            if at + value > len(data):
                raise ValueError("cut short")
            yield tag >> 3, data[at : at + value]
            at += value
        elif tag & 7:
            raise ValueError("unexpected wire type")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & (MORE - 1)) << shift
        if byte < MORE:
            return number, at
        shift += 7
