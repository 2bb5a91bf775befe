"""Arguments and results on the wire: the same canonical JSON on every route.

Canonical is the JSON of the body's `Arguments` with keys sorted, defaults left out, `bytes` in base64,
integers as numbers, and numbers inside free JSON values without a fraction they don't need (`5.0` is `5`), so
that a call has one digest whether it came over the stream or as a protobuf message. A key given twice counts
once, with its last value; what is digested is what is executed. Free values hold finite numbers only. Whole
numbers beyond 2**63 are exact on the stream; a protobuf `Value` carries a double, so there they are what the
caller rounded them to.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec
from google.protobuf import json_format
from ringfence.syscalls.errors import Internal, InvalidRequest
from ringfence.syscalls.table import LIST_VALUE, VALUE, Row, int_range

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

ARGUMENTS_BYTES_MAX: Final = 4 << 20
DEPTH_MAX: Final = 64
_WHOLE_MAX: Final = 1 << 63
_AS_IT_IS: Final = frozenset({str, int, bool, type(None)})

Decoded: TypeAlias = tuple[Any, bytes, bytes]
"""The body's `Arguments`, their canonical JSON, and its SHA-256."""

_encode: Final = msgspec.json.Encoder(order="sorted").encode
_encode_result: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """What decoding one row's arguments takes, found once.

    Attributes:
        ints: name, least and greatest value of each integer field and of the values of each map of integers.
        free: fields that hold free JSON values: one, a list of them or a map of them.
        names: attribute by field; they differ where the field's name is a word of Python's.
    """

    decode: Callable[[bytes], Any]
    ints: tuple[tuple[str, int, int], ...]
    free: tuple[str, ...]
    names: Mapping[str, str]


_readers: Final[dict[type[msgspec.Struct], _Reader]] = {}


def decode_arguments(row: Row, raw: bytes, *, bytes_max: int = ARGUMENTS_BYTES_MAX) -> Decoded:
    """Decode a call's argument bytes.

    Raises:
        InvalidRequest: too large, too deep, no JSON, an unknown field, a wrong type, a number out of range, a
            NUL or an unpaired surrogate in a text; the message has the field's path.
    """
    if len(raw) > bytes_max:
        raise InvalidRequest(
            f"arguments of `{row.action}` have {len(raw)} bytes; at most {bytes_max} are taken"
        )
    reader = _readers.get(row.arguments) or _reader(row)
    try:
        arguments = reader.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"arguments of `{row.action}`: {_explain(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"arguments of `{row.action}`: {_explain_malformed(raw, error)}") from None
    except RecursionError:
        raise InvalidRequest(
            f"arguments of `{row.action}` are nested too deeply; at most {DEPTH_MAX} levels are taken"
        ) from None
    if b"\\u0000" in raw:
        _check_text(row, msgspec.structs.asdict(arguments))
    return _finish(row, reader, arguments)


def arguments_from_message(row: Row, message: Message) -> Decoded:
    """The same from a protobuf request message; equal arguments give equal canonical bytes.

    Raises:
        InvalidRequest: as for `decode_arguments`.
    """
    if message.ByteSize() > ARGUMENTS_BYTES_MAX:
        raise InvalidRequest(
            f"arguments of `{row.action}` have {message.ByteSize()} bytes; "
            f"at most {ARGUMENTS_BYTES_MAX} are taken"
        )
    reader = _readers.get(row.arguments) or _reader(row)
    fields = {proto.name: _from_field(message, proto) for proto in row.request.fields}
    _check_text(row, fields)
    named = {reader.names[name]: value for name, value in fields.items()}
    return _finish(row, reader, row.arguments(**named))


def encode_result(row: Row, result: object) -> bytes:
    """A body's `Result` as the JSON that is recorded and answered.

    Raises:
        Internal: the body answered with something that JSON or UTF-8 can't hold.
    """
    if type(result) is not row.result:
        raise Internal(f"`{row.action}` answered with a `{type(result).__name__}`; report this")
    try:
        return _encode_result(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise Internal(f"the result of `{row.action}` can't be encoded: {error}; report this") from error


def result_to_message(row: Row, result: bytes) -> Message:
    """Recorded result bytes as the protobuf response message.

    Raises:
        Internal: the bytes are no result of this row.
    """
    try:
        return json_format.ParseDict(json.loads(result), row.response_class())
    except (json_format.ParseError, ValueError) as error:
        raise Internal(
            f"the recorded result of `{row.action}` can't be read: {error}; report this"
        ) from error


def canonical_json(value: object) -> bytes:
    """Canonical JSON of a free value, as `decode_arguments` leaves it."""
    return _encode(value)


def _reader(row: Row) -> _Reader:
    ints: list[tuple[str, int, int]] = []
    free: list[str] = []
    for proto in row.request.fields:
        leaf = proto
        if proto.message_type is not None and proto.message_type.GetOptions().map_entry:
            leaf = proto.message_type.fields_by_name["value"]
        bounds = int_range(leaf)
        if bounds is not None:
            ints.append((proto.name, *bounds))
        elif leaf.message_type is not None:
            if leaf.message_type.full_name not in (VALUE, LIST_VALUE):
                raise Internal(
                    f"`{row.action}` takes a nested message in `{proto.name}`, which no codec knows"
                )
            free.append(proto.name)
    names = {field.encode_name: field.name for field in msgspec.structs.fields(row.arguments)}
    attributes = [(names[name], least, greatest) for name, least, greatest in ints]
    reader = _Reader(
        decode=msgspec.json.Decoder(row.arguments).decode,
        ints=tuple(attributes),
        free=tuple(names[name] for name in free),
        names=names,
    )
    _readers[row.arguments] = reader
    return reader


def _finish(row: Row, reader: _Reader, arguments: Any) -> Decoded:
    for name, least, greatest in reader.ints:
        value = getattr(arguments, name)
        if value is None or (type(value) is int and least <= value <= greatest):
            continue
        _check_ints(row, name, value, least, greatest)
    if reader.free:
        changed = {name: _free(row, getattr(arguments, name), name) for name in reader.free}
        arguments = msgspec.structs.replace(arguments, **changed)
    canonical = _encode(arguments)
    return arguments, canonical, hashlib.sha256(canonical).digest()


def _check_ints(row: Row, name: str, value: Any, least: int, greatest: int) -> None:
    if isinstance(value, Mapping):
        items = list(cast("Mapping[str, int]", value).items())
    elif isinstance(value, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(cast("Sequence[int]", value))]
    else:
        items = [("", cast("int", value))]
    for key, item in items:
        if not least <= item <= greatest:
            path = f"{name}.{key}" if key else name
            raise InvalidRequest(
                f"arguments of `{row.action}`: `{path}` is {item}; "
                f"it has to lie between {least} and {greatest}"
            )


class _OddError(Exception):
    """A free value holds what it may not."""


def _free(row: Row, value: Any, name: str) -> Any:
    """As `_normal`, several times as fast where nothing is wrong: a saved state may have tens of thousands of values."""
    if type(value) in _AS_IT_IS:
        return value
    try:
        return _quick(value, 1)
    except _OddError:
        return _normal(row, value, (name,))


def _quick(value: Any, depth: int) -> Any:
    kind = cast("type[object]", type(value))
    if kind is float and math.isfinite(value):
        return int(value) if value.is_integer() and -_WHOLE_MAX < value < _WHOLE_MAX else value
    if depth <= DEPTH_MAX:
        below = depth + 1
        if kind is dict:
            return {
                key: item if type(item) in _AS_IT_IS else _quick(item, below) for key, item in value.items()
            }
        if kind is list:
            return [item if type(item) in _AS_IT_IS else _quick(item, below) for item in value]
    raise _OddError


def _normal(row: Row, value: Any, path: tuple[str, ...]) -> Any:
    """A free value with whole floats as integers; refuses what JSON or the depth limit can't take."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(
                f"arguments of `{row.action}`: `{'.'.join(path)}` is not a finite number; give one"
            )
        return int(value) if value.is_integer() and -_WHOLE_MAX < value < _WHOLE_MAX else value
    if not isinstance(value, (list, dict, tuple)):
        return value
    if len(path) > DEPTH_MAX:
        raise InvalidRequest(
            f"arguments of `{row.action}`: `{path[0]}` is nested deeper than {DEPTH_MAX} levels; make it flatter"
        )
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {key: _normal(row, item, (*path, key)) for key, item in members.items()}
    items = cast("Sequence[Any]", value)
    return [_normal(row, item, (*path, str(index))) for index, item in enumerate(items)]


def _check_text(row: Row, fields: Mapping[str, Any]) -> None:
    """Refuse a NUL or an unpaired surrogate in any text, naming where it is."""
    found = _find_bad_text(fields)
    if found is not None:
        path, what = found
        raise InvalidRequest(f"arguments of `{row.action}`: `{path}` holds {what}; remove it")


def _find_bad_text(root: Any) -> tuple[str, str] | None:
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str):
            fault = _bad_text(value)
            if fault:
                return path, fault
        elif isinstance(value, Mapping):
            for key, item in cast("Mapping[str, Any]", value).items():
                fault = _bad_text(key)
                if fault:
                    return f"{path} (a key)".strip(), fault
                pending.append((f"{path}.{key}" if path else key, item))
        elif isinstance(value, (list, tuple)):
            items = cast("Sequence[Any]", value)
            pending.extend((f"{path}.{index}", item) for index, item in enumerate(items))
    return None


def holds_nul(value: Any) -> bool:
    """Whether a JSON value of somebody else's holds a NUL character, which the database keeps in no text."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(holds_nul(key) or holds_nul(one) for key, one in cast("dict[str, Any]", value).items())
    return isinstance(value, list) and any(holds_nul(one) for one in cast("list[Any]", value))


def _bad_text(text: str) -> str:
    if "\x00" in text:
        return "a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "an unpaired surrogate"
    return ""


def _explain(error: msgspec.ValidationError) -> str:
    """A validation error in the house's form; the library's own text already has path and type."""
    text = str(error)
    what, _, path = text.partition(" - at ")
    where = path.strip("`").removeprefix("$").lstrip(".")
    what = what[:1].lower() + what[1:]
    return f"`{where}`: {what}" if where else what


def _explain_malformed(raw: bytes, error: msgspec.DecodeError | UnicodeDecodeError) -> str:
    # The decoder's text for an unpaired surrogate speaks of truncated input; look again, on this rare path
    # only.
    if b"\\u" in raw:
        try:
            found = _find_bad_text(json.loads(raw))
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            return f"`{found[0]}` holds {found[1]}; remove it"
    text = str(error)
    return text[:1].lower() + text[1:]


def _from_field(message: Message, proto: FieldDescriptor) -> Any:
    value: Any = getattr(message, proto.name)
    entry = proto.message_type
    if entry is None:
        if proto.is_repeated:
            return list(value)
        return None if proto.has_presence and not message.HasField(proto.name) else value
    if entry.GetOptions().map_entry:
        free = entry.fields_by_name["value"].message_type is not None
        return {key: _from_value(item, 0) if free else item for key, item in value.items()}
    if proto.is_repeated:
        return [_from_value(item, 0) for item in value]
    return _from_value(value, 0)


def _from_value(value: Any, depth: int) -> Any:
    """A `google.protobuf.Value` or `ListValue` as plain JSON."""
    if depth > DEPTH_MAX:
        raise InvalidRequest(f"a value is nested deeper than {DEPTH_MAX} levels; make it flatter")
    if value.DESCRIPTOR.full_name == LIST_VALUE:
        return [_from_value(item, depth + 1) for item in value.values]
    kind = value.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    if kind == "list_value":
        return _from_value(value.list_value, depth)
    if kind == "struct_value":
        return {key: _from_value(item, depth + 1) for key, item in value.struct_value.fields.items()}
    return getattr(value, kind)
