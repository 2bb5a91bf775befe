"""`rf-call ACTION JSON`: one call from a shell inside a sandbox, without the library.

It uses the unary methods, whose lanes the kernel gives out itself. Exit status: 0 done, 1 the call failed,
2 wrong usage, 3 denied, 6 no kernel reachable.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any, Final, cast

from google.protobuf import json_format, message_factory, struct_pb2
from ringfence.agent import status, wire
from ringfence.agent.errors import InvalidRequest, KernelGone, RingfenceError
from ringfence.agent.link import Link
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
LONGEST_MS: Final = 99_999_999  # what a header line has room for


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
    try:
        answer = _exchange(settings, method, request.SerializeToString(), timeout_s)
    except status.Ended as ended:
        raise _typed(ended, settings) from None
    return plain(message_factory.GetMessageClass(method.output_type).FromString(answer))


def _exchange(
    settings: wire.Settings, method: MethodDescriptor, request: bytes, timeout_s: float | None
) -> bytes:
    """Make one unary call; gives the answer as it came.

    Raises:
        Ended: there is none.
    """
    metadata = [("authorization", f"Bearer {settings.token}")]
    if timeout_s is not None:
        metadata.append(("grpc-timeout", f"{min(max(1, round(timeout_s * 1000)), LONGEST_MS)}m"))
    with contextlib.closing(
        Link(settings, f"/{method.containing_service.full_name}/{method.name}", metadata)
    ) as link:
        link.send(request, last=True)
        answers: list[bytes] = []
        while True:
            try:
                answers.append(link.receive(timeout_s))
            except TimeoutError:
                raise status.Ended("DEADLINE_EXCEEDED", f"no answer came within {timeout_s:g} s") from None
            except status.Ended as ended:
                if ended.code == "OK" and len(answers) == 1:
                    return answers[0]
                raise


def _request(method: MethodDescriptor, action: str, text: str) -> Message:
    request = message_factory.GetMessageClass(method.input_type)()
    try:
        return json_format.Parse(text, request)
    except json_format.ParseError as error:
        fields = ", ".join(field.name for field in method.input_type.fields) or "none"
        reason = " ".join(str(error).split())
        raise InvalidRequest(f"`{action}` can't take this JSON: {reason}; its fields: {fields}") from None


def _typed(ended: status.Ended, settings: wire.Settings) -> RingfenceError:
    failure = status.failure_of(ended)
    if failure is not None:
        return failure
    if ended.code == "UNAVAILABLE":
        return KernelGone(
            f"no kernel answers at `{settings.socket}` ({ended.detail}); see `ringfence status`"
        )
    return status.by_code(ended.code, ended.detail)


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
