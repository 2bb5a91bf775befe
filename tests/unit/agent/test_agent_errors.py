"""The library's errors are the kernel's, and keep what it said."""

from __future__ import annotations

import inspect

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from ringfence import agent
from ringfence.agent import errors, status
from ringfence.syscalls import errors as kernel_errors


def kernel_reasons() -> list[str]:
    kinds = [kind for _, kind in inspect.getmembers(kernel_errors, inspect.isclass)]
    return sorted(kind.reason for kind in kinds if issubclass(kind, kernel_errors.SyscallError))


def test_every_reason_of_the_kernel_has_its_class_here():
    for reason in kernel_reasons():
        assert errors.BY_REASON[reason].__name__ == reason
        assert getattr(agent, reason) is errors.BY_REASON[reason]


def test_no_class_here_is_a_reason_the_kernel_lacks():
    assert sorted(errors.BY_REASON) == sorted(set(kernel_reasons()))


def test_an_unknown_reason_is_kept():
    error = errors.from_reason("FutureThing", "not yet", {"rule": "r1"}, 7)
    assert type(error) is errors.RingfenceError
    assert (error.reason, error.message, error.metadata, error.step) == (
        "FutureThing",
        "not yet",
        {"rule": "r1"},
        7,
    )


def test_a_copy_for_another_thread_is_equal_and_fresh():
    error = errors.from_reason("Denied", "no", {"rule": "r1"}, 7)
    again = error.again()
    assert again is not error
    assert type(again) is errors.Denied
    assert (again.message, again.metadata, again.step) == ("no", {"rule": "r1"}, 7)


def packed(*messages: object) -> bytes:
    details = []
    for message in messages:
        part = any_pb2.Any()
        part.Pack(message)  # type: ignore[arg-type]
        details.append(part)
    return status_pb2.Status(code=7, message="no", details=details).SerializeToString()


def test_error_info_is_found_among_the_details():
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    info = error_details_pb2.ErrorInfo(
        reason="QuotaExceeded", domain="ringfence", metadata={"rule": "ü", "x": ""}
    )
    error = status.failure_of(status.Ended("RESOURCE_EXHAUSTED", "slow\ndown", packed(retry, info)))
    assert isinstance(error, errors.QuotaExceeded)
    assert error.message == "slow down"
    assert error.metadata == {"rule": "ü", "x": ""}


@pytest.mark.parametrize("data", [b"", b"\x1a\x7f", b"\xff\xff\xff", b"\x0d\x00\x00\x00\x00"])
def test_broken_details_are_no_error_info(data: bytes):
    assert status.failure_of(status.Ended("INTERNAL", "x", data)) is None


def test_a_bare_status_keeps_its_meaning():
    assert isinstance(status.by_code("UNAUTHENTICATED", ""), errors.BadCredential)
    assert status.by_code("OUT_OF_RANGE", "x").reason == "OutOfRange"


def test_the_names_of_the_codes_are_those_of_grpc():
    assert {code.name: code.value[0] for code in grpc.StatusCode} == {
        name: number for number, name in enumerate(status.NAMES)
    }
