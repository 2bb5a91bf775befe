"""The syscall table: one row per unary method of `ringfence.v1.SyscallService`, checked at boot.

The proto service is the table. This module reads the rows from its descriptor, imports the body of each and
holds the two against each other, so that a kernel with a row that has no body, or a body that disagrees with
its messages, never comes up.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from ringfence.syscalls.base import Effect, Recovery
from ringfence.v1 import options_pb2, syscalls_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from google.protobuf.message import Message

SERVICE: Final = "SyscallService"
VALUE: Final = "google.protobuf.Value"
LIST_VALUE: Final = "google.protobuf.ListValue"
STREAM_METHOD: Final = "Stream"

_INT_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_OPTIONAL: Final = (("room", 2), ("aside", 2), ("take_out", 1))
_OPTIONAL_ASYNC: Final = (("locate", 2), ("measure", 3), ("pointed", 2))
_RECOVERS: Final = frozenset({Recovery.RESTORE, Recovery.ROLL_FORWARD, Recovery.ASK_TARGET})


class TableError(Exception):
    """The table can't be built; the kernel must not start. `problems` has one line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One syscall.

    Attributes:
        action: name as policy and the journal know it, such as `fs.read`.
        method: name of the gRPC method.
        effect: the least effect of a call; `Plan.effect` may raise it.
        recovery: what recovery does with a call caught between effect and outcome.
        intent: whether an intent is committed before the body runs.
        point: whether a rollback point is taken before the effect.
        resource_field: request field that policy matches, or empty.
        request: descriptor of the request message.
        response: descriptor of the response message.
        request_class: generated class of the request.
        response_class: generated class of the response.
        arguments: the body's `Arguments`.
        result: the body's `Result`.
        body: the module.
        waits: whether the body has a `wait`, which goes before every try of its atomic work.
        prepares: whether the body has a `prepare`, which makes ready what its atomic work needs, and a `settle`.
        locates: whether the body has a `locate`, which finds out what the arguments name.
        measures: whether the body has a `measure`, which finds out what an allowed call takes.
        points: whether the body has a `pointed`, which finds what the arguments only point to.
        takes_out: whether the body has a `take_out`, which keeps binary parts of its arguments out of the journal, and an
            `aside`, which says how long they are.
    """

    action: str
    method: str
    effect: Effect
    recovery: Recovery
    intent: bool
    point: bool
    resource_field: str
    request: Descriptor
    response: Descriptor
    request_class: type[Message]
    response_class: type[Message]
    arguments: type[msgspec.Struct]
    result: type[msgspec.Struct]
    body: ModuleType
    waits: bool = False
    prepares: bool = False
    locates: bool = False
    measures: bool = False
    points: bool = False
    takes_out: bool = False


def body_name(action: str) -> str:
    """Full name of the module that is the body of `action`."""
    return f"ringfence.syscalls.{action.replace('.', '_')}"


def table_methods() -> Iterable[MethodDescriptor]:
    """The unary methods of the service, in the order of the .proto file."""
    service = syscalls_pb2.DESCRIPTOR.services_by_name[SERVICE]
    return [method for method in service.methods if method.name != STREAM_METHOD]


def build_table(actions: Collection[str] | None = None) -> Mapping[str, Row]:
    """Build the table.

    Args:
        actions: only these rows, for tests of single bodies; None: all, as the kernel does.

    Returns:
        Row by action, in the order of the .proto file.

    Raises:
        TableError: a row lacks its options or its body, or the two disagree. Names every problem, not only
            the first.
    """
    rows: dict[str, Row] = {}
    problems: list[str] = []
    seen: set[str] = set()
    for method in table_methods():
        options = method.GetOptions().Extensions[options_pb2.row]
        if options.action in seen:
            problems.append(f"`{method.name}`: action `{options.action}` is taken by another method")
            continue
        seen.add(options.action)
        if actions is not None and options.action not in actions:
            continue
        problems.extend(_check_options(method, options))
        body = _import_body(options.action, problems)
        if body is None or options.effect == 0 or options.recovery == 0:
            continue
        row, faults = _build_row(method, options, body)
        problems.extend(f"`{options.action}`: {fault}" for fault in faults)
        if row is not None:
            rows[row.action] = row
    if actions is not None:
        problems.extend(f"`{action}`: no such row" for action in actions if action not in seen)
    if problems:
        raise TableError(problems)
    return MappingProxyType(rows)


def _check_options(method: MethodDescriptor, options: options_pb2.Row) -> Iterable[str]:
    name = method.name
    if not options.action:
        yield f"`{name}`: has no action; give it `option (row)`"
    if options.effect == options_pb2.EFFECT_UNSPECIFIED:
        yield f"`{name}`: has no effect"
    if options.recovery == options_pb2.RECOVERY_UNSPECIFIED:
        yield f"`{name}`: has no recovery"
    # INVARIANT: whatever changes something is either preceded by an intent or commits together with its
    # outcome.
    atomic = options.recovery == options_pb2.RECOVERY_ATOMIC
    if not options.intent and not atomic and options.effect != options_pb2.EFFECT_READ:
        yield f"`{name}`: changes something without an intent and is not atomic"
    if options.resource_field and options.resource_field not in method.input_type.fields_by_name:
        yield f"`{name}`: the request has no field `{options.resource_field}`"


def _import_body(action: str, problems: list[str]) -> ModuleType | None:
    if not action:
        return None
    name = body_name(action)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        problems.append(f"`{action}`: has no body; write `{name}`")
        return None


def _build_row(
    method: MethodDescriptor, options: options_pb2.Row, body: ModuleType
) -> tuple[Row | None, list[str]]:
    recovery = Recovery(options.recovery)
    arguments = _struct_of(body, "Arguments")
    result = _struct_of(body, "Result")
    if arguments is None or result is None:
        return None, ["the body lacks `Arguments` or `Result`, or they are no `msgspec.Struct`"]
    faults = [
        *_check_functions(body, recovery),
        *check_struct(arguments, method.input_type, "Arguments"),
        *check_struct(result, method.output_type, "Result"),
    ]
    config = arguments.__struct_config__
    if not (config.frozen and config.forbid_unknown_fields and config.omit_defaults):
        faults.append("`Arguments` must be frozen, forbid unknown fields and omit defaults")
    row = Row(
        action=options.action,
        method=method.name,
        effect=Effect(options.effect),
        recovery=recovery,
        intent=options.intent,
        point=options.point,
        resource_field=options.resource_field,
        request=method.input_type,
        response=method.output_type,
        request_class=GetMessageClass(method.input_type),
        response_class=GetMessageClass(method.output_type),
        arguments=arguments,
        result=result,
        body=body,
        waits=recovery is Recovery.ATOMIC and hasattr(body, "wait"),
        prepares=recovery is Recovery.ATOMIC and hasattr(body, "prepare"),
        locates=hasattr(body, "locate"),
        measures=hasattr(body, "measure"),
        points=hasattr(body, "pointed"),
        takes_out=hasattr(body, "take_out"),
    )
    return row, faults


def _struct_of(body: ModuleType, name: str) -> type[msgspec.Struct] | None:
    found: object = getattr(body, name, None)
    return found if isinstance(found, type) and issubclass(found, msgspec.Struct) else None


def _check_functions(body: ModuleType, recovery: Recovery) -> Iterable[str]:
    plain: list[tuple[str, int]] = [("plan", 2)]
    awaited: list[tuple[str, int]] = []
    if recovery is Recovery.ATOMIC:
        plain.append(("finish", 2))
        if hasattr(body, "prepare"):
            awaited += [("prepare", 2), ("settle", 3)]
        else:
            plain.append(("transaction", 1))
        if hasattr(body, "wait"):
            awaited.append(("wait", 2))
    else:
        awaited.append(("run", 2))
    plain += [item for item in _OPTIONAL if hasattr(body, item[0])]
    awaited += [item for item in _OPTIONAL_ASYNC if hasattr(body, item[0])]
    if recovery is Recovery.REPEAT and hasattr(body, "run_at_once"):
        plain += [("plan_at_once", 2), ("run_at_once", 2)]
    if recovery in _RECOVERS:
        awaited.append(("recover", 2))
    for name, count in plain:
        yield from _check_function(body, name, count, want_async=False)
    for name, count in awaited:
        yield from _check_function(body, name, count, want_async=True)


def _check_function(body: ModuleType, name: str, count: int, *, want_async: bool) -> Iterable[str]:
    function: Callable[..., Any] | None = getattr(body, name, None)
    if function is None or not inspect.isfunction(function):
        yield f"the body lacks `{name}`"
    elif inspect.iscoroutinefunction(function) != want_async:
        yield f"`{name}` must {'' if want_async else 'not '}be async"
    elif len(inspect.signature(function).parameters) != count:
        yield f"`{name}` must take {count} arguments"


def check_struct(struct: type[msgspec.Struct], message: Descriptor, where: str) -> Iterable[str]:
    """Hold a struct against a message: the same fields, in the same order, of the types that correspond.

    Yields:
        One line a difference.
    """
    fields = msgspec.structs.fields(struct)
    names = [field.encode_name for field in fields]
    wanted = [field.name for field in message.fields]
    if names != wanted:
        yield f"`{where}` has fields {names}, the message `{message.name}` has {wanted}"
        return
    for field, proto in zip(fields, message.fields, strict=True):
        yield from _check_type(field.type, proto, f"{where}.{field.name}")
        if field.default is not msgspec.NODEFAULT and field.default not in _zeros(proto):
            yield f"`{where}.{field.name}` has default {field.default!r}, which is not the message's"
        # INVARIANT: canonical bytes leave defaults out, and the encoder knows empty only by these.
        if field.default_factory not in (msgspec.NODEFAULT, list, dict):
            yield f"`{where}.{field.name}` has a default that is always encoded; write `= {{}}` or `= []`"


def _zeros(proto: FieldDescriptor) -> tuple[object, ...]:
    if proto.message_type is not None or proto.has_presence:
        return (None, ())
    return (proto.default_value, ())


def _check_type(found: Any, proto: FieldDescriptor, where: str) -> Iterable[str]:
    entry = proto.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = get_args(found) if get_origin(found) is dict else (None, None)
        if key is not str:
            yield f"`{where}` is {found!r}, the message has a map"
            return
        yield from _check_single(value, entry.fields_by_name["value"], where)
    elif proto.has_presence and entry is not None and type(None) in get_args(found):
        options = [option for option in get_args(found) if option is not type(None)]
        yield from _check_single(options[0], proto, where)
    elif proto.is_repeated:
        inner = get_args(found)
        if get_origin(found) not in (list, tuple) or not inner:
            yield f"`{where}` is {found!r}, the message has a repeated field"
            return
        yield from _check_single(inner[0], proto, where)
    elif proto.has_presence and entry is None:
        options = get_args(found)
        if len(options) != 2 or type(None) not in options:  # noqa: PLR2004 - one type and None
            yield f"`{where}` is {found!r}, the message's field is optional: add `| None`"
            return
        yield from _check_single(next(option for option in options if option is not type(None)), proto, where)
    else:
        yield from _check_single(found, proto, where)


def _check_single(found: Any, proto: FieldDescriptor, where: str) -> Iterable[str]:
    message = proto.message_type
    if message is None:
        expected = scalar_type(proto)
        if found is not expected:
            yield f"`{where}` is {found!r}, the message has {expected.__name__}"
    elif message.full_name == VALUE:
        if found is not Any:
            yield f"`{where}` is {found!r}, the message has any JSON value: use `Any`"
    elif message.full_name == LIST_VALUE:
        if get_origin(found) not in (list, tuple) or get_args(found)[:1] != (Any,):
            yield f"`{where}` is {found!r}, the message has a list of JSON values: use `list[Any]`"
    elif isinstance(found, type) and issubclass(found, msgspec.Struct):
        yield from check_struct(found, message, where)
    else:
        yield f"`{where}` is {found!r}, the message has `{message.name}`"


def scalar_type(proto: FieldDescriptor) -> type:
    """The Python type of a scalar field."""
    if proto.cpp_type in _INT_RANGES:
        return int
    if proto.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return bool
    if proto.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return float
    return bytes if proto.type == FieldDescriptor.TYPE_BYTES else str


def int_range(proto: FieldDescriptor) -> tuple[int, int] | None:
    """Least and greatest value of an integer field; None for any other field."""
    return _INT_RANGES.get(proto.cpp_type)
