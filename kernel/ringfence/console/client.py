"""The operator's side of the operator service. The only module of the console that knows gRPC."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, cast

# gRPC writes its own log lines to standard error unless told otherwise; a user gets one line from us instead.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from google.protobuf.message_factory import GetMessageClass
from ringfence.console import locate
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.v1 import operator_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import MethodDescriptor
    from google.protobuf.message import Message

_SERVICE = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
_REASON_KEY = "ringfence-reason"
_EXIT_KEY = "ringfence-exit-code"
_ANSWER_BYTES_MAX = 64 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
_EXIT_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
    grpc.StatusCode.UNIMPLEMENTED: ExitCode.USAGE,
    grpc.StatusCode.UNAUTHENTICATED: ExitCode.DENIED,
    grpc.StatusCode.PERMISSION_DENIED: ExitCode.DENIED,
    grpc.StatusCode.NOT_FOUND: ExitCode.MISSING,
    grpc.StatusCode.ABORTED: ExitCode.CONFLICT,
    grpc.StatusCode.ALREADY_EXISTS: ExitCode.CONFLICT,
    grpc.StatusCode.FAILED_PRECONDITION: ExitCode.CONFLICT,
    grpc.StatusCode.UNAVAILABLE: ExitCode.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.UNREACHABLE,
}


class CallError(ConsoleError):
    """The kernel refused or failed a call.

    Attributes:
        reason: stable name such as `Denied` or `NoSuchAgent`; empty where the failure isn't the kernel's own.
        lost: the connection ended, so the kernel may be gone.
    """

    def __init__(self, message: str, code: int, *, reason: str = "", lost: bool = False) -> None:
        super().__init__(message, code)
        self.reason = reason
        self.lost = lost


class Client:
    """One connection to a kernel. Answers are JSON documents as the kernel wrote them."""

    def __init__(self, address: str) -> None:
        """Connect.

        Args:
            address: `unix:/path` of the operator socket.

        Raises:
            ConsoleError: no kernel listens there, or this user may not use it.
        """
        locate.probe(address)
        self.address = address
        self._channel: Any = grpc.insecure_channel(address, options=_OPTIONS)

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def call(self, method: str, timeout_s: float | None = None, /, **fields: Any) -> dict[str, Any]:
        """Call a method that answers once.

        Args:
            method: its name in operator.proto.
            timeout_s: longest wait; None: as long as the kernel takes.
            **fields: the request's fields.

        Raises:
            CallError: the kernel refused or is gone.
        """
        descriptor = _SERVICE.methods_by_name[method]
        stub: Any = self._channel.unary_unary(_path(descriptor), _serialize, _reader(descriptor))
        request = GetMessageClass(descriptor.input_type)(**fields)
        try:
            return _document(stub(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise self._error(error) from None

    def documents(self, method: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Call a method that answers with a stream of JSON documents.

        Raises:
            CallError: as for `call`, while iterating.
        """
        for message in self._stream(method, fields):
            yield _document(message)

    def chunks(self, method: str, **fields: Any) -> Iterator[bytes]:
        """Call a method that answers with a stream of bytes.

        Raises:
            CallError: as for `call`, while iterating.
        """
        for message in self._stream(method, fields):
            yield cast("operator_pb2.Chunk", message).data

    def submit(self, header: dict[str, Any], workspace: Iterator[bytes]) -> dict[str, Any]:
        """Submit an agent.

        Args:
            header: fields of `SubmitHeader`.
            workspace: parts of the workspace's tar; may raise, which ends the call.

        Raises:
            CallError: as for `call`.
            ConsoleError: what `workspace` raised.
        """
        first = operator_pb2.SubmitRequest(header=operator_pb2.SubmitHeader(**header))
        return self._framed(
            "Submit", first, (operator_pb2.SubmitRequest(workspace=part) for part in workspace)
        )

    def take_in(self, header: dict[str, Any], parts: Iterator[bytes]) -> dict[str, Any]:
        """Import an agent.

        Args:
            header: fields of `ImportHeader`.
            parts: parts of the file; may raise, which ends the call.

        Raises:
            CallError: as for `call`.
            ConsoleError: what `parts` raised.
        """
        first = operator_pb2.ImportRequest(header=operator_pb2.ImportHeader(**header))
        return self._framed("Import", first, (operator_pb2.ImportRequest(data=part) for part in parts))

    def _framed(self, method: str, first: Message, rest: Iterator[Message]) -> dict[str, Any]:
        descriptor = _SERVICE.methods_by_name[method]
        stub: Any = self._channel.stream_unary(_path(descriptor), _serialize, _reader(descriptor))
        failed: list[ConsoleError] = []

        def frames() -> Iterator[Message]:
            yield first
            try:
                yield from rest
            except ConsoleError as error:
                # gRPC would log what an iterator raises. Half a workspace must not look like a whole one,
                # so the call is cancelled before the iterator ends.
                failed.append(error)
                call.cancel()

        call: Any = stub.future(frames())
        try:
            return _document(call.result())
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if failed:
                raise failed[0] from None
            raise self._error(error) from None
        except KeyboardInterrupt:
            call.cancel()
            raise

    def _stream(self, method: str, fields: dict[str, Any]) -> Iterator[Message]:
        descriptor = _SERVICE.methods_by_name[method]
        stub: Any = self._channel.unary_stream(_path(descriptor), _serialize, _reader(descriptor))
        call: Any = stub(GetMessageClass(descriptor.input_type)(**fields))
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def _error(self, error: Exception) -> CallError:
        if not isinstance(error, grpc.Call):
            return CallError("the call was cancelled", ExitCode.UNWELL)
        status = error.code()
        facts = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
        details = (error.details() or "").strip()
        if _REASON_KEY in facts or _EXIT_KEY in facts:
            code = facts.get(_EXIT_KEY, "")
            exit_code = int(code) if code.isdecimal() else _EXIT_BY_STATUS.get(status, ExitCode.UNWELL)
            return CallError(details or str(status), exit_code, reason=facts.get(_REASON_KEY, ""))
        return self._unexplained(status, details)

    def _unexplained(self, status: grpc.StatusCode, details: str) -> CallError:
        """Turn a failure of the transport, which carries none of the kernel's own facts, into a line."""
        exit_code = _EXIT_BY_STATUS.get(status, ExitCode.UNWELL)
        if status is grpc.StatusCode.UNAVAILABLE:
            text = f"the kernel at `{self.address}` went away; `ringfence status` says whether it is back"
            return CallError(text, exit_code, lost=True)
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            text = (
                f"the kernel at `{self.address}` does not answer; see its log, or stop it and start it again"
            )
            return CallError(text, exit_code)
        if status is grpc.StatusCode.UNIMPLEMENTED:
            text = f"the kernel at `{self.address}` does not know this call; it is of another version"
            return CallError(text, exit_code)
        name = status.name.lower().replace("_", " ")
        return CallError(" ".join(f"{name}: {details}".split()) if details else name, exit_code)


def _path(descriptor: MethodDescriptor) -> str:
    return f"/{_SERVICE.full_name}/{descriptor.name}"


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _reader(descriptor: MethodDescriptor) -> Any:
    return GetMessageClass(descriptor.output_type).FromString


def _document(message: Message) -> dict[str, Any]:
    try:
        answer = json.loads(cast("operator_pb2.Document", message).json)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CallError(
            "the kernel's answer is not a JSON document; is it of another version?", ExitCode.UNWELL
        )
    return cast("dict[str, Any]", answer)
