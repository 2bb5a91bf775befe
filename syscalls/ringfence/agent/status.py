"""gRPC statuses → typed errors. The kernel puts `google.rpc.ErrorInfo` into the status details."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ringfence.agent.errors import RingfenceError, from_reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DETAILS_KEY: Final = "grpc-status-details-bin"
ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"
LENGTH_DELIMITED: Final = 2
STATUS_DETAILS: Final = 3  # field of google.rpc.Status
INFO_METADATA: Final = 3  # field of google.rpc.ErrorInfo: a map, entries of key 1 and value 2
MORE: Final = 0x80  # a varint goes on

NAMES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""The status codes of gRPC by their numbers."""

_CODES: Final[Mapping[str, str]] = {
    "INVALID_ARGUMENT": "InvalidRequest",
    "UNAUTHENTICATED": "BadCredential",
    "PERMISSION_DENIED": "Denied",
    "ABORTED": "Conflict",
    "RESOURCE_EXHAUSTED": "QuotaExceeded",
    "NOT_FOUND": "NoSuchResource",
    "UNIMPLEMENTED": "NoSuchSyscall",
    "CANCELLED": "Killed",
    "DEADLINE_EXCEEDED": "Deadline",
    "UNAVAILABLE": "KernelGone",
    "DATA_LOSS": "AuditChainBroken",
    "INTERNAL": "Internal",
}

PASSING: Final = frozenset({"UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"})
"""How a stream ends when the kernel goes away: worth connecting again."""

PASSING_REASONS: Final = frozenset({"JournalUnavailable"})
"""Typed ends of a stream that pass by themselves."""


class Ended(Exception):
    """A gRPC call is over.

    Attributes:
        code: its status, one of `NAMES`; `OK`: the kernel ended it in order.
        detail: the status text in one line.
        details: `google.rpc.Status`, serialised; empty where there is none.
    """

    def __init__(self, code: str, detail: str = "", details: bytes = b"") -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = " ".join(detail.split())
        self.details = details


def failure_of(ended: Ended) -> RingfenceError | None:
    """Give the typed error of a status, None where it carries no `ErrorInfo`."""
    info = _error_info(ended.details)
    return None if info is None else from_reason(info[0], ended.detail, info[1])


def by_code(code: str, detail: str) -> RingfenceError:
    """Give the typed error that a bare status code stands for."""
    return from_reason(_CODES.get(code, code.title().replace("_", "")), detail or code.lower())


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
