"""`rf-call ACTION JSON`: one call from a shell inside a sandbox, without the library.

It uses the unary methods, whose lanes the kernel gives out itself. Exit status: 0 done, 1 the call failed,
2 wrong usage, 3 denied, 6 no kernel reachable.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
from google.protobuf import json_format, message_factory, struct_pb2
from ringfence.agent import status, wire
from ringfence.agent.errors import InvalidRequest, KernelGone, RingfenceError
from ringfence.v1 import options_pb2, syscalls_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
    from google.protobuf.message import Message

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
DENIED: Final = 3
NO_KERNEL: Final = 6
EXITS: Final[Mapping[str, int]] = {
    "InvalidRequest": USAGE,
    "NoSuchSyscall": USAGE,
    "Denied": DENIED,
    "Revoked": DENIED,
    "KernelGone": NO_KERNEL,
}
SERVICE: Final = "SyscallService"


def rows() -> dict[str, MethodDescriptor]:
    """Give the methods of the syscall table by action."""
    service = syscalls_pb2.DESCRIPTOR.services_by_name[SERVICE]
    table = {method.GetOptions().Extensions[options_pb2.row].action: method for method in service.methods}
    table.pop("", None)  # the stream, which is no row
    return table


def unary_call(
    settings: wire.Settings, action: str, text: str, timeout_s: float | None = None
) -> dict[str, Any]:
    """Make one call.

    Args:
        settings: where the kernel is.
        action: row name, such as `fs.read`.
        text: the request message as JSON.
        timeout_s: longest wait; None: the kernel's limit.

    Raises:
        InvalidRequest: there is no such action, or the JSON isn't its request.
        KernelGone: no kernel answers.
        RingfenceError: typed, as the kernel gives it.
    """
    method = rows().get(action)
    if method is None:
        raise InvalidRequest(f"there is no action `{action}`: choose one of {', '.join(sorted(rows()))}")
    request = _request(method, action, text)
    response = message_factory.GetMessageClass(method.output_type)
    with grpc.insecure_channel(settings.target, options=wire.CHANNEL_OPTIONS) as channel:
        call = cast("Any", channel).unary_unary(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            answer = call(
                request, timeout=timeout_s, metadata=(("authorization", f"Bearer {settings.token}"),)
            )
        except grpc.RpcError as error:
            raise _typed(error, settings) from None
    return plain(answer)


def _request(method: MethodDescriptor, action: str, text: str) -> Message:
    request = message_factory.GetMessageClass(method.input_type)()
    try:
        return json_format.Parse(text, request)
    except json_format.ParseError as error:
        fields = ", ".join(field.name for field in method.input_type.fields) or "none"
        reason = " ".join(str(error).split())
        raise InvalidRequest(f"`{action}` can't take this JSON: {reason}; its fields: {fields}") from None


def _typed(error: grpc.RpcError, settings: wire.Settings) -> RingfenceError:
    failure = status.failure_of(error)
    if failure is not None:
        return failure
    code, detail = status.code_of(error), status.detail_of(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        return KernelGone(f"no kernel answers at `{settings.socket}` ({detail}); see `ringfence status`")
    return status.by_code(code, detail)


def plain(message: Message) -> dict[str, Any]:
    """Give a message in the JSON form of the stream: fields by their own names, integers as numbers."""
    return {
        field.name: _field(field, getattr(message, field.name))
        for field in cast("list[FieldDescriptor]", message.DESCRIPTOR.fields)
        if not field.has_presence or message.HasField(field.name)
    }


def _field(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        item = field.message_type.fields_by_name["value"]
        return {key: _one(item, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_one(field, item) for item in value]
    return _one(field, value)


def _one(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is None:
        return base64.b64encode(value).decode() if field.type == field.TYPE_BYTES else value
    if field.message_type.file.name == struct_pb2.DESCRIPTOR.name:
        return _whole(json_format.MessageToDict(value))
    return plain(value)


def _whole(value: Any) -> Any:
    """Give whole numbers of a `google.protobuf.Value`, which has floats only, as whole numbers."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_whole(item) for item in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _explain(error: RingfenceError) -> Iterator[str]:
    yield f"rf-call: {error.reason}: {error.message}"
    for key in sorted(error.metadata):
        yield f"  {key}: {error.metadata[key]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit status."""
    parser = argparse.ArgumentParser(
        prog="rf-call",
        description="Make one call to the kernel from inside a sandbox and print its result as JSON.",
    )
    parser.add_argument("action", help="such as fs.read, or `list` to print all actions")
    parser.add_argument(
        "json", nargs="?", default="{}", help="the request as JSON; - reads it from standard input"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="longest wait")
    options = parser.parse_args(arguments)
    if options.action == "list":
        sys.stdout.write("".join(f"{action}\n" for action in sorted(rows())))
        return DONE
    text = sys.stdin.read() if options.json == "-" else options.json
    try:
        settings = wire.settings_from_environment()
        result = unary_call(settings, options.action, text, options.timeout)
    except RingfenceError as error:
        sys.stderr.write("".join(f"{line}\n" for line in _explain(error)))
        return EXITS.get(error.reason, FAILED)
    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
